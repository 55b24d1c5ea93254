"""SamplingParams: what is refused, by name and with the remedy, and what is made of the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.records import RepetitionDetection, SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("logprobs", -2, "0 or more, or -1"),
        ("prompt_logprobs", 1.5, "a whole number"),
        ("prompt_logprobs", -2, "0 or more, or -1"),
        ("logit_bias", [1], "an object of token ids and numbers"),
        ("logit_bias", {"1": 1}, "the key '1'; keys must be token ids"),
        ("logit_bias", {-1: 1}, "the key -1; keys must be token ids"),
        ("logit_bias", {5: "much"}, "gives 5 'much'; it must be from -100 to 100"),
        ("logit_bias", {5: float("nan")}, "gives 5 nan"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "1,025 entries, the limit is 1,024"),
        ("allowed_token_ids", (), "is empty"),
        ("allowed_token_ids", 5, "a list of token ids"),
        ("allowed_token_ids", [1, "2"], "a list of token ids"),
        ("allowed_token_ids", [1, True], "a list of token ids"),
        ("allowed_token_ids", [2**31], "a list of token ids"),
        ("bad_words", "word", "a list of texts"),
        ("bad_words", ["  "], "1 to 128 characters that are not all spaces"),
        ("bad_words", ["x" * 129], "1 to 128 characters"),
        ("bad_words", ["x"] * 129, "129 words, the limit is 128"),
        ("bad_words_token_ids", ((1,), ()), "none of them empty"),
        ("thinking_token_budget", -1, "0 or more"),
        ("thinking_token_budget", True, "a whole number or None"),
        ("repetition_detection", {"max_pattern_size": 3}, "a RepetitionDetection or None"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_pattern_size": 257, "min_count": 2}, "max_pattern_size is 257; it must be from 1 to 256"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size is 4; .* max_pattern_size"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count is 1; it must be at least 2"),
        ({"max_pattern_size": "3"}, "max_pattern_size is '3'; it must be a whole number"),
    ],
)
def test_repetition_detection_is_refused_with_its_own_field(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"repetition_detection\.{complaint}") as caught:
        RepetitionDetection(**fields)
    assert caught.value.param == "repetition_detection"


def test_a_bias_is_clamped_and_lists_become_tuples() -> None:
    params = SamplingParams(logit_bias={3: -1000, 4: 7, 5: float("inf")}, allowed_token_ids=[3], bad_words=["x"])
    assert params.logit_bias == {3: -100.0, 4: 7.0, 5: 100.0}
    assert (params.allowed_token_ids, params.bad_words) == ((3,), ("x",))


def test_all_fields_survive_the_way_to_the_engine() -> None:
    params = SamplingParams(
        logprobs=-1,
        prompt_logprobs=3,
        logit_bias={3: 1.5},
        allowed_token_ids=(1, 2),
        bad_words=("x",),
        bad_words_token_ids=((1, 2), (3,)),
        repetition_detection=RepetitionDetection(max_pattern_size=5, min_count=3),
        thinking_token_budget=100,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n=2 is not supported: give the prompt that many times"),
        ({"n": True}, "n=True is not supported"),
        ({"best_of": 3}, "best_of=3 is not supported: .* keep the best"),
        ({"priority": 1}, "priority=1 is not supported: .*order of arrival"),
        ({"guided_decoding": {"json": {}}}, "use structured_outputs"),
        ({"temprature": 0}, "has no field 'temprature': did you mean temperature"),
        ({"zzz": 0}, "has no field 'zzz': there are temperature, "),
    ],
)
def test_fields_that_are_not_here_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        SamplingParams(**fields)
    assert refused.value.param in fields


def test_other_records_name_the_field_that_they_do_not_have_too() -> None:
    with pytest.raises(InvalidRequestError, match="StructuredOutputs has no field 'jsn': did you mean json"):
        StructuredOutputs(jsn={})  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="RepetitionDetection has no field 'n'"):
        RepetitionDetection(n=1)  # type: ignore[call-arg]


def test_fields_of_vllm_that_ask_for_nothing_are_accepted() -> None:
    asked: dict[str, Any] = {"n": 1, "best_of": None, "detokenize": True, "logits_processors": []}
    assert SamplingParams(temperature=0, **asked) == SamplingParams(temperature=0)
    with pytest.raises(InvalidRequestError, match="have names"):
        SamplingParams(0.5)  # type: ignore[misc]
