"""Structured output and forced calls on the built-in model, by the openai package, as a user has it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from octavo.core.errors import InvalidRequestError
from octavo.core.records import FinishReason, SamplingParams, StructuredOutputs
from octavo.llm import LLM
from tests.server.harness import ServerProcess, openai_client, server

SMALL = ("--max-model-len", "1024", "--max-num-seqs", "8", "--threads", "1")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


@pytest.fixture(scope="module")
def plain_server() -> Iterator[ServerProcess]:
    with server([sys.executable, "-m", "octavo", "serve", "--port", "0", *SMALL]) as process:
        yield process


@pytest.fixture(scope="module")
def tools_server() -> Iterator[ServerProcess]:
    with server([sys.executable, "-m", "octavo", "serve", "--port", "0", *SMALL, *TOOLS]) as process:
        yield process


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Person(BaseModel, extra="forbid"):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Mood
    friends: list[Mood] = Field(max_length=2)


class GetWeather(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: str = Field(max_length=10)
    days: int = Field(ge=1, le=9)


def ask(process: ServerProcess, question: str = "Tell me about a person.", **fields: Any) -> Any:
    client = openai_client(process)
    name = client.models.list().data[0].id
    fields = {"max_tokens": 200, "seed": 7, **fields}
    return client.chat.completions.create(model=name, messages=[{"role": "user", "content": question}], **fields)


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_pydantic_model_is_filled(plain_server: ServerProcess, temperature: float) -> None:
    client = openai_client(plain_server)
    for seed in range(2):
        reply = client.chat.completions.parse(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Tell me about a person."}],
            response_format=Person,
            temperature=temperature,
            max_tokens=400,
            seed=seed,
        )
        assert reply.choices[0].finish_reason == "stop"
        assert isinstance(reply.choices[0].message.parsed, Person)


def test_every_way_to_ask_gives_what_it_asks_for(plain_server: ServerProcess) -> None:
    ways: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [a-c] [a-c] ">"'}}, "<[a-c]{2}>"),
        ({"guided_grammar": 'start: "(" /[0-9]/ ")"'}, r"\([0-9]\)"),
        ({"structured_outputs": {"json": {"enum": [1, "b"]}}}, '1|"b"'),
        ({"guided_json": '{"enum": [1, "b"]}'}, '1|"b"'),
    ]
    for extra, pattern in ways:
        assert re.fullmatch(pattern, text_of(ask(plain_server, temperature=2, extra_body=extra))), extra


def test_json_objects_are_objects(plain_server: ServerProcess) -> None:
    question = "Tell me about a person as JSON"
    reply = ask(plain_server, question, response_format={"type": "json_object"}, temperature=0)
    assert isinstance(json.loads(text_of(reply)), dict)


def test_completions_can_be_structured_too_and_each_prompt_on_its_own(plain_server: ServerProcess) -> None:
    client = openai_client(plain_server)
    reply = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=["One:", "Two:"],
        max_tokens=20,
        extra_body={"structured_outputs": {"regex": "[a-z]{4}"}},
    )
    assert all(re.fullmatch("[a-z]{4}", choice.text) for choice in reply.choices)


def test_a_stream_has_the_same_text(plain_server: ServerProcess) -> None:
    fields = {"response_format": {"type": "json_object"}, "temperature": 1.5, "max_tokens": 50}
    whole = text_of(ask(plain_server, **fields))
    pieces = [c.choices[0].delta.content or "" for c in ask(plain_server, stream=True, **fields)]
    assert "".join(pieces) == whole


def test_the_same_request_gives_the_same_bytes_in_any_company(plain_server: ServerProcess) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    alone = [text_of(ask(plain_server, response_format=schema, temperature=1.2, seed=seed)) for seed in range(2)]

    def again(number: int) -> str:
        if number % 2:
            return text_of(ask(plain_server, "Tell a story.", temperature=1, max_tokens=40))
        return text_of(ask(plain_server, response_format=schema, temperature=1.2, seed=number // 2))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(again, range(4)))[::2] == alone
    with LLM(max_model_len=1024, max_num_seqs=2, threads=2) as llm:
        params = SamplingParams(
            structured_outputs=StructuredOutputs(json=Person.model_json_schema()),
            temperature=1.2,
            seed=1,
            max_tokens=200,
        )
        (result,) = llm.chat([{"role": "user", "content": "Tell me about a person."}], params)
        assert result.outputs[0].text == alone[1]


def test_the_grammar_wins_over_ignore_eos_and_min_tokens(plain_server: ServerProcess) -> None:
    fields = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True, "min_tokens": 20}
    reply = ask(plain_server, extra_body=fields)
    assert (text_of(reply), reply.choices[0].finish_reason) in [("yes", "stop"), ("no", "stop")]


def test_min_tokens_holds_while_the_grammar_has_more_to_say(plain_server: ServerProcess) -> None:
    reply = ask(plain_server, extra_body={"structured_outputs": {"regex": "(ab)*"}, "min_tokens": 12}, max_tokens=40)
    assert reply.usage.completion_tokens >= 12


def test_stop_strings_and_max_tokens_end_it_as_ever(plain_server: ServerProcess) -> None:
    reply = ask(plain_server, extra_body={"structured_outputs": {"regex": "x{3}yz+"}}, stop=["yz"])
    assert (text_of(reply), reply.choices[0].finish_reason) == ("xxx", "stop")
    reply = ask(plain_server, extra_body={"structured_outputs": {"regex": "(x ){99}"}}, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"


def test_a_bias_or_a_list_of_tokens_cannot_break_the_grammar(plain_server: ServerProcess) -> None:
    for extra in ({"allowed_token_ids": [5]}, {"logit_bias": {"5": 100}}, {"bad_words": ["yes", "no"]}):
        reply = ask(plain_server, extra_body={"structured_outputs": {"choice": ["yes", "no"]}, **extra})
        assert text_of(reply) in ("yes", "no"), extra


def test_what_compiles_for_too_long_is_a_400_and_nobody_waits_for_it(plain_server: ServerProcess) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "multipleOf": 1000003}}}
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(ask, plain_server, response_format=schema)
        assert text_of(ask(plain_server, max_tokens=5))
        with pytest.raises(openai.BadRequestError, match="takes more than 1 s") as caught:
            refused.result()
    assert caught.value.param == "response_format"
    assert httpx.get(plain_server.url + "/health").status_code == 200


def test_a_form_that_is_too_complex_when_it_comes_to_writing_is_a_400_in_our_words(plain_server: ServerProcess) -> None:
    fields = {f"p{i}": {"type": "string", "pattern": "(a|b)*c{1,50}"} for i in range(3000)}
    schema = {"structured_outputs": {"json": {"type": "object", "properties": fields}}}
    with pytest.raises(openai.BadRequestError, match="make it simpler") as caught:
        ask(plain_server, extra_body=schema)
    assert caught.value.code == "grammar_too_complex"
    assert "row" not in caught.value.message
    with pytest.raises(openai.APIError, match="make it simpler"):
        list(ask(plain_server, extra_body=schema, stream=True))


def weather(**fields: Any) -> dict[str, Any]:
    parameters = GetWeather.model_json_schema()
    return {"type": "function", "function": {"name": "get_weather", "parameters": parameters, **fields}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("temperature", [0, 2])
def test_who_must_call_calls_with_or_without_a_parser(
    plain_server: ServerProcess, tools_server: ServerProcess, choice: Any, temperature: float
) -> None:
    for process in (plain_server, tools_server):
        reply = ask(process, tools=[weather()], tool_choice=choice, temperature=temperature, parallel_tool_calls=False)
        message = reply.choices[0].message
        (call,) = message.tool_calls
        assert (message.content, call.function.name) == (None, "get_weather")
        GetWeather.model_validate_json(call.function.arguments)
        assert reply.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_arguments_stream(tools_server: ServerProcess) -> None:
    fields = {"tools": [weather()], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = [chunk.choices[0] for chunk in ask(tools_server, stream=True, **fields)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert calls[0].function.name == "get_weather"
    assert len(calls) > 3
    assert not any(chunk.delta.content for chunk in chunks)
    GetWeather.model_validate_json("".join(call.function.arguments for call in calls))
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_call_that_max_tokens_cuts_breaks_nothing(tools_server: ServerProcess, plain_server: ServerProcess) -> None:
    for process in (tools_server, plain_server):
        for max_tokens in range(1, 24, 5):
            reply = ask(process, tools=[weather()], tool_choice="required", max_tokens=max_tokens)
            assert reply.choices[0].finish_reason in ("length", "tool_calls")


def test_pydantic_tools_are_parsed_by_the_openai_package(tools_server: ServerProcess) -> None:
    client = openai_client(tools_server)
    reply = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_strict_function_leaves_the_model_free_to_speak(tools_server: ServerProcess) -> None:
    reply = ask(tools_server, "Say hello.", tools=[weather(strict=True)], temperature=0, max_tokens=30)
    assert text_of(reply)


def test_reasoning_comes_before_the_form(tools_server: ServerProcess) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    reply = ask(tools_server, extra_body=extra, max_tokens=30)
    assert text_of(reply) in ("yes", "no"), "a model that does not reason answers at once"
    (token_id,) = httpx.post(tools_server.url + "/tokenize", json={"prompt": "<"}).json()["tokens"]
    extra |= {"logit_bias": {token_id: 100}, "thinking_token_budget": 6}  # this model has to be talked into reasoning
    reply = ask(tools_server, extra_body=extra, max_tokens=30)
    assert "<<" in reply.choices[0].message.reasoning
    assert text_of(reply) in ("yes", "no")


def test_the_offline_llm_refuses_what_the_server_refuses() -> None:
    with LLM(max_model_len=128, max_num_seqs=2, threads=1) as llm:
        yes = SamplingParams(structured_outputs=StructuredOutputs(choice=("yes", "no")), max_tokens=5)
        (result,) = llm.generate("Is it?", yes)
        assert result.outputs[0].text in ("yes", "no")
        assert result.outputs[0].finish_reason is FinishReason.STOP
        with pytest.raises(InvalidRequestError, match="not supported"):
            llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(json={"not": {}})))
