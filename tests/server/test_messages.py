"""Anthropic's Messages API as the `anthropic` package sees it, over real sockets.

The fake engine says what it is told.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params

from octavo.server.messages.bodies import MessagesBody, PromptBody
from tests.server.fake_engine import FAIL, MODEL_NAME
from tests.server.harness import ServerProcess, fake_server, metric, wait_until
from tests.server.test_tools import CALL, TIME_CALL, say, tools_server

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather in a city", "input_schema": CITY},
    {"name": "time", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
THINK: Any = {"type": "adaptive"}


@pytest.fixture(scope="module")
def hermes_server() -> Iterator[ServerProcess]:
    yield from tools_server("--tool-call-parser=hermes", "--reasoning-parser=qwen3")


@pytest.fixture
def client(hermes_server: ServerProcess) -> anthropic.Anthropic:
    return client_of(hermes_server)


def client_of(process: ServerProcess, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=process.url, api_key=key, max_retries=0, timeout=20)


def ask(client: anthropic.Anthropic, text: str | list[Any], **fields: Any) -> anthropic.types.Message:
    """A whole message, after the streamed one has turned out to be the same."""
    messages = say(text) if isinstance(text, str) else text
    fields = {"model": MODEL_NAME, "max_tokens": 1000, "messages": messages, **fields}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert contents(streamed) == contents(whole)
    assert streamed.usage == whole.usage
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    return whole


def contents(message: Any) -> list[dict[str, Any]]:
    """The blocks without what differs each time."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    for block in blocks:
        if block["type"] == "tool_use":
            assert block.pop("id")
    return blocks


def refusal(client: anthropic.Anthropic, **fields: Any) -> str:
    """The message of a 400 in Anthropic's shape."""
    body = {"model": MODEL_NAME, "max_tokens": 5, "messages": say("x"), **fields}
    reply = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == reply.headers["request-id"]
    return str(error["error"]["message"])


def input_of(message: anthropic.types.Message) -> Any:
    (block,) = [block for block in message.content if block.type == "tool_use"]
    return block.input


def test_a_message_is_text_with_its_usage(client: anthropic.Anthropic) -> None:
    message = ask(client, "Grüße.")
    assert contents(message) == [{"type": "text", "text": "Grüße."}]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL_NAME)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens == len("Grüße.".encode()) + 1
    assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0


def test_the_request_has_an_id_that_the_client_can_tell(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=MODEL_NAME, max_tokens=5, messages=say("x"), extra_headers={"X-Request-Id": "mine"}
    )
    assert message._request_id == "mine"
    assert message.id == "msg_mine"


def test_text_calls_and_thinking_are_blocks_in_their_order(client: anthropic.Anthropic) -> None:
    text = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{TIME_CALL}\n Wait."
    message = ask(client, text, tools=TOOLS, thinking=THINK)
    assert contents(message) == [
        {"type": "thinking", "thinking": "Hm.", "signature": "octavo"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Zürich"}},
        {"type": "tool_use", "name": "time", "input": {}},
        {"type": "text", "text": "Wait."},
    ]
    assert message.stop_reason == "tool_use"
    details = message.usage.output_tokens_details
    assert details is not None
    assert details.thinking_tokens == len("<think>\nHm.\n</think>")


def test_an_answer_without_anything_is_a_message_without_blocks(client: anthropic.Anthropic) -> None:
    assert ask(client, "").content == []


def test_events_come_in_the_order_that_the_api_promises(hermes_server: ServerProcess) -> None:
    body = {"model": MODEL_NAME, "max_tokens": 99, "messages": say(f"Hi.{TIME_CALL}"), "tools": TOOLS, "stream": True}
    reply = httpx.post(f"{hermes_server.url}/v1/messages", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in reply.text.removesuffix("\n\n").split("\n\n")]
    events = []
    for name, data in frames:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert [(e["index"], e["content_block"]["type"]) for e in events if e["type"] == "content_block_start"] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 1)
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(f"Hi.{TIME_CALL}") + 1
    open_blocks = 0
    for kind in kinds:
        open_blocks += {"content_block_start": 1, "content_block_stop": -1}.get(kind, 0)
        assert open_blocks == 1 or kind != "content_block_delta"
        assert open_blocks in (0, 1)


def test_the_async_client_streams_many_at_once(hermes_server: ServerProcess) -> None:
    async def one(client: anthropic.AsyncAnthropic, number: int) -> str:
        async with client.messages.stream(model=MODEL_NAME, max_tokens=99, messages=say(f"number {number}")) as stream:
            return "".join([text async for text in stream.text_stream])

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=hermes_server.url, api_key="none", max_retries=0) as client:
            count = await client.messages.count_tokens(model=MODEL_NAME, messages=say("x"))
            assert count.input_tokens > 0
            return await asyncio.gather(*(one(client, number) for number in range(8)))

    assert asyncio.run(all_of_them()) == [f"number {number}" for number in range(8)]


