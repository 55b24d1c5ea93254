"""Every bad request gets its status, names its field, and leaves the server well."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.server.protocol import MAX_TOKEN_IDS
from octavo.server.service import MAX_BRACKETS, MAX_COMMAS
from tests.server.fake_engine import FAIL, MODEL_NAME, REFUSE
from tests.server.harness import ServerProcess, metric

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": USER, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "abc", **fields}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def called(calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": calls}


BAD_BODIES: list[tuple[str, Any, int, str | None]] = [
    (CHAT, b"", 400, None),
    (CHAT, b"{", 400, None),
    (CHAT, b"[1]", 400, None),
    (CHAT, b"null", 400, None),
    (CHAT, b"\xff\xfe", 400, None),
    (CHAT, b'{"messages": "\\ud800"}', 400, None),
    (CHAT, b'{"a":' * 100_000, 400, None),
    (CHAT, b'{"model": 1e999}', 400, None),
    (CHAT, {}, 400, "messages"),
    (CHAT, chat(messages=None), 400, "messages"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hello"), 400, "messages"),
    (CHAT, chat(messages=["hello"]), 400, "messages[0]"),
    (CHAT, chat(messages=[{"content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[*USER, {"role": "wizard", "content": "x"}]), 400, "messages[1].role"),
    (CHAT, chat(messages=[{"role": ["user"], "content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "r" * 10_000, "content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": ["x"]}]), 400, "messages[0].content[0]"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "t" * 10_000}]}]),
        400,
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "x", "f" * 10_000: 1}]),
        400,
        "messages[0]." + "f" * 57 + "...",
    ),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "tool_calls": [{}]}]), 400, "messages[0].tool_calls"),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "name": 5}]), 400, "messages[0].name"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 5000}]), 400, "messages"),
    (CHAT, chat(model="other"), 404, "model"),
    (CHAT, chat(model=5), 400, "model"),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature="warm"), 400, "temperature"),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, None),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(top_k=-2), 400, "top_k"),
    (CHAT, chat(top_k=1.5), 400, "top_k"),
    (CHAT, chat(min_p=2), 400, "min_p"),
    (CHAT, chat(presence_penalty=3), 400, "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    (CHAT, chat(repetition_penalty=1e308), 400, "repetition_penalty"),
    (CHAT, chat(seed=2**64), 400, "seed"),
    (CHAT, chat(seed=2**63), 400, "seed"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(stop=["x"] * 17), 400, "stop"),
    (CHAT, chat(stop=["x" * 257]), 400, "stop"),
    (CHAT, chat(stop=[5]), 400, "stop[0]"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[257]), 400, "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[1] * 10_000 + [-1]), 400, "stop_token_ids"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=5000), 400, "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=5000), 400, "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=5, max_tokens=6), 400, "max_completion_tokens"),
    (CHAT, chat(min_tokens=-1), 400, "min_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=5), 400, "min_tokens"),
    (CHAT, chat(min_tokens=5000), 400, "min_tokens"),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(logprobs=3), 400, "logprobs"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(stream=True, stream_options={"usage": True}), 400, "stream_options"),
    (CHAT, chat(stream=True, stream_options={"include_obfuscation": True}), 400, "stream_options.include_obfuscation"),
    (CHAT, chat(cache_salt=""), 400, "cache_salt"),
    (CHAT, chat(request_id="x" * 257), 400, "request_id"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    (CHAT, chat(n=2), 400, "n"),
    (CHAT, chat(logit_bias={"five": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"5": "much"}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"257": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"9" * 30: 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias=[5]), 400, "logit_bias"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias"),
    (CHAT, chat(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (CHAT, chat(allowed_token_ids=[257]), 400, "allowed_token_ids"),
    (CHAT, chat(allowed_token_ids=["a"]), 400, "allowed_token_ids[0]"),
    (CHAT, chat(bad_words=[""]), 400, "bad_words"),
    (CHAT, chat(bad_words="x"), 400, "bad_words"),
    (CHAT, chat(bad_words=["x"] * 1000), 400, "bad_words"),
    (CHAT, chat(repetition_detection={"max_pattern_size": -1}), 400, "repetition_detection"),
    (CHAT, chat(repetition_detection={"max_size": 1}), 400, "repetition_detection"),
    (CHAT, chat(thinking_token_budget=-1), 400, "thinking_token_budget"),
    (CHAT, chat(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (CHAT, chat(truncate_prompt_tokens="all"), 400, "truncate_prompt_tokens"),
    (CHAT, chat(logprobs=True, top_logprobs=-2), 400, "top_logprobs"),
    (CHAT, chat(user="x" * 257), 400, "user"),
    (CHAT, chat(safety_identifier="x" * 257), 400, "safety_identifier"),
    (CHAT, chat(prompt_cache_key="x" * 257), 400, "prompt_cache_key"),
    (CHAT, chat(metadata={"a": 5}), 400, "metadata"),
    (CHAT, chat(metadata={"a": "x" * 513}), 400, "metadata"),
    (CHAT, chat(metadata={"a" * 65: "x"}), 400, "metadata"),
    (CHAT, chat(metadata={str(i): "x" for i in range(17)}), 400, "metadata"),
    (CHAT, chat(service_tier="flex"), 400, "service_tier"),
    (CHAT, chat(store=True), 400, "store"),
    (CHAT, chat(verbosity="low"), 400, "verbosity"),
    (CHAT, chat(functions=[{"name": "f"}]), 400, "functions"),
    (CHAT, chat(function_call={"name": "f"}), 400, "function_call"),
    (CHAT, chat(chat_template="x"), 400, "chat_template"),
    (CHAT, chat(chat_template_kwargs={"chat_template": "x"}), 400, "chat_template_kwargs"),
    (CHAT, chat(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "messages[0].content[0].text"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x", "file": 1}]}]),
        400,
        "messages[0].content[0].file",
    ),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": ["text"]}]}]), 400, "messages[0].content[0].type"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function"),
    (CHAT, chat(tools=["f"]), 400, "tools[0]"),
    (CHAT, chat(tools=[{"type": "web_search"}]), 400, "tools[0].type"),
    (CHAT, chat(tools=[{"function": {"name": ""}}]), 400, "tools[0].function.name"),
    (CHAT, chat(tools=[tool(parameters=[])]), 400, "tools[0].function.parameters"),
    (CHAT, chat(tools=[tool(description=5)]), 400, "tools[0].function.description"),
    (CHAT, chat(tools=[tool(), tool(strict="yes")]), 400, "tools[1].function.strict"),
    (CHAT, chat(tools=[tool()]), 400, "tool_choice"),  # this server has no parser
    (CHAT, chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice"),
    (CHAT, chat(tools=[tool()], tool_choice={"type": "function", "function": {}}), 400, "tool_choice"),
    (CHAT, chat(tools=[tool(parameters={"not": {}})], tool_choice="required"), 400, "tools"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(tool_choice="sometimes"), 400, "tool_choice"),
    (CHAT, chat(tool_choice={}), 400, "tool_choice"),
    (CHAT, chat(parallel_tool_calls="no"), 400, "parallel_tool_calls"),
    (CHAT, chat(documents=["text"]), 400, "documents[0]"),
    (CHAT, chat(reasoning_effort="extreme"), 400, "reasoning_effort"),
    (CHAT, chat(enable_thinking="yes"), 400, "enable_thinking"),
    (CHAT, chat(messages=[called(5)]), 400, "messages[0].tool_calls"),
    (CHAT, chat(messages=[called([5])]), 400, "messages[0].tool_calls[0]"),
    (CHAT, chat(messages=[called([{}])]), 400, "messages[0].tool_calls[0].function"),
    (CHAT, chat(messages=[called([{"function": {}}])]), 400, "messages[0].tool_calls[0].function.name"),
    (CHAT, chat(messages=[called([{**tool(), "id": 5}])]), 400, "messages[0].tool_calls[0].id"),
    (CHAT, chat(messages=[called([tool(arguments=5)])]), 400, "messages[0].tool_calls[0].function.arguments"),
    (CHAT, chat(messages=[called([tool(other=5)])]), 400, "messages[0].tool_calls[0].function.other"),
    (CHAT, chat(messages=[called([{"type": "code", "function": {}}])]), 400, "messages[0].tool_calls[0].type"),
    (CHAT, chat(messages=[{"role": "tool"}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x", "tool_call_id": 5}]), 400, "messages[0].tool_call_id"),
    (CHAT, chat(messages=[{"role": "assistant", "reasoning": 5}]), 400, "messages[0].reasoning"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}), 400, "response_format"),
    (CHAT, chat(structured_outputs={"regex": "("}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"rexeg": "a"}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"choice": []}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": "a", "whitespace_pattern": " "}), 400, "structured_outputs"),
    (CHAT, chat(guided_choice=["a"], guided_regex="b"), 400, "guided_regex"),
    (CHAT, chat(guided_regex="a", structured_outputs={"regex": "b"}), 400, "guided_regex"),
    (CHAT, chat(guided_decoding_backend="xgrammar", guided_regex="a"), 400, "guided_decoding_backend"),
    (CHAT, chat(priority=1), 400, "priority"),
    (CHAT, chat(echo="yes"), 400, "echo"),
    (CHAT, chat(repeat_penalty=1.1), 400, "repeat_penalty"),
    (CHAT, chat(temprature=1), 400, "temprature"),
    (CHAT, chat(prompt="x"), 400, "prompt"),
    (CHAT, chat(**{"k" * 10_000: 1}), 400, "k" * 57 + "..."),
    (CHAT, chat(stream=True, stream_options={"k" * 10_000: True}), 400, "stream_options"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, completion(prompt=""), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=5), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[1, "a"]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["a", []]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[True]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[1.5]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[-1]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[257]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[2**70]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[1] * 1024), 400, "prompt"),
    (COMPLETIONS, completion(prompt="x" * 1024), 400, "prompt"),
    (COMPLETIONS, completion(prompt="x" * 10_000_000), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["a"] * 1025), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["a", "x" * 1024]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=REFUSE.decode()), 400, "prompt"),
    (COMPLETIONS, completion(prompt=REFUSE.decode(), stream=True), 400, "prompt"),
    (COMPLETIONS, completion(max_tokens=1022), 400, "max_tokens"),
    (COMPLETIONS, completion(min_tokens=17), 400, "min_tokens"),
    (COMPLETIONS, completion(logprobs=21), 400, "logprobs"),
    (COMPLETIONS, completion(logprobs=True), 400, "logprobs"),
    (COMPLETIONS, completion(best_of=2), 400, "best_of"),
    (COMPLETIONS, completion(max_tokens=0), 400, "max_tokens"),
    (COMPLETIONS, completion(continue_final_message=True), 400, "continue_final_message"),
    (COMPLETIONS, completion(n=True), 400, "n"),
    (COMPLETIONS, completion(suffix="end"), 400, "suffix"),
    (COMPLETIONS, completion(messages=USER), 400, "messages"),
    (COMPLETIONS, completion(prompt=FAIL.decode()), 500, None),
]


@pytest.mark.parametrize(("route", "body", "status", "param"), BAD_BODIES)
def test_a_bad_body_is_refused_by_name(
    quick_server: ServerProcess, route: str, body: Any, status: int, param: str | None
) -> None:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = httpx.post(quick_server.url + route, timeout=20, **content)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert len(error["message"]) < 500
    assert "Traceback" not in reply.text


def test_a_length_error_has_the_value_the_limit_and_the_remedy(quick_server: ServerProcess) -> None:
    too_much = httpx.post(quick_server.url + COMPLETIONS, json=completion(max_tokens=1022)).json()["error"]
    assert "max_tokens is 1,022 and the prompt has 3 tokens" in too_much["message"]
    assert "limit of 1,024" in too_much["message"]
    assert "at most 1,021" in too_much["message"]
    assert too_much["code"] == "context_length_exceeded"
    too_long = httpx.post(quick_server.url + COMPLETIONS, json=completion(prompt=[1] * 2000)).json()["error"]
    assert "2,000 tokens, the limit is 1,023" in too_long["message"]
    assert "--max-model-len" in too_long["message"]


def test_a_misspelt_field_suggests_the_right_one(quick_server: ServerProcess) -> None:
    error = httpx.post(quick_server.url + CHAT, json=chat(temprature=1)).json()["error"]
    assert "did you mean temperature?" in error["message"]


def test_unsupported_fields_with_values_that_ask_for_nothing_are_welcome(quick_server: ServerProcess) -> None:
    harmless = {
        "n": 1,
        "logit_bias": {},
        "cache_prompt": True,
        "repeat_penalty": 1,
        "best_of": 1,
        "echo": False,
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": False,
        "suffix": None,
        "length_penalty": 1.0,
        "stop": None,
        "user": "somebody",
    }
    assert httpx.post(quick_server.url + COMPLETIONS, json=completion(**harmless)).status_code == 200


def test_a_field_of_another_server_is_refused_with_the_name_that_it_has_here(quick_server: ServerProcess) -> None:
    error = httpx.post(quick_server.url + CHAT, json=chat(repeat_penalty=1.1)).json()["error"]
    assert error["message"] == "repeat_penalty=1.1 is not supported: send repetition_penalty"
    assert error["code"] == "unsupported_parameter"
    many = httpx.post(quick_server.url + CHAT, json=chat(stop=["x"] * 17)).json()["error"]
    assert many["code"] == "array_above_max_length"


def test_a_misspelt_field_of_many_megabytes_is_refused_at_once(quick_server: ServerProcess) -> None:
    body = b'{"' + b"k" * 20_000_000 + b'":1}'
    before = quick_server.loop_seconds()
    assert httpx.post(quick_server.url + CHAT, content=body, timeout=20).status_code == 400
    assert quick_server.loop_seconds() - before < 0.6  # comparing it with the known names would take over a second


@pytest.mark.parametrize(
    ("unit", "what"),
    [(b"[],", "brackets"), (b"{},", "brackets"), (b'{"a":', "brackets"), (b"7,", "commas"), (b'"a",', "commas")],
)
def test_a_body_of_millions_of_values_is_refused_before_it_is_read(
    quick_server: ServerProcess, unit: bytes, what: str
) -> None:
    body = b"[" + unit * ((1 << 20) + 9 if what == "commas" else MAX_BRACKETS)
    reply = httpx.post(f"{quick_server.url}/v1/chat/completions", content=body, timeout=20)
    assert reply.status_code == 413
    assert what in reply.json()["error"]["message"]


def of(num_items: int, item: bytes, before: bytes, after: bytes) -> bytes:
    return before + b",".join([item] * num_items) + after


TURN, CALL = b'{"role":"user","content":"a"}', b'{"id":"a","function":{"name":"a","arguments":"{}"}}'
TOOL, PART = b'{"function":{"name":"a"}}', b'{"type":"text","text":"a"}'
# As many as a body may have, whatever is made of them: a reading, a complaint, a prompt.
MOST = MAX_BRACKETS - 100
LARGE_BODIES = {
    "lists of a field": (CHAT, of(MOST, b"[1]", b'{"messages":[%b],"n":[' % TURN, b"]}")),
    "lists of a role": (CHAT, of(MOST, b"[1]", b'{"messages":[{"content":"a","role":[', b"]}]}")),
    "messages": (CHAT, of(MOST // 3, TURN, b'{"messages":[', b"]}")),
    "parts": (CHAT, of(MOST // 3, PART, b'{"messages":[{"role":"user","content":[', b"]}]}")),
    "calls": (CHAT, of(MOST // 7, CALL, b'{"messages":[{"role":"assistant","tool_calls":[', b"]}]}")),
    "tools": (CHAT, of(MOST // 4, TOOL, b'{"tool_choice":"none","messages":[%b],"tools":[' % TURN, b"]}")),
    "documents": (CHAT, of(MOST // 2, b'{"text":"a"}', b'{"messages":[%b],"documents":[' % TURN, b"]}")),
    "Anthropic's messages": ("/v1/messages", of(MOST // 3, TURN, b'{"max_tokens":1,"messages":[', b"]}")),
    "parts of an input": (
        "/v1/responses",
        of(MOST // 3, b'{"type":"input_text","text":"a"}', b'{"input":[{"role":"user","content":[', b"]}]}"),
    ),
    "messages to count": ("/tokenize", of(MOST // 3, TURN, b'{"messages":[', b"]}")),
    "prompts": (COMPLETIONS, of(MAX_COMMAS - 100, b'"a"', b'{"prompt":[', b"]}")),
    "keys": (COMPLETIONS, b'{"prompt":"a",%b}' % b",".join(b'"k%d":1' % i for i in range(MOST))),
}


@pytest.mark.parametrize("name", LARGE_BODIES)
def test_as_many_values_as_a_body_may_have_do_not_keep_the_event_loop_long(
    quick_server: ServerProcess, name: str
) -> None:
    def loop_seconds() -> float:
        """Processor time of the thread with the event loop: the wall clock would count what else runs here."""
        pid = quick_server.popen.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

    route, body = LARGE_BODIES[name]
    before = loop_seconds()
    reply = httpx.post(quick_server.url + route, content=body, timeout=60)
    assert loop_seconds() - before < 0.25  # a tenth, and half a second where it is rendered on the loop
    assert reply.status_code in (200, 400)


def test_lists_of_ids_have_a_limit(quick_server: ServerProcess) -> None:
    for name, limit in MAX_TOKEN_IDS.items():
        body = {"prompt": "abc", "max_tokens": 1, name: [97] * (limit + 1)}
        reply = httpx.post(f"{quick_server.url}/v1/completions", json=body, timeout=20)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        assert f"{limit:,}" in reply.json()["error"]["message"]


def test_unknown_routes_and_wrong_methods_have_openais_error_shape(quick_server: ServerProcess) -> None:
    missing = httpx.get(quick_server.url + "/v1/nothing")
    assert missing.status_code == 404
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    wrong = httpx.get(quick_server.url + CHAT)
    assert wrong.status_code == 405
    assert "use POST" in wrong.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"


def test_a_body_beyond_the_limit_is_refused_whole(quick_server: ServerProcess) -> None:
    reply = httpx.post(quick_server.url + COMPLETIONS, content=b" " * (33 << 20), timeout=30)
    assert reply.status_code == 413
    assert "33,554,432" in reply.json()["error"]["message"]


def test_a_body_that_announces_what_nobody_reads_is_refused_before_it_comes(quick_server: ServerProcess) -> None:
    host, port = quick_server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as sock:  # less than a slow body's time
        sock.sendall(head)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_a_refusal_shows_values_as_json_has_them(quick_server: ServerProcess) -> None:
    def message(**fields: Any) -> str:
        return str(httpx.post(quick_server.url + COMPLETIONS, json=completion(**fields)).json()["error"]["message"])

    assert message(stop=[""]) == "stop is ['']; it must be texts that are not empty"
    assert message(guided_choice=[]).startswith("guided_choice is empty: ")
    assert message(structured_outputs={"choice": []}).startswith("structured_outputs.choice is empty: ")
    assert "leave n out" in message(n=0)


def test_an_error_in_mid_stream_is_a_frame_of_its_own(quick_server: ServerProcess) -> None:
    reply = httpx.post(quick_server.url + COMPLETIONS, json=completion(prompt=FAIL.decode(), stream=True))
    assert reply.status_code == 200
    frames = reply.text.strip().split("\n\n")
    assert '"text":"!"' in frames[0]
    assert frames[-2].startswith('data: {"error":{"message":"this request failed on purpose"')
    assert frames[-1] == "data: [DONE]"


def test_sockets_that_send_rubbish_or_leave_early_do_no_harm(quick_server: ServerProcess) -> None:
    host, port = quick_server.url.removeprefix("http://").split(":")
    unfinished = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    for rubbish in (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", unfinished, b""):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(rubbish)
    assert httpx.get(f"{quick_server.url}/health").status_code == 200


def test_after_all_these_refusals_nothing_runs(quick_server: ServerProcess) -> None:
    assert metric(quick_server, "num_requests_running") == 0
    assert metric(quick_server, "kv_cache_usage_perc") == 0
    assert "Traceback" not in quick_server.log
