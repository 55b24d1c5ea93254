"""Request fields whose numbers matter, with the real engine and the built-in model."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.harness import openai_client, server

PROMPT = "The quick brown fox"
FLAGS = (
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "8",
    "--threads",
    "1",
    "--served-model-name",
    "m",
    "--max-logprobs",
    "-1",
)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with server([sys.executable, "-m", "octavo", "serve", "--port", "0", *FLAGS]) as process:
        yield openai_client(process)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    own = {n: fields.pop(n) for n in ("logprobs", "echo", "stream", "stop", "logit_bias") if n in fields}
    own = {"temperature": 0, "max_tokens": fields.pop("max_tokens", 8), **own}
    return client.completions.create(model="m", prompt=prompt, extra_body=fields, **own)


def ids(choice: Any) -> list[int]:
    return list(choice.model_extra["token_ids"])


def test_a_scored_text_has_the_numbers_that_it_had_when_it_was_generated(client: openai.OpenAI) -> None:
    made = complete(client, logprobs=3, return_token_ids=True).choices[0]
    whole = [*made.model_extra["prompt_token_ids"], *ids(made)]
    for fields in ({}, {"stream": True}):
        reply = complete(client, whole, echo=True, logprobs=3, max_tokens=0, **fields)
        told = [c.choices[0] for c in reply if c.choices] if fields else [reply.choices[0]]
        assert "".join(choice.text for choice in told) == PROMPT + made.text
        (scored,) = [choice.logprobs for choice in told if choice.logprobs.tokens]
        assert scored.token_logprobs[-8:] == made.logprobs.token_logprobs
        assert scored.top_logprobs[-8:] == made.logprobs.top_logprobs
        assert scored.tokens[-8:] == made.logprobs.tokens
        assert scored.token_logprobs[0] is None
        assert scored.text_offset[-8] == len(PROMPT)


def test_prompt_logprobs_are_those_of_the_echo_with_ranks(client: openai.OpenAI) -> None:
    reply = complete(client, echo=True, logprobs=2, max_tokens=1, prompt_logprobs=2, return_token_ids=True).choices[0]
    of_prompt, token_ids = reply.model_extra["prompt_logprobs"], reply.model_extra["prompt_token_ids"]
    assert of_prompt[0] is None
    for i, entry in enumerate(of_prompt[1:], 1):
        chosen = entry[str(token_ids[i])]
        assert chosen["logprob"] == reply.logprobs.token_logprobs[i]
        assert chosen["decoded_token"] == reply.logprobs.tokens[i]
        by_rank = sorted(entry.values(), key=lambda e: e["rank"])
        assert [e["logprob"] for e in by_rank] == sorted((e["logprob"] for e in by_rank), reverse=True)
        assert [e["rank"] for e in by_rank][:2] == [1, 2]
    talk = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    assert len(talk.model_extra["prompt_logprobs"]) == talk.usage.prompt_tokens


def test_the_whole_vocabulary_can_be_asked_for_where_the_server_lets_it(client: openai.OpenAI) -> None:
    told = complete(client, logprobs=-1, max_tokens=1, prompt_logprobs=-1).choices[0]
    all_of_it = told.logprobs.top_logprobs[0].values()
    assert len(told.model_extra["prompt_logprobs"][1]) == 49152
    assert 1 - 1e-3 < sum(math.exp(p) for p in all_of_it) <= 1 + 1e-3
    talk = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, logprobs=True, top_logprobs=-1
    )
    assert len(talk.choices[0].logprobs.content[0].top_logprobs) == 49152


def test_bias_allowed_ids_and_bad_words_steer_the_choice(client: openai.OpenAI) -> None:
    free = complete(client, return_token_ids=True).choices[0]
    first = ids(free)[0]
    assert first not in ids(complete(client, logit_bias={str(first): -100}, return_token_ids=True).choices[0])[:1]
    biased = complete(client, logit_bias={"33": 100}, return_token_ids=True, max_tokens=3).choices[0]
    assert ids(biased) == [33, 33, 33]
    assert set(ids(complete(client, allowed_token_ids=[40, 50, 60], return_token_ids=True).choices[0])) <= {40, 50, 60}
    word = free.text.split()[0]
    assert word in free.text
    assert word not in complete(client, bad_words=[word], max_tokens=20).choices[0].text.split()


def test_repetition_ends_a_request(client: openai.OpenAI) -> None:
    reply = complete(
        client,
        logit_bias={"33": 100},
        max_tokens=50,
        repetition_detection={"max_pattern_size": 2, "min_count": 3},
    )
    assert reply.choices[0].finish_reason == "repetition"
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize("included", [False, True])
def test_logprobs_keep_to_their_text_around_a_stop_string(client: openai.OpenAI, included: bool) -> None:
    greedy = complete(client, max_tokens=30).choices[0].text
    stop = greedy[20:29]
    fields = {"max_tokens": 30, "logprobs": 1, "stop": [stop, "never said"], "include_stop_str_in_output": included}
    whole = complete(client, **fields).choices[0]
    assert (whole.text, whole.finish_reason) == (greedy[: 29 if included else 20], "stop")
    offsets, tokens = whole.logprobs.text_offset, whole.logprobs.tokens
    for offset, token in zip(offsets, tokens, strict=True):
        assert offset <= len(whole.text)
        assert token.startswith(whole.text[offset : offset + len(token)])
    text, told = "", 0
    for chunk in complete(client, stream=True, **fields):
        choice = chunk.choices[0]
        text += choice.text
        assert choice.logprobs.tokens == tokens[told : told + len(choice.logprobs.tokens)]
        assert choice.logprobs.text_offset == offsets[told : told + len(choice.logprobs.tokens)]
        told += len(choice.logprobs.tokens)
        if told < len(offsets):
            assert offsets[told] >= len(text) or greedy.startswith(text)
    assert (text, told) == (whole.text, len(tokens))


def test_a_started_answer_is_finished_as_if_the_model_had_started_it(client: openai.OpenAI) -> None:
    user = {"role": "user", "content": "What is the capital of France?"}

    def ask(messages: list[Any], max_tokens: int, **fields: Any) -> Any:
        reply = client.chat.completions.create(
            model="m", messages=messages, temperature=0, max_tokens=max_tokens, extra_body=fields
        )
        return reply.choices[0].message.content

    whole = ask([user], 7)
    began = ask([user], 4)
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    rest = ask([user, {"role": "assistant", "content": began}], 3, **fields)
    assert began + rest == whole
    assert ask([user, {"role": "assistant", "content": began}], 3, echo=True, **fields) == whole


def test_a_truncated_prompt_is_its_end(client: openai.OpenAI) -> None:
    long = "word " * 900 + PROMPT
    cut = complete(client, long, truncate_prompt_tokens=4, return_token_ids=True).choices[0]
    assert len(cut.model_extra["prompt_token_ids"]) == 4
    assert cut.text == complete(client, cut.model_extra["prompt_token_ids"]).choices[0].text
    assert complete(client, long, truncate_prompt_tokens=-1).usage.prompt_tokens == 512 - 8
