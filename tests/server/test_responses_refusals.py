"""Nonsense sent to /v1/responses gets its status, names its field, and leaves the server well."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import httpx
import pytest

from octavo.server.responses.body import UNSUPPORTED
from tests.server.fake_engine import MODEL_NAME
from tests.server.harness import ServerProcess, metric
from tests.server.responses_client import say, whole

USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FUNCTION = {"type": "function", "name": "f"}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [USER, fields]}


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [fields]}]}


BAD_BODIES: list[tuple[Any, int, str | None]] = [
    (b"", 400, None),
    (b"[]", 400, None),
    (b'{"input": "\xff"}', 400, None),
    ({}, 400, "input"),
    ({"input": None}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": {}}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": ["x"]}, 400, "input[0]"),
    ({"input": [[]]}, 400, "input[0]"),
    ({"input": "x" * 5000}, 400, "input"),
    ({"input": [USER] * 1025}, 400, "input"),
    (item(), 400, "input[1]"),
    (item(content="x"), 400, "input[1]"),
    (item(id="nobody"), 400, "input[1].id"),
    (item(type="item_reference", id="nobody"), 400, "input[1].id"),
    (item(type="item_reference", id=5), 400, "input[1]"),
    (item(type="web_search_call", id="w"), 400, "input[1].type"),
    (item(type="t" * 10_000), 400, "input[1].type"),
    (item(type=["message"], role="user"), 400, "input[1].type"),
    (item(type={}, role="user"), 400, "input[1].type"),
    (item(role="wizard", content="x"), 400, "input[1].role"),
    (item(role=["user"], content="x"), 400, "input[1].role"),
    (item(role="tool", content="x"), 400, "input[1].role"),
    (item(role="user"), 400, "input[1].content"),
    (item(role="user", content=5), 400, "input[1].content"),
    (item(role="user", content="x", id=5), 400, "input[1].id"),
    (item(role="user", content="x", id=""), 400, "input[1].id"),
    (item(role="user", content="x", id="i" * 300), 400, "input[1].id"),
    (item(role="user", content="x", status="done"), 400, "input[1].status"),
    (item(role="user", content="x", mood="glad"), 400, "input[1].mood"),
    (item(role="assistant", content="x", phase="commentary"), 400, "input[1].phase"),
    (part(), 400, "input[0].content[0].type"),
    (part(type="input_image", image_url="http://x/y.png"), 400, "input[0].content[0].type"),
    (part(type="input_file", file_id="f"), 400, "input[0].content[0].type"),
    (part(type="text", text="x"), 400, "input[0].content[0].type"),
    (part(type=["input_text"], text="x"), 400, "input[0].content[0].type"),
    (part(type="input_text"), 400, "input[0].content[0].text"),
    (part(type="input_text", text=5), 400, "input[0].content[0].text"),
    (part(type="input_text", text="x", prompt_cache_breakpoint={}), 400, "input[0].content[0].prompt_cache_breakpoint"),
    (item(type="function_call", call_id="c", name="f"), 400, "input[1].arguments"),
    (item(type="function_call", call_id="c", name="", arguments="{}"), 400, "input[1].name"),
    (item(type="function_call", call_id="c", name="f", arguments={}), 400, "input[1].arguments"),
    (item(type="function_call", name="f", arguments="{}"), 400, "input[1].call_id"),
    (item(type="function_call_output", call_id="c", output="1"), 400, "input[1].call_id"),
    (item(type="function_call_output", call_id=["c"], output="1"), 400, "input[1].call_id"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, 400, "input[1].output"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": 5}]}, 400, "input[1].output"),
    (
        {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        400,
        "input[1].output[0].type",
    ),
    (item(type="reasoning", summary=[], encrypted_content="gAAA"), 400, "input[1].encrypted_content"),
    (item(type="reasoning", summary=[], encrypted_content="octavo1.?"), 400, "input[1].encrypted_content"),
    (item(type="reasoning", summary=[], encrypted_content=["octavo1."]), 400, "input[1].encrypted_content"),
    (item(type="reasoning", summary=["x"]), 400, "input[1].summary[0]"),
    (item(type="reasoning", content=[{"type": "summary_text", "text": "x"}]), 400, "input[1].content[0].type"),
    ({"model": "other"}, 404, "model"),
    ({"instructions": ["x"]}, 400, "instructions"),
    ({"previous_response_id": "resp_nobody"}, 404, "previous_response_id"),
    ({"previous_response_id": "r" * 100_000}, 404, "previous_response_id"),
    ({"store": "yes"}, 400, "store"),
    ({"background": True, "store": False}, 400, "background"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"include": ["file_search_call.results"]}, 400, "include[0]"),
    ({"include": "message.output_text.logprobs"}, 400, "include"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs"),
    ({"top_logprobs": -1, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": 5000}, 400, "max_output_tokens"),
    ({"max_output_tokens": "many"}, 400, "max_output_tokens"),
    ({"max_tokens": 5}, 400, "max_tokens"),
    ({"max_tool_calls": 0}, 400, "max_tool_calls"),
    ({"min_tokens": 9, "max_output_tokens": 5}, 400, "min_tokens"),
    ({"temperature": 3}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"stop": [5]}, 400, "stop[0]"),
    ({"tools": "f"}, 400, "tools"),
    ({"tools": ["f"]}, 400, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "f"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": ["function"]}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools[0].function"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
    ({"tools": [{**FUNCTION, "name": ""}]}, 400, "tools[0].name"),
    ({"tools": [{**FUNCTION, "parameters": []}]}, 400, "tools[0].parameters"),
    ({"tools": [FUNCTION, {**FUNCTION, "defer_loading": True}]}, 400, "tools[1].defer_loading"),
    ({"tools": [FUNCTION]}, 400, "tool_choice"),  # this server has no parser
    ({"tool_choice": "sometimes"}, 400, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, 400, "tool_choice.type"),
    ({"tool_choice": {"type": "web_search_preview"}}, 400, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, 400, "tool_choice"),
    ({"reasoning": "low"}, 400, "reasoning"),
    ({"reasoning": {"effort": "extreme"}}, 400, "reasoning.effort"),
    ({"reasoning": {"effort": 5}}, 400, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, 400, "reasoning.summary"),
    ({"reasoning": {"depth": 3}}, 400, "reasoning"),
    ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
    ({"text": {"format": {}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": ["text"]}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}}, 400, "text.format.json_schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "wizard"}}}}, 400, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
    ({"text": {"format": "json"}}, 400, "text.format"),
    ({"metadata": {"a": 5}}, 400, "metadata"),
    ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
    ({"metadata": {"k" * 65: "x"}}, 400, "metadata"),
    ({"metadata": {"k": "x" * 513}}, 400, "metadata"),
    ({"user": "u" * 513}, 400, "user"),
    ({"safety_identifier": 5}, 400, "safety_identifier"),
    ({"service_tier": "flex"}, 400, "service_tier"),
    ({"truncation": "some"}, 400, "truncation"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"bad_words": [5]}, 400, "bad_words[0]"),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ({"prompt_cache_retention": "24h"}, 400, "prompt_cache_retention"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"documents": ["x"]}, 400, "documents[0]"),
    ({"messages": [USER]}, 400, "messages"),
    ({"instuctions": "x"}, 400, "instuctions"),
]


def post(server: ServerProcess, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps({"model": MODEL_NAME, "input": "x", **body}).encode()
    if isinstance(body, dict) and "input" not in body and body == {}:
        content = b"{}"
    return httpx.post(f"{server.url}/v1/responses", content=content, timeout=10)


@pytest.mark.parametrize(("body", "status", "param"), BAD_BODIES)
def test_a_bad_body_is_refused_by_name(quick_server: ServerProcess, body: Any, status: int, param: str | None) -> None:
    reply = post(quick_server, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 400
    if param is not None:
        assert param in error["message"] or status == 404, error


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_field_that_is_not_supported_is_refused_unless_it_asks_for_nothing(
    quick_server: ServerProcess, name: str
) -> None:
    reply = post(quick_server, {name: "something"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    for harmless in (None, *UNSUPPORTED[name]):
        assert whole(quick_server, input=say("x"), **{name: harmless}).output_text == "x"


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "", 405, None),
        ("POST", "/{id}", 405, None),
        ("GET", "/{id}?stream=true", 400, "stream"),
        ("GET", "/{id}?stream=yes", 400, "stream"),
        ("GET", "/{id}?starting_after=5", 400, "starting_after"),
        ("GET", "/{id}?stream=true&starting_after=-1", 400, "starting_after"),
        ("GET", "/{id}?stream=true&starting_after=" + "9" * 5000, 400, "starting_after"),
        ("GET", "/{id}?include=message.output_text.logprobs", 200, None),
        ("GET", "/{id}?include[]=file_search_call.results", 400, "include"),
        ("GET", "/{id}?include_obfuscation=true", 400, "include_obfuscation"),
        ("GET", "/{id}?steam=true", 400, "steam"),
        ("DELETE", "/{id}?x=1", 400, "x"),
        ("POST", "/{id}/cancel", 400, None),
        ("GET", "/{id}/cancel", 405, None),
        ("GET", "/{id}/input_items?limit=0", 400, "limit"),
        ("GET", "/{id}/input_items?limit=101", 400, "limit"),
        ("GET", "/{id}/input_items?limit=ten", 400, "limit"),
        ("GET", "/{id}/input_items?limit=%D9%A3", 400, "limit"),
        ("GET", "/{id}/input_items?order=up", 400, "order"),
        ("GET", "/{id}/input_items?after=nobody", 400, "after"),
        ("GET", "/{id}/input_items?before=x", 400, "before"),
        ("GET", "/resp_nobody", 404, None),
        ("GET", "/%00%ff..", 404, None),
        ("DELETE", "/resp_nobody", 404, None),
        ("POST", "/resp_nobody/cancel", 404, None),
        ("GET", "/resp_nobody/input_items", 404, None),
        ("GET", "/{id}/output_items", 404, None),
    ],
)
def test_a_bad_address_is_refused(
    quick_server: ServerProcess, method: str, path: str, status: int, param: str | None
) -> None:
    made = whole(quick_server, input=say("x"))
    reply = httpx.request(method, f"{quick_server.url}/v1/responses{path.replace('{id}', made.id)}")
    assert reply.status_code == status
    if status != 200:
        error = reply.json()["error"]
        assert error["param"] == param
        assert len(error["message"]) < 600


def test_random_nonsense_never_breaks_the_server(quick_server: ServerProcess) -> None:
    rng = random.Random(5)
    leaves: list[Any] = [None, True, -1, 2**70, 1.5, "", "x", "user", "message", "function_call", "rs_1", [], {}]
    names = ["type", "role", "content", "text", "id", "call_id", "name", "arguments", "output", "summary", "status"]

    def nonsense(depth: int) -> Any:
        match rng.randrange(4) if depth else 3:
            case 0:
                return [nonsense(depth - 1) for _ in range(rng.randrange(4))]
            case 1 | 2:
                return {rng.choice(names): nonsense(depth - 1) for _ in range(rng.randrange(5))}
            case _:
                return rng.choice(leaves)

    fields = ["input", "tools", "tool_choice", "reasoning", "text", "metadata", "include", "stream_options", "stop"]
    with httpx.Client(timeout=10) as http:
        for _ in range(120):
            body = {"input": [nonsense(4)], "max_output_tokens": 1, rng.choice(fields): nonsense(4)}
            reply = http.post(f"{quick_server.url}/v1/responses", json=body)
            assert reply.status_code in (200, 400, 404), (body, reply.text)
    assert "Traceback" not in quick_server.log
    assert metric(quick_server, "num_requests_running") == 0


def test_many_more_items_than_tokens_are_refused_at_once(quick_server: ServerProcess) -> None:
    body = b'{"input": [' + b",".join([b'{"role":"user","content":""}'] * 80_000) + b"]}"
    began = time.monotonic()
    reply = httpx.post(f"{quick_server.url}/v1/responses", content=body, timeout=20)
    assert reply.status_code == 400
    assert "80,000 items" in reply.json()["error"]["message"]
    assert time.monotonic() - began < 5
