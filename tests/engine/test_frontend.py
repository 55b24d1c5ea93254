from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.records import FinishReason, ReasoningTags, Request, RequestOutput, SamplingParams
from octavo.engine.frontend import MAX_GIVEN_TEMPLATES, Detokenizer, Frontend
from octavo.engine.model_location import locate_model
from octavo.engine.text_side import load_text_side, with_template
from tests.server.fake_engine import ByteTokenizer, FakeEngine, frontend, text_side

INFO = FakeEngine(EngineConfig("echo", max_model_len=100)).info


def door(seed: int = 0) -> Frontend:
    return frontend(INFO, seed)


def build(params: SamplingParams, num_tokens: int = 10, clamp: bool = False) -> Request:
    return door().build_request([65] * num_tokens, params, request_id="r", arrival_time=0.0, clamp_max_tokens=clamp)


def test_no_max_tokens_means_all_that_fits() -> None:
    assert build(SamplingParams(max_tokens=None)).params.max_tokens == 90


def test_an_explicit_max_tokens_must_fit_and_a_default_is_made_to() -> None:
    assert build(SamplingParams(max_tokens=90)).params.max_tokens == 90
    with pytest.raises(InvalidRequestError, match="at most 90") as caught:
        build(SamplingParams(max_tokens=91))
    assert caught.value.param == "max_tokens"
    assert build(SamplingParams(max_tokens=91), clamp=True).params.max_tokens == 90


def test_a_longer_model_length_is_advised_only_where_there_can_be_one() -> None:
    longest = frontend(msgspec.structs.replace(INFO, can_be_longer=False), 0)
    for made, advised in ((door(), True), (longest, False)):
        for count, max_tokens in ((100, 1), (10, 99)):
            with pytest.raises(InvalidRequestError) as caught:
                made.build_request(
                    [65] * count, SamplingParams(max_tokens=max_tokens), request_id="r", arrival_time=0.0
                )
            assert ("larger --max-model-len" in str(caught.value)) == advised
            assert ("the most that the model allows" in str(caught.value)) != advised


def test_a_prompt_must_leave_room_for_one_token() -> None:
    assert build(SamplingParams(max_tokens=None), num_tokens=99).params.max_tokens == 1
    with pytest.raises(InvalidRequestError, match="100 tokens, the limit is 99"):
        build(SamplingParams(max_tokens=None), num_tokens=100)


def test_a_prompt_that_the_cache_can_never_hold_is_refused() -> None:
    info = msgspec.structs.replace(INFO, max_prompt_tokens=48)
    with pytest.raises(InvalidRequestError, match="50 tokens, the limit is 48"):
        frontend(info).build_request([65] * 50, SamplingParams(), request_id="r", arrival_time=0.0)


def test_a_hopelessly_long_text_is_refused_without_tokenizing_it() -> None:
    class Reluctant(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            raise AssertionError("tokenized")

    with pytest.raises(InvalidRequestError, match="at least 200 tokens"):
        Frontend(Reluctant(), None, INFO, 0).encode("x" * 1000)


def test_a_request_without_a_seed_gets_one_that_the_engines_seed_decides() -> None:
    def seeds(first: int) -> list[int | None]:
        frontend = door(first)
        return [
            frontend.build_request([1], SamplingParams(), request_id="r", arrival_time=0.0).params.seed
            for _ in range(3)
        ]

    assert seeds(7) == seeds(7)
    assert len(set(seeds(7) + seeds(8))) == 6
    assert all(seed is not None and seed == int(float(seed)) for seed in seeds(7)), (
        "JavaScript reads numbers as float64"
    )
    assert build(SamplingParams(seed=-3)).params.seed == -3


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("stop_token_ids", (3, 257), "257, but the vocabulary ends at 256"),
        ("logit_bias", {257: 1}, "257, but the vocabulary ends at 256"),
        ("allowed_token_ids", (1, 999), "999, but the vocabulary ends at 256"),
        ("logprobs", 21, "21; the limit is 20"),
        ("logprobs", -1, "the whole vocabulary of 257; the limit is 20"),
        ("prompt_logprobs", 21, "21; the limit is 20"),
    ],
)
def test_parameters_beyond_the_model_are_refused_by_name(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        build(SamplingParams(**{field: value}))
    assert caught.value.param == field


def test_without_a_limit_the_whole_vocabulary_may_be_asked_for() -> None:
    info = msgspec.structs.replace(INFO, max_logprobs=-1)
    for wanted in (-1, 500):
        frontend(info).build_request([65], SamplingParams(logprobs=wanted), request_id="r", arrival_time=0.0)


def test_bad_words_are_written_with_and_without_a_space() -> None:
    params = build(SamplingParams(bad_words=("ab", " c"))).params
    assert params.bad_words_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99))


