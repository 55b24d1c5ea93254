from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.records import FinishReason, RepetitionDetection, SamplingParams
from octavo.engine.stop import StopChecker

EOS, STOP_ID = 100, 50


def make_checker(params: SamplingParams, num_prompt_tokens: int = 4, max_model_len: int = 1000) -> StopChecker:
    return StopChecker(params, {EOS}, num_prompt_tokens, max_model_len)


def run(
    checker: StopChecker, tokens: list[tuple[int, bytes]]
) -> tuple[bytes, FinishReason | None, int | str | None, list[bytes]]:
    """Push tokens until the end; returns all text, the reasons, and the text released with each token."""
    released = []
    for n, (token_id, text) in enumerate(tokens, 1):
        decision = checker.push(token_id, text, n)
        released.append(decision.released)
        if decision.finish_reason is not None:
            return b"".join(released), decision.finish_reason, decision.stop_reason, released
    return b"".join(released), None, None, released


def test_text_without_stop_strings_is_released_at_once() -> None:
    checker = make_checker(SamplingParams())
    assert run(checker, [(1, b"ab"), (2, b""), (3, b"c")]) == (b"abc", None, None, [b"ab", b"", b"c"])


def test_eos_ends_without_a_stop_reason() -> None:
    checker = make_checker(SamplingParams())
    assert run(checker, [(1, b"ab"), (EOS, b"")])[:3] == (b"ab", FinishReason.STOP, None)


def test_visible_text_of_eos_is_left_out_unless_it_is_to_be_included() -> None:
    tokens = [(1, b"ab"), (EOS, b"<end>")]
    checker = make_checker(SamplingParams(skip_special_tokens=False))
    assert run(checker, tokens)[:3] == (b"ab", FinishReason.STOP, None)
    checker = make_checker(SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True))
    assert run(checker, tokens)[:3] == (b"ab<end>", FinishReason.STOP, None)


def test_ignore_eos_runs_to_the_length() -> None:
    checker = make_checker(SamplingParams(ignore_eos=True, max_tokens=3))
    assert run(checker, [(1, b"a"), (EOS, b""), (EOS, b"")])[:3] == (b"a", FinishReason.LENGTH, None)


def test_ignored_eos_can_still_be_a_stop_token_id() -> None:
    checker = make_checker(SamplingParams(ignore_eos=True, stop_token_ids=(EOS,)))
    assert run(checker, [(EOS, b"")])[1:3] == (FinishReason.STOP, EOS)


def test_a_stop_token_id_is_the_stop_reason_and_its_text_is_left_out() -> None:
    tokens = [(1, b"ab"), (STOP_ID, b"!")]
    checker = make_checker(SamplingParams(stop_token_ids=(STOP_ID,)))
    assert run(checker, tokens)[:3] == (b"ab", FinishReason.STOP, STOP_ID)
    checker = make_checker(SamplingParams(stop_token_ids=(STOP_ID,), include_stop_str_in_output=True))
    assert run(checker, tokens)[:3] == (b"ab!", FinishReason.STOP, STOP_ID)


def test_a_stop_string_is_found_across_tokens_and_cut_off() -> None:
    tokens = [(1, b"hello S"), (2, b"TO"), (3, b"P world")]
    checker = make_checker(SamplingParams(stop=("STOP",)))
    assert run(checker, tokens) == (b"hello ", FinishReason.STOP, "STOP", [b"hello ", b"", b""])
    checker = make_checker(SamplingParams(stop=("STOP",), include_stop_str_in_output=True))
    assert run(checker, tokens) == (b"hello STOP", FinishReason.STOP, "STOP", [b"hello ", b"", b"STOP"])


def test_bytes_are_held_back_only_as_long_as_they_may_begin_a_stop_string() -> None:
    checker = make_checker(SamplingParams(stop=("aab",)))
    assert run(checker, [(1, b"a"), (2, b"a"), (3, b"a"), (4, b"c")])[3] == [b"", b"", b"a", b"aac"]


def test_a_stop_string_can_begin_and_end_inside_characters_of_several_tokens() -> None:
    text = "naïve → fin".encode()
    checker = make_checker(SamplingParams(stop=("→",)))
    tokens = [(i, text[i : i + 1]) for i in range(len(text))]
    assert run(checker, tokens)[:3] == ("naïve ".encode(), FinishReason.STOP, "→")


def test_a_lone_surrogate_as_stop_string_does_no_harm() -> None:
    checker = make_checker(SamplingParams(stop=("\ud800", "b")))
    assert run(checker, [(1, b"abc")])[:3] == (b"a", FinishReason.STOP, "b")


def test_of_two_stop_strings_the_one_that_ends_first_wins() -> None:
    checker = make_checker(SamplingParams(stop=("bcde", "cd")))
    assert run(checker, [(1, b"abcdef")])[:3] == (b"ab", FinishReason.STOP, "cd")


def test_of_two_stop_strings_with_one_end_the_longer_wins() -> None:
    checker = make_checker(SamplingParams(stop=("cd", "bcd")))
    assert run(checker, [(1, b"abcdef")])[:3] == (b"a", FinishReason.STOP, "bcd")


def test_a_stop_string_completed_by_eos_text_takes_precedence() -> None:
    params = SamplingParams(stop=("<end>",), skip_special_tokens=False, include_stop_str_in_output=True)
    assert run(make_checker(params), [(1, b"ab"), (EOS, b"<end>")])[:3] == (b"ab<end>", FinishReason.STOP, "<end>")