# -- why a message ended -----------------------------------------------------------------------------------------------


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    message = ask(client, "one two three", stop_sequences=["three", "two"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")


def test_max_tokens_and_the_end_of_the_context_are_told_apart(client: anthropic.Anthropic) -> None:
    assert ask(client, "one two three", max_tokens=3).stop_reason == "max_tokens"
    echo = [{"role": "user", "content": "x" * 3990}]
    message = ask(client, echo, max_tokens=2000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 4096


def test_a_call_that_is_cut_is_told_by_what_cut_it(client: anthropic.Anthropic) -> None:
    message = ask(client, CALL, tools=TOOLS, max_tokens=len(CALL.partition("ich")[0].encode()))
    assert (message.stop_reason, input_of(message)) == ("max_tokens", {"city": "Zür"})
    message = ask(client, CALL, tools=TOOLS, stop_sequences=["ür"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "ür")
    assert input_of(message) == {"city": "Zür"}
    message = ask(client, CALL.partition('ich"')[0], tools=TOOLS)
    assert (message.stop_reason, input_of(message)) == ("end_turn", {"city": "Zür"})


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, {"b": "two\nlines"}]}', {"a": [1, {"b": "two\nlines"}]}),
        (r'{"a": "\d \ud800"}', {"a": "\\d �"}),
        ('{"a": "x", "b": True}', {"a": "x", "_malformed": ', "b": True}'}),
        ('["a"]', {"_malformed": '["a"]'}),
        ('{"a": ' * 200 + "1" + "}" * 200, None),
    ],
)
def test_malformed_arguments_are_an_input_that_every_client_can_read(
    client: anthropic.Anthropic, arguments: str, given: Any
) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    message = ask(client, text, tools=[{"name": "f", "input_schema": {"type": "object"}}], max_tokens=3000)
    assert message.stop_reason == "tool_use"
    if given is not None:
        assert input_of(message) == given
    else:
        assert list(input_of(message)) == ["a", "_malformed"]


def test_parallel_calls_can_be_switched_off_and_tools_left_alone(client: anthropic.Anthropic) -> None:
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(client, CALL + TIME_CALL, tools=TOOLS, tool_choice=one)
    assert [block["name"] for block in contents(message)] == ["weather"]
    message = ask(client, CALL, tools=TOOLS, tool_choice={"type": "none"})
    assert contents(message) == [{"type": "text", "text": CALL}]


def test_an_answer_can_be_sent_back_with_the_results(client: anthropic.Anthropic) -> None:
    tools: Any = {"tools": TOOLS, "thinking": THINK}
    answer = ask(client, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", **tools)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12°"}]}
    history: Any = [{"role": "user", "content": "?"}, answer.to_param(), {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model=MODEL_NAME, messages=history, **tools).input_tokens
    assert ask(client, history, **tools).usage.input_tokens == counted


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": {"_malformed": "{"}}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "no tool", "input": {}}] * 3}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "nobody's", "is_error": True}]}],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "theirs"}]}],
        [{"role": "assistant", "content": []}, {"role": "user", "content": []}],
        [{"role": "assistant", "content": [{"type": "text", "text": CALL}]}],
    ],
)
def test_odd_calls_and_results_in_the_history_end_no_conversation(
    client: anthropic.Anthropic, history: list[Any]
) -> None:
    message = ask(client, [*history, *say(CALL)], tools=TOOLS, thinking=THINK)
    assert (message.stop_reason, input_of(message)) == ("tool_use", {"city": "Zürich"})


# -- thinking ----------------------------------------------------------------------------------------------------------


def test_models_think_only_if_they_are_asked_to(client: anthropic.Anthropic) -> None:
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        # The template has closed the reasoning, so a tag is text.
        assert contents(ask(client, "<think> is a tag", **fields)) == [{"type": "text", "text": "<think> is a tag"}]
    thought = {"type": "thinking", "thinking": "I do", "signature": "octavo"}
    assert contents(ask(client, "<think>I do", thinking=THINK)) == [thought]


def test_thinking_can_be_omitted_and_is_counted_all_the_same(client: anthropic.Anthropic) -> None:
    message = ask(client, "<think>Hm.</think>Hi.", thinking={"type": "adaptive", "display": "omitted"})
    assert contents(message) == [
        {"type": "thinking", "thinking": "", "signature": "octavo"},
        {"type": "text", "text": "Hi."},
    ]
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == len("<think>Hm.</think>")


