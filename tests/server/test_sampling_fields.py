"""Fields that steer sampling, over HTTP on the built-in model: what they do, alone and in company."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.harness import openai_client, server

FLAGS = ("--max-model-len=512", "--max-num-seqs=8", "--threads=1", "--reasoning-parser=deepseek_r1", "--max-logprobs=5")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with server([sys.executable, "-m", "octavo", "serve", "--port", "0", *FLAGS]) as process:
        yield openai_client(process)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    known = {name: fields.pop(name) for name in ("logprobs", "top_logprobs", "logit_bias") if name in fields}
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=MESSAGES,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=24,
        extra_body=fields,
        **known,
    )


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    name = client.models.list().data[0].id
    return client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=12, extra_body=fields)


def test_a_thinking_budget_ends_the_reasoning_and_then_comes_an_answer(client: openai.OpenAI) -> None:
    def parts(**fields: Any) -> tuple[str | None, str | None]:
        message = chat(client, **fields).choices[0].message
        return message.model_extra["reasoning"], message.content  # type: ignore[index]

    reasoning, content = parts()
    assert reasoning
    assert content is None, "the model never ends what it was not asked for"
    cut, answer = parts(thinking_token_budget=5)
    assert cut
    assert reasoning.startswith(cut)
    assert "Paris" in (answer or "")


def test_a_thinking_budget_counts_in_completions_too(client: openai.OpenAI) -> None:
    assert "</think>" not in complete(client).choices[0].text
    assert complete(client, thinking_token_budget=3).choices[0].text.startswith(complete(client).choices[0].text[:4])
    assert "</think>" in complete(client, thinking_token_budget=3).choices[0].text


def test_bad_words_do_not_come_and_a_repetition_ends_an_answer(client: openai.OpenAI) -> None:
    assert "Paris" in complete(client).choices[0].text
    assert "Paris" not in complete(client, bad_words=["Paris"]).choices[0].text
    detection = {"max_pattern_size": 2, "min_count": 3}
    choice = complete(client, allowed_token_ids=[260], repetition_detection=detection).choices[0]
    assert (choice.text, choice.finish_reason) == (" the the the", "repetition")
    assert choice.model_extra["stop_reason"] == "repetition_detected"


def test_fields_of_one_request_do_not_reach_its_neighbours(client: openai.OpenAI) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"bad_words": ["Paris", "the"]},
        {"allowed_token_ids": [260, 5000, 7042]},
        {"logit_bias": {"260": 5}},
        {"thinking_token_budget": 2},
    ]
    alone = [complete(client, **kind).choices[0].text for kind in kinds]
    assert len(set(alone)) == len(kinds)
    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(lambda kind: complete(client, **kind).choices[0].text, kinds * 4))
    assert together == alone * 4


def test_more_alternatives_than_the_server_gives_are_refused_by_the_flag(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"top_logprobs is 6; the limit is 5: .* a larger --max-logprobs"):
        chat(client, logprobs=True, top_logprobs=6)
    with pytest.raises(openai.BadRequestError, match=r"-1, the whole vocabulary of 49,152; the limit is 5"):
        complete(client, logprobs=-1)
