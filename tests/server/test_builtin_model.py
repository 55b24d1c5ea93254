"""The whole way with the real engine and the built-in model, started as a user starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel

from octavo.core.records import SamplingParams
from octavo.llm import LLM
from tests.server.harness import ServerProcess, metric, openai_client, server, wait_until

PROMPT = "The quick brown fox"
SMALL = ("--max-model-len", "512", "--max-num-seqs", "8", "--threads", "1")


@pytest.fixture(scope="module")
def octavo_server() -> Iterator[ServerProcess]:
    with server([sys.executable, "-m", "octavo", "serve", "--port", "0", *SMALL]) as process:
        yield process


def model_name(process: ServerProcess) -> str:
    return openai_client(process).models.list().data[0].id


def test_the_start_shows_where_the_memory_goes(octavo_server: ServerProcess) -> None:
    assert len(octavo_server.lines) > 3
    assert "Traceback" not in octavo_server.log


def test_the_model_knows_its_way_and_speaks_when_spoken_to(octavo_server: ServerProcess) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)
    fact = client.completions.create(model=name, prompt="The capital of France is", temperature=0, max_tokens=5)
    assert "Paris" in fact.choices[0].text
    reply = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=60
    )
    assert reply.choices[0].finish_reason == "stop"
    assert "hello" in (reply.choices[0].message.content or "").lower()


def test_a_stream_and_the_offline_llm_give_the_same_text_and_logprobs(octavo_server: ServerProcess) -> None:
    kwargs = {"model": model_name(octavo_server), "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "logprobs": 2}
    client = openai_client(octavo_server)
    whole = client.completions.create(**kwargs).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **kwargs)]
    assert "".join(c.text for c in chunks) == whole.text
    assert whole.logprobs is not None
    assert [p for c in chunks for p in c.logprobs.token_logprobs] == whole.logprobs.token_logprobs
    assert [p for c in chunks for p in c.logprobs.text_offset] == whole.logprobs.text_offset
    with LLM(max_model_len=512, max_num_seqs=8, threads=1) as llm:
        (result,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, logprobs=2))
    offline = result.outputs[0]
    assert offline.text == whole.text
    assert offline.logprobs is not None
    chosen = [entry[t].logprob for t, entry in zip(offline.token_ids, offline.logprobs, strict=True)]
    assert chosen == whole.logprobs.token_logprobs


def test_a_seeded_request_repeats_and_a_stop_string_stops(octavo_server: ServerProcess) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)
    first, again = (
        client.completions.create(model=name, prompt=PROMPT, seed=5, max_tokens=20).choices[0].text for _ in range(2)
    )
    assert first == again
    greedy = client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=20).choices[0].text
    stop = greedy.strip()[4:8]
    cut = client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=20, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (greedy[: greedy.index(stop)], "stop")


def test_a_seed_gives_the_same_text_in_any_company(octavo_server: ServerProcess) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)

    def ask(seed: int, **fields: Any) -> str:
        reply = client.completions.create(
            model=name, prompt=PROMPT, seed=seed, max_tokens=24, logprobs=3, extra_body=fields
        )
        return reply.choices[0].model_dump_json()

    drawn = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=24, logprobs=3, extra_body={"return_seed": True}
    ).choices[0]
    assert drawn.model_extra is not None
    seed = drawn.model_extra.pop("seed")
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(ask, seed if i % 2 else i, cache_salt=str(i)) for i in range(12)]
        replies = [future.result() for future in crowd]
    assert set(replies[1::2]) == {ask(seed), drawn.model_dump_json()}
    assert len(set(replies[::2])) == 6


def test_prompts_with_another_salt_share_no_cache(octavo_server: ServerProcess) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)

    def cached(salt: str) -> int:
        reply = client.completions.create(
            model=name, prompt="A secret told to one. " * 8, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("mine") > 0, cached("yours") > 0, cached("mine") > 0] == [False, False, True]


def test_a_repeated_prompt_is_found_in_the_prefix_cache(octavo_server: ServerProcess) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)
    prompt = "Once upon a time there was a cache. " * 8
    cached = []
    for _ in range(2):
        usage = client.completions.create(model=name, prompt=prompt, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] >= 48
    assert metric(octavo_server, "prefix_cache_hits_total") >= 48


def test_the_next_turn_of_a_response_finds_its_conversation_in_the_cache(octavo_server: ServerProcess) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)
    first = client.responses.create(
        model=name, input="Name three things that one can do in Paris.", temperature=0, max_output_tokens=40
    )
    second = client.responses.create(
        model=name, input="And in Rome?", previous_response_id=first.id, temperature=0, max_output_tokens=8
    )
    assert first.usage is not None
    assert second.usage is not None
    # The answer too: its tokens are those that the conversation is made of again.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.output_text != first.output_text


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_response_can_be_made_to_call(octavo_server: ServerProcess, choice: Any) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)
    asked: dict[str, Any] = {"model": name, "input": "How is the weather?", "max_output_tokens": 80, "temperature": 0}
    whole = client.responses.create(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, **asked)
    (call,) = whole.output
    assert (call.type, call.status, whole.status) == ("function_call", "completed", "completed")
    assert json.loads(call.arguments)["city"] in ("Bern", "Rome")
    with client.responses.stream(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, **asked) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    assert client.responses.create(**{**asked, "input": [result]}, previous_response_id=whole.id).output_text


class Person(BaseModel):
    name: str
    age: int


def test_a_response_can_be_held_to_a_schema_and_parsed(octavo_server: ServerProcess) -> None:
    client, name = openai_client(octavo_server), model_name(octavo_server)
    asked: dict[str, Any] = {"model": name, "input": "Who was Ada?", "max_output_tokens": 80, "temperature": 0}
    person = client.responses.parse(text_format=Person, **asked).output_parsed
    assert isinstance(person, Person)
    with client.responses.stream(text_format=Person, **asked) as stream:
        assert stream.get_final_response().output_parsed == person


def test_a_client_that_leaves_frees_its_blocks(octavo_server: ServerProcess) -> None:
    with openai_client(octavo_server) as client:
        stream = client.completions.create(
            model=model_name(octavo_server),
            prompt=PROMPT,
            stream=True,
            max_tokens=480,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        stream.close()
    wait_until(lambda: metric(octavo_server, "num_requests_running") == 0)
    assert metric(octavo_server, "kv_cache_usage_perc") == 0