def test_a_thinking_budget_needs_tags_whose_tokens_are_filled_in() -> None:
    params = SamplingParams(thinking_token_budget=3)
    with pytest.raises(InvalidRequestError, match="--reasoning-parser") as caught:
        build(params)
    assert caught.value.param == "thinking_token_budget"
    tags = ReasoningTags(starts=("<t>",), ends=("</t>", "</T>"), is_open=False)
    request = door().build_request([65], params, request_id="r", arrival_time=0.0, reasoning=tags)
    assert request.reasoning == msgspec.structs.replace(tags, end_token_ids=tuple(b"</t>"))


def test_a_model_without_a_template_refuses_to_chat() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Frontend(ByteTokenizer(), None, INFO, 0).render_chat([{"role": "user", "content": "x"}])


def test_a_chosen_content_format_and_a_chosen_template_are_used() -> None:
    shows_it = "{{ messages[0].content }}"
    side = with_template(text_side(), shows_it)
    openai = Frontend(side.tokenizer, side.template, INFO, 0, content_format="openai")
    assert openai.render_chat([{"role": "user", "content": "x"}]) == "[{'type': 'text', 'text': 'x'}]"
    with pytest.raises(ConfigError, match=r"--chat-template is broken: Expected an expression.*line 1"):
        with_template(text_side(), "{% if %}")


def test_given_templates_are_kept_compiled_and_not_too_many_of_them() -> None:
    front, chat = door(), [{"role": "user", "content": "x"}]
    for i in [*range(MAX_GIVEN_TEMPLATES + 5), 7]:
        assert front.render_chat(chat, chat_template=f"{i} {{{{ messages[0].content }}}}") == f"{i} x"
    kept = front._given_template.cache_info()
    assert (kept.currsize, kept.hits) == (MAX_GIVEN_TEMPLATES, 1)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(None, 5, None), (7, 5, 7), (100, 5, 100), (-1, 5, 95), (-1, None, 99), (-1, 500, 1)],
)
def test_a_prompt_is_truncated_to_what_is_asked_or_fits(
    keep: int | None, max_tokens: int | None, kept: int | None
) -> None:
    assert door().num_kept(keep, max_tokens) == kept


def test_ids_beyond_the_tokenizers_vocabulary_have_no_bytes() -> None:
    assert door().token_bytes(5000) == b""
    assert door().visible_bytes(5000, skip_special_tokens=True) == b""


def test_text_is_held_back_until_its_characters_are_whole() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.feed(RequestOutput(request_id="r", text=b"a\xe2\x82")) == "a"
    assert detokenizer.feed(RequestOutput(request_id="r", text=b"\xac\xf0")) == "€"
    assert detokenizer.feed(RequestOutput(request_id="r", finish_reason=FinishReason.LENGTH)) == "\ufffd"


def test_the_built_in_model_brings_its_tokenizer_and_template() -> None:
    side = load_text_side(locate_model(EngineConfig()))
    tokenizer, template = side.tokenizer, side.template
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.visible_bytes(t, False) for t in token_ids).decode() == text