def test_a_budget_needs_a_server_that_knows_how_its_model_thinks(
    client: anthropic.Anthropic, quick_server: ServerProcess
) -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert contents(ask(client, "<think>Hm.</think>Hi.", thinking=budget))[1] == {"type": "text", "text": "Hi."}
    assert "thinking.budget_tokens" in refusal(client_of(quick_server), thinking=budget)
    assert ask(client_of(quick_server), "Hi.", thinking=THINK).stop_reason == "end_turn"


def test_a_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    begun: list[Any] = [*say("x"), {"role": "assistant", "content": "The answer is"}]
    message = ask(client, begun)
    assert message.usage.input_tokens == client.messages.count_tokens(model=MODEL_NAME, messages=begun).input_tokens
    closed = [*begun, {"role": "user", "content": ""}]
    assert message.usage.input_tokens < ask(client, closed).usage.input_tokens


# -- counting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"thinking": THINK, "output_config": {"effort": "low"}},
    ],
)
def test_the_count_is_what_the_prompt_will_have(client: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    counted = client.messages.count_tokens(model=MODEL_NAME, messages=say("x"), **fields).input_tokens
    assert counted == ask(client, "x", **fields).usage.input_tokens


def test_a_conversation_of_many_parts_is_read_all_the_same(client: anthropic.Anthropic) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1500}]
    assert client.messages.count_tokens(model=MODEL_NAME, messages=parts).input_tokens > 2999


def test_a_prompt_that_is_too_long_can_be_counted(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * 10_000}]
    assert client.messages.count_tokens(model=MODEL_NAME, messages=long).input_tokens > 10_000
    with pytest.raises(anthropic.BadRequestError, match="the limit is 4,095"):
        client.messages.create(model=MODEL_NAME, max_tokens=5, messages=long)
    huge: Any = [{"role": "user", "content": "x" * 2_000_001}]
    with pytest.raises(anthropic.BadRequestError, match="the limit here is 2,000,000"):
        client.messages.count_tokens(model=MODEL_NAME, messages=huge)


