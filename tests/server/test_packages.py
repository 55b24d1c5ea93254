"""Programs that were made for OpenAI's servers, over real sockets: LangChain's ChatOpenAI and Simon Willison's `llm`.

(`openai` and `anthropic` have tests of their own.) The fake engine says what it is told; forms of output are kept by
the built-in model.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

from tests.server.fake_engine import END, MODEL_NAME, SAY
from tests.server.harness import ServerProcess, metric, server
from tests.server.test_tools import CALL, TIME_CALL, tools_server


@pytest.fixture(scope="module")
def hermes_server() -> Iterator[ServerProcess]:
    yield from tools_server("--tool-call-parser=hermes", "--reasoning-parser=qwen3")


@pytest.fixture(scope="module")
def builtin_server() -> Iterator[ServerProcess]:
    small = ("--max-model-len", "512", "--max-num-seqs", "8", "--threads", "1", "--served-model-name", "small")
    with server([sys.executable, "-m", "octavo", "serve", "--port", "0", *small]) as process:
        yield process


def say(text: str) -> str:
    return f"{SAY.decode()}{text}{END.decode()}"


class Person(BaseModel):
    """No lengths and ranges: the anthropic package takes them out of a schema."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Ann", "Bob"]
    married: bool


PERSON = "Invent a person."


# -- langchain ---------------------------------------------------------------------------------------------------------


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: 12°"


def time() -> str:
    """The time."""
    return "12:00"


@pytest.fixture(scope="module")
def model(hermes_server: ServerProcess) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{hermes_server.url}/v1", api_key="none", model=MODEL_NAME, max_retries=0, timeout=20)


def gathered(chunks: Iterator[Any]) -> AIMessageChunk:
    total: Any = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    return total


def test_langchain_gets_whole_and_streamed_answers_with_their_usage(model: ChatOpenAI) -> None:
    question = [SystemMessage("Be brief."), HumanMessage(say("Grüße."))]
    whole = model.invoke(question)
    streamed = gathered(model.stream(question, stream_usage=True))
    assert whole.content == streamed.content == "Grüße."
    assert whole.usage_metadata == streamed.usage_metadata
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len("Grüße.".encode()) + 1
    assert whole.response_metadata["finish_reason"] == "stop"


def test_langchain_asks_for_many_at_once_and_asynchronously(model: ChatOpenAI) -> None:
    answers = model.batch([say(f"number {i}") for i in range(5)])
    assert [answer.content for answer in answers] == [f"number {i}" for i in range(5)]

    async def streamed() -> str:
        return "".join([str(chunk.content) async for chunk in model.astream(say("Hello."))])

    assert asyncio.run(streamed()) == "Hello."


def test_langchain_binds_settings(model: ChatOpenAI) -> None:
    settings = {"stop": ["three"], "seed": 5, "top_p": 0.5, "presence_penalty": 1, "extra_body": {"top_k": 4}}
    assert str(model.bind(**settings).invoke(say("one two three four")).content).startswith("one two ")
    answer = model.bind(logprobs=True, top_logprobs=2, max_tokens=1).invoke(say("x"))
    assert answer.response_metadata["logprobs"]["content"][0]["token"] == "x"


def test_langchain_calls_tools_and_sends_their_results_back(model: ChatOpenAI) -> None:
    with_tools = model.bind_tools([weather, time])
    question = HumanMessage(say(f"I look.{CALL}{TIME_CALL}"))
    answer = with_tools.invoke([question])
    assert answer.content == "I look."
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("weather", {"city": "Zürich"}),
        ("time", {}),
    ]
    streamed = gathered(with_tools.stream([question]))
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(c["name"], c["args"]) for c in answer.tool_calls]
    results = [ToolMessage("12°", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert with_tools.invoke([question, answer, *results, HumanMessage(say("It is 12°."))]).content == "It is 12°."


def test_langchain_shows_a_malformed_call_as_one(model: ChatOpenAI) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": Zürich}}</tool_call>'
    answer = model.bind_tools([weather]).invoke(say(text))
    assert answer.tool_calls == []
    assert [call["name"] for call in answer.invalid_tool_calls] == ["weather"]


@pytest.fixture(scope="module")
def small_model(builtin_server: ServerProcess) -> ChatOpenAI:
    url = f"{builtin_server.url}/v1"
    return ChatOpenAI(base_url=url, api_key="none", model="small", max_tokens=80, temperature=0, max_retries=0)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_what_a_schema_asks_for(small_model: ChatOpenAI, method: Any) -> None:
    assert isinstance(small_model.with_structured_output(Person, method=method).invoke(PERSON), Person)


def test_langchain_makes_a_model_call(small_model: ChatOpenAI) -> None:
    tools = [Person, time]
    for choice, names in (("any", {"Person", "time"}), ("Person", {"Person"})):
        calls = small_model.bind_tools(tools, tool_choice=choice, parallel_tool_calls=False).invoke(PERSON).tool_calls
        assert {call["name"] for call in calls} <= names
        assert calls


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "person"}])
def test_anthropic_makes_a_model_call(builtin_server: ServerProcess, choice: Any) -> None:
    client = anthropic.Anthropic(base_url=builtin_server.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "person", "description": "Invent one", "input_schema": Person.model_json_schema()}]
    fields: Any = {"model": "small", "max_tokens": 80, "messages": [{"role": "user", "content": PERSON}]}
    fields |= {"tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    fields["extra_body"] = {"temperature": 0}
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**fields), streamed):
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        assert block.type == "tool_use"
        assert isinstance(Person.model_validate(block.input), Person)