def test_nothing_stops_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=3, stop=("x",), stop_token_ids=(STOP_ID,))
    tokens = [(1, b"x"), (STOP_ID, b"!"), (2, b"ax")]
    assert run(make_checker(params), tokens) == (b"x!a", FinishReason.STOP, "x", [b"x", b"!", b"a"])
    assert run(make_checker(params), [(1, b"a"), (EOS, b""), (EOS, b"")])[1] is FinishReason.STOP


def test_a_stop_string_that_ends_after_min_tokens_counts_though_it_began_before() -> None:
    checker = make_checker(SamplingParams(min_tokens=2, stop=("xyx",)))
    assert run(checker, [(1, b"axy"), (2, b"x")])[:3] == (b"a", FinishReason.STOP, "xyx")


def test_what_is_held_back_comes_out_at_the_length() -> None:
    checker = make_checker(SamplingParams(stop=("STOP",), max_tokens=2))
    assert run(checker, [(1, b"S"), (2, b"TO")]) == (b"STO", FinishReason.LENGTH, None, [b"", b"STO"])


def test_what_is_held_back_comes_out_at_an_abort() -> None:
    checker = make_checker(SamplingParams(stop=("STOP",)))
    assert checker.push(1, b"aST", 1).released == b"a"
    assert checker.flush() == b"ST"
    assert checker.flush() == b""


def test_the_models_length_ends_a_request_before_its_max_tokens() -> None:
    checker = make_checker(SamplingParams(max_tokens=100), num_prompt_tokens=8, max_model_len=10)
    assert run(checker, [(1, b"a"), (2, b"b"), (3, b"c")])[:3] == (b"ab", FinishReason.LENGTH, None)
    checker = make_checker(SamplingParams(max_tokens=None), num_prompt_tokens=8, max_model_len=10)
    assert run(checker, [(1, b"a"), (2, b"b"), (3, b"c")])[:3] == (b"ab", FinishReason.LENGTH, None)


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    checker = make_checker(SamplingParams(max_tokens=1, stop=("b",)))
    assert run(checker, [(1, b"ab")])[:3] == (b"a", FinishReason.STOP, "b")


def naive(tokens: list[bytes], stops: list[str], include: bool, min_tokens: int) -> tuple[list[bytes], str | None]:
    """What should be released with each token, by looking at the whole text again for every byte."""
    text, shown = b"", 0
    released: list[bytes] = []
    for n, token in enumerate(tokens, 1):
        for byte in token:
            text += bytes([byte])
            ends = [stop for stop in stops if text.endswith(stop.encode())]
            if ends and n >= min_tokens:
                stop = max(ends, key=lambda s: len(s.encode()))
                cut = len(text) if include else len(text) - len(stop.encode())
                return [*released, text[shown:cut]], stop
        beginnings = [
            size for stop in stops for size in range(1, len(stop.encode())) if text.endswith(stop.encode()[:size])
        ]
        cut = len(text) - max(beginnings, default=0)
        released.append(text[shown:cut])
        shown = max(shown, cut)
    return released, None


@given(
    tokens=st.lists(st.text("abé", max_size=5).map(str.encode), max_size=12),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    split=st.booleans(),
)
@example(tokens=[b"aabaab"], stops=["aabaac", "baa"], include=False, min_tokens=0, split=True)
def test_stop_strings_match_as_a_naive_search_would(
    tokens: list[bytes], stops: list[str], include: bool, min_tokens: int, split: bool
) -> None:
    if split:
        tokens = [bytes([byte]) for token in tokens for byte in token]
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    _, reason, stop_reason, released = run(make_checker(params), [(1, token) for token in tokens])
    expected, stop = naive(tokens, stops, include, min_tokens)
    assert (released, stop_reason) == (expected, stop)
    assert reason is (FinishReason.STOP if stop is not None else None)


def repeats(tokens: list[int], shortest: int, longest: int, min_count: int) -> bool:
    return any(
        len(tokens) >= size * min_count and tokens[-size * min_count :] == tokens[-size:] * min_count
        for size in range(max(1, shortest), longest + 1)
    )


@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    shortest=st.integers(0, 4),
    extra=st.integers(0, 4),
    min_count=st.integers(2, 4),
    min_tokens=st.integers(0, 10),
)
@example(tokens=[0, 1, 2, 0, 1, 2], shortest=3, extra=0, min_count=2, min_tokens=0)  # the longest size alone
def test_a_repetition_ends_a_sequence_where_it_is_complete(
    tokens: list[int], shortest: int, extra: int, min_count: int, min_tokens: int
) -> None:
    longest = max(1, shortest + extra)
    detection = RepetitionDetection(max_pattern_size=longest, min_pattern_size=shortest, min_count=min_count)
    params = SamplingParams(repetition_detection=detection, max_tokens=100, min_tokens=min_tokens)
    ends = (n for n in range(1, len(tokens) + 1) if repeats(tokens[:n], shortest, longest, min_count))
    end = next((n for n in ends if n >= min_tokens), None)
    text, reason, why, released = run(make_checker(params), [(t, b"x") for t in tokens])
    assert (reason, why) == ((None, None) if end is None else (FinishReason.REPETITION, "repetition_detected"))
    assert text == b"x" * (len(tokens) if end is None else end)
    assert len(released) == len(text)


def test_a_pattern_size_of_zero_detects_nothing() -> None:
    checker = make_checker(SamplingParams(repetition_detection=RepetitionDetection(), max_tokens=100))
    assert run(checker, [(1, b"x")] * 50)[1] is None