# -- refusals ----------------------------------------------------------------------------------------------------------


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, *say("x")]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type is 'image'"),
        (user({"type": "text", "text": "x"}, {"type": "document"}), "messages[0].content[1].type is 'document'"),
        (user({"type": "text"}), "messages[0].content[0]: object missing required field `text`"),
        (user({"type": "text", "text": "x", "mood": "odd"}), "unknown field `mood`"),
        (user({"type": "tool_use", "id": "1", "name": "f", "input": {}}), "messages[0].content[0].type is 'tool_use'"),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
            "content[0].content[0].type is 'image'",
        ),
        (assistant({"type": "tool_use", "id": "1", "name": "f", "input": [1]}), "content[0].input: expected `object`"),
        (assistant({"type": "server_tool_use", "id": "1", "name": "f"}), "'server_tool_use'"),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
        ({"system": 5}, "system: expected"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "many"}, "max_tokens: expected `int`"),
        ({"temperature": 3}, "temperature is 3"),
        ({"stop_sequences": [""]}, "stop_sequences is"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences has"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 50_000}]}, "limit is 50,000"),
        ({"messages": [{"role": "user", "content": ""}] * 2000, "system": [{"type": "x"}] * 99_000}, "101,001 parts"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools[0]: object missing required field `input_schema`"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name is empty"),
        ({"tools": [{**TOOLS[0], "input_examples": [{}]}]}, "tools[0].input_examples is not supported"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading is not supported"),
        ({"tools": [{**TOOLS[0], "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name goes with"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is 'between_tools'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens goes with"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens is 0"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
        ({"output_config": {"task_budget": {}}}, "output_config has no field 'task_budget'"),
        ({"service_tier": "gold"}, "service_tier is 'gold'"),
        ({"speed": "fast"}, "speed='fast' is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management="),
        ({"context_management": {"edits": 5}}, "context_management="),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"metadata": {"name": "me"}}, "metadata"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: anthropic.Anthropic, fields: Any, named: str) -> None:
    assert named in refusal(client, **fields)


def test_tools_without_a_parser_are_refused_in_anthropics_words(quick_server: ServerProcess) -> None:
    body = {"model": MODEL_NAME, "max_tokens": 5, "messages": say("x"), "tools": TOOLS}
    reply = httpx.post(f"{quick_server.url}/v1/messages", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith("or send tool_choice 'any' or 'none'")


def test_a_body_that_is_no_request_is_refused(hermes_server: ServerProcess) -> None:
    for content in (b"", b"nonsense", b"[]", b'{"max_tokens": 5}', b'{"messages": [{"role": "user", "content": "x"}]}'):
        reply = httpx.post(f"{hermes_server.url}/v1/messages", content=content)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_what_asks_for_nothing_is_no_reason_to_refuse(client: anthropic.Anthropic) -> None:
    extra = {
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "container": None,
        "metadata": {"user_id": "me"},
        "service_tier": "standard_only",
        "speed": "standard",
        "top_k": 5,
        "top_p": 0.9,
        "temperature": 0.5,
    }
    message = client.beta.messages.create(
        model=MODEL_NAME, max_tokens=50, messages=say("x"), betas=["context-management-2025-06-27"], extra_body=extra
    )
    assert contents(message) == [{"type": "text", "text": "x"}]


def test_other_refusals_have_anthropics_shape_too(hermes_server: ServerProcess, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match=r"not_found_error.*'claude' is not served"):
        client.messages.create(model="claude", max_tokens=5, messages=say("x"))
    url = f"{hermes_server.url}/v1/messages"
    assert httpx.post(f"{url}/nothing").json()["error"]["type"] == "not_found_error"
    reply = httpx.get(url)
    assert (reply.status_code, reply.json()["error"]["type"]) == (405, "invalid_request_error")
    reply = httpx.post(url, content=b" " * (33 << 20))
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large")


def test_the_anthropic_client_understands_the_refusal_of_its_key() -> None:
    for process in fake_server(flags=["--api-key", "secret"]):
        with pytest.raises(anthropic.AuthenticationError, match="wants an API key"):
            client_of(process, "wrong").messages.create(model=MODEL_NAME, max_tokens=5, messages=say("x"))
        assert ask(client_of(process, "secret"), "Hi.").stop_reason == "end_turn"


# -- life and death ----------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_message(steady_server: ServerProcess) -> None:
    body = {"max_tokens": 900, "messages": [{"role": "user", "content": "x"}]}
    for stream in (True, False):
        content = json.dumps({**body, "stream": stream}).encode()
        host, port = steady_server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            sock.sendall(head.encode() + content)
            wait_until(lambda: metric(steady_server, "num_requests_running") == 1)
        wait_until(lambda: metric(steady_server, "num_requests_running") == 0)


def test_a_failure_in_the_middle_is_an_error_event(quick_server: ServerProcess) -> None:
    client = client_of(quick_server)
    messages: Any = [{"role": "user", "content": FAIL.decode()}]
    with (
        pytest.raises(anthropic.APIStatusError, match="failed on purpose"),
        client.messages.stream(model=MODEL_NAME, max_tokens=9, messages=messages) as stream,
    ):
        for _ in stream:
            pass
    body = {"max_tokens": 9, "messages": messages, "stream": True}
    last = httpx.post(f"{quick_server.url}/v1/messages", json=body).text.rstrip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: {")
    assert json.loads(last.partition("data: ")[2])["error"]["type"] == "api_error"


def test_an_engine_that_dies_is_an_error_event_at_once(own_server: ServerProcess) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    with client_of(own_server).messages.stream(model=MODEL_NAME, max_tokens=900, messages=messages) as stream:
        next(iter(stream))
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            stream.until_done()


def test_a_server_that_stops_says_so_and_not_that_the_message_is_whole() -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    for process in fake_server(0.005, flags=["--shutdown-timeout", "0"]):
        with client_of(process).messages.stream(model=MODEL_NAME, max_tokens=900, messages=messages) as stream:
            next(iter(stream))
            process.popen.send_signal(signal.SIGTERM)
            with pytest.raises(anthropic.APIStatusError, match=r"overloaded_error.*server is stopping"):
                stream.until_done()


def test_after_all_this_nothing_runs_and_nothing_went_wrong(hermes_server: ServerProcess) -> None:
    assert metric(hermes_server, "num_requests_running") == 0
    assert metric(hermes_server, "kv_cache_usage_perc") == 0
    assert "Traceback" not in hermes_server.log


# -- the table in the documents ----------------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """Each field of the table of /v1/messages in docs/server.md and what is said of it."""
    section = DOCS.read_text().split("## Anthropic's Messages")[1].split("| Block in")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {name: told for names, told in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_documents_have_every_field_that_the_anthropic_package_knows() -> None:
    table = documented()
    known: set[str] = set()
    for parameters in (
        message_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_message_create_params.MessageCreateParamsStreaming,
    ):
        known |= set(parameters.__annotations__)
    headers = {"betas", "workspace_id"}
    assert known - headers <= table.keys()
    works = {name for name, told in table.items() if not told.startswith("refused")}
    assert works == set(MessagesBody.__struct_fields__)
    assert set(PromptBody.__struct_fields__) < works


def test_what_the_documents_call_refused_is_refused(client: anthropic.Anthropic) -> None:
    for name in (name for name, told in documented().items() if told.startswith("refused")):
        assert name in refusal(client, **{name: "x"})