def test_anthropic_parses_what_a_schema_asks_for(builtin_server: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=builtin_server.url, api_key="none", max_retries=0)
    question: Any = [{"role": "user", "content": PERSON}]
    greedy = {"temperature": 0}
    parsed = client.messages.parse(
        model="small", max_tokens=80, messages=question, output_format=Person, extra_body=greedy
    )
    assert isinstance(parsed.parsed_output, Person)
    older = {**greedy, "output_format": {"type": "json_schema", "schema": Person.model_json_schema()}}
    message = client.messages.create(model="small", max_tokens=80, messages=question, extra_body=older)
    (block,) = message.content
    assert block.type == "text"
    assert isinstance(Person.model_validate_json(block.text), Person)


# -- llm ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm_environment(
    hermes_server: ServerProcess, builtin_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """What tells `llm` of the server. No plugins: the package of the built-in model is one that needs llama.cpp."""
    folder = tmp_path_factory.mktemp("llm")
    known = {
        "model_id": "octavo",
        "model_name": MODEL_NAME,
        "api_base": f"{hermes_server.url}/v1",
        "supports_tools": True,
    }
    small = {"model_id": "small", "api_base": f"{builtin_server.url}/v1", "supports_schema": True}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([known, {"model_name": "small", **small}]))
    environment = {"LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield {**os.environ, **environment}


def run_llm(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llm_prints_an_answer_as_it_comes_and_goes_on_with_the_conversation(
    llm_environment: dict[str, str], hermes_server: ServerProcess
) -> None:
    assert run_llm(llm_environment, "-m", "octavo", say("Grüße."), "--system", "Be brief.") == "Grüße.\n"
    settings = ["-o", "temperature", "0", "-o", "max_tokens", "4", "-o", "seed", "1", "-o", "stop", "xyz"]
    assert run_llm(llm_environment, "-c", say("And more?"), "--no-stream", *settings) == "And \n"
    assert "Traceback" not in hermes_server.log


def test_llm_in_python_chats_and_calls_tools(llm_environment: dict[str, str]) -> None:
    import llm  # reads the environment when it is imported

    model = llm.get_model("octavo")
    assert model.prompt(say("Whole."), stream=False).text() == "Whole."
    assert "".join(model.prompt(say("In pieces."))) == "In pieces."
    conversation = model.conversation()
    assert conversation.prompt(say("one")).text() == "one"
    assert conversation.prompt(say("two"), max_tokens=2).text() == "tw"
    response = model.prompt(say(CALL), tools=[weather])
    assert [(call.name, call.arguments) for call in response.tool_calls()] == [("weather", {"city": "Zürich"})]
    assert [result.output for result in response.execute_tool_calls()] == ["Zürich: 12°"]
    assert response.usage().output == len(CALL.encode()) + 1


def test_llm_gets_what_a_schema_asks_for(llm_environment: dict[str, str]) -> None:
    import llm

    answer = llm.get_model("small").prompt(PERSON, schema=Person, max_tokens=80, temperature=0).text()
    assert isinstance(Person.model_validate_json(answer), Person)


def test_after_all_this_nothing_runs_and_nothing_went_wrong(hermes_server: ServerProcess) -> None:
    assert metric(hermes_server, "num_requests_running") == 0
    assert "Traceback" not in hermes_server.log
