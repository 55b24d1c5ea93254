"""Tool calls and reasoning as the `openai` package sees them, over real sockets.

The fake engine says what it is told.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_engine import END, MODEL_NAME, SAY
from tests.server.harness import ServerProcess, metric, openai_client, server

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time", "strict": False}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def tools_server(*flags: str) -> Iterator[ServerProcess]:
    with server([sys.executable, "-m", "tests.server.tools_server", "--enable-auto-tool-choice", *flags]) as process:
        yield process


@pytest.fixture(scope="module")
def hermes_server() -> Iterator[ServerProcess]:
    yield from tools_server("--tool-call-parser=hermes", "--reasoning-parser=qwen3")


@pytest.fixture(scope="module")
def mistral_server() -> Iterator[ServerProcess]:
    yield from tools_server("--tool-call-parser=mistral")


@pytest.fixture
def client(hermes_server: ServerProcess) -> openai.OpenAI:
    return openai_client(hermes_server)


def say(text: str) -> Any:
    return [{"role": "user", "content": f"{SAY.decode()}{text}{END.decode()}"}]


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    """The choice of a whole reply, after a streamed one has turned out to be the same."""
    fields = {"model": MODEL_NAME, "messages": say(text), "tools": TOOLS, **fields}
    (choice,) = client.chat.completions.create(**fields).choices
    streamed = gather(client.chat.completions.create(stream=True, **fields))
    assert streamed["finish_reason"] == choice.finish_reason
    assert streamed["content"] == (choice.message.content or "")
    assert streamed["reasoning"] == (reasoning_of(choice.message) or "")
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    assert streamed["calls"] == calls
    return choice


def gather(stream: Any) -> dict[str, Any]:
    """A streamed answer put together the way clients do, with what they rely on asserted."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    ids = set()
    for chunk in stream:
        for choice in chunk.choices:
            found["finish_reason"] = choice.finish_reason or found["finish_reason"]
            found["content"] += choice.delta.content or ""
            found["reasoning"] += reasoning_of(choice.delta) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(found["calls"]):
                    assert call.type == "function"
                    assert call.function.name
                    ids.add(call.id)
                    found["calls"].append((call.function.name, call.function.arguments))
                else:
                    assert call.index == len(found["calls"]) - 1
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                    name, arguments = found["calls"][-1]
                    found["calls"][-1] = (name, arguments + call.function.arguments)
    assert len(ids) == len(found["calls"])
    return found


def reasoning_of(message: Any) -> str | None:
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return extra.get("reasoning_content")


def prompt_of(client: openai.OpenAI, messages: Any, **fields: Any) -> str:
    """What the chat template made of a request."""
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    reply = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=1, extra_body=extra, **fields
    )
    assert reply.model_extra is not None
    return bytes(reply.model_extra["prompt_token_ids"]).decode()


def test_a_call_is_a_message_with_an_id_and_json_arguments(client: openai.OpenAI) -> None:
    choice = ask(client, CALL)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("chatcmpl-tool-")
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}


def test_text_around_several_calls_is_content(client: openai.OpenAI) -> None:
    choice = ask(client, f"I look.\n{CALL}\n{TIME_CALL}\nWait.")
    assert choice.message.content == "I look.\n\n\nWait."
    assert [c.function.name for c in choice.message.tool_calls] == ["weather", "time"]
    assert len({c.id for c in choice.message.tool_calls}) == 2


def test_without_parallel_calls_only_the_first_is_given(client: openai.OpenAI) -> None:
    choice = ask(client, CALL + TIME_CALL, parallel_tool_calls=False)
    assert [c.function.name for c in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "tool_calls"


def test_a_call_that_is_not_wanted_says_nothing_of_the_one_before_it(client: openai.OpenAI) -> None:
    text = CALL + '<tool_call>{"name": "time", "arguments": {"a": '
    assert ask(client, text, parallel_tool_calls=False).finish_reason == "tool_calls"
    assert ask(client, text).finish_reason == "stop"


def test_plain_answers_and_malformed_calls_are_text(client: openai.OpenAI) -> None:
    for text in ("Just text.\n", "<tool_call>nothing</tool_call>", '<tool_call>\n{"name": "wea'):
        choice = ask(client, text)
        assert choice.message.content == text
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_a_call_cut_by_max_tokens_is_no_call_to_answer(client: openai.OpenAI) -> None:
    choice = ask(client, CALL, max_tokens=len(CALL.partition("ich")[0].encode()))
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Zür'


def test_a_stop_string_inside_a_call_ends_it_there(client: openai.OpenAI) -> None:
    choice = ask(client, CALL, stop=["ür"])
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Zür'  # the fake engine cuts nothing off
    assert choice.model_extra["stop_reason"] == "ür"
    at_the_end = ask(client, CALL + "more", stop=["</tool_call>"])
    assert at_the_end.finish_reason == "tool_calls"
    assert at_the_end.message.tool_calls[0].function.arguments == '{"city": "Zürich"}'


def test_with_tool_choice_none_or_without_tools_calls_are_text(client: openai.OpenAI) -> None:
    assert ask(client, CALL, tool_choice="none").message.content == CALL
    assert ask(client, CALL, tools=openai.omit).message.content == CALL
    assert ask(client, CALL, tool_choice="auto").message.content is None


def test_logprobs_and_token_ids_stay_complete_beside_calls(client: openai.OpenAI) -> None:
    fields = {"model": MODEL_NAME, "messages": say(CALL), "tools": TOOLS, "logprobs": True}
    extra = {"return_token_ids": True}
    whole = client.chat.completions.create(extra_body=extra, **fields).choices[0]
    assert bytes(whole.model_extra["token_ids"][:-1]).decode() == CALL
    chunks = list(client.chat.completions.create(extra_body=extra, stream=True, **fields))
    assert [t for c in chunks for t in (c.choices[0].model_extra or {}).get("token_ids", [])] == whole.model_extra[
        "token_ids"
    ]
    tokens = [t.token for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert tokens == [t.token for t in whole.logprobs.content]


def test_the_openai_stream_helper_puts_the_same_message_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL_NAME, messages=say(f"Hi.{CALL}{TIME_CALL}"), tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Hi."
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or []] == [
        ("weather", '{"city": "Zürich"}'),
        ("time", "{}"),
    ]


def test_mistral_calls_have_ids_of_nine_letters_and_digits(mistral_server: ServerProcess) -> None:
    choice = ask(openai_client(mistral_server), 'Ok.[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]time[ARGS]{}')
    assert choice.message.content == "Ok."
    for call in choice.message.tool_calls:
        assert len(call.id) == 9
        assert call.id.isalnum()


def test_a_call_of_harmony_comes_out_of_its_messages() -> None:
    for process in tools_server("--tool-call-parser=openai", "--reasoning-parser=openai_gptoss"):
        client = openai_client(process)
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'
        choice = ask(client, thought + call)
        assert reasoning_of(choice.message) == "Hm."
        assert choice.message.content is None
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
            ("weather", '{"city": "Bern"}')
        ]
        assert choice.finish_reason == "tool_calls"
        final = f"{thought}<|channel|>final<|message|>"
        usage = client.chat.completions.create(model=MODEL_NAME, messages=say(f"{final}Hi.")).usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == len(final)
        choice = ask(client, f"{final}Hi.")
        assert (reasoning_of(choice.message), choice.message.content) == ("Hm.", "Hi.")


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_reasoning_has_a_field_of_its_own_under_both_names(client: openai.OpenAI) -> None:
    choice = ask(client, "<think>\nHm.\n</think>\n\nHi.", tools=openai.omit)
    assert (reasoning_of(choice.message), choice.message.content) == ("Hm.", "Hi.")
    assert choice.finish_reason == "stop"


def test_calls_after_reasoning_are_calls_and_calls_within_are_not(client: openai.OpenAI) -> None:
    choice = ask(client, f"<think>\nI could {TIME_CALL}\n</think>\n\n{CALL}")
    assert reasoning_of(choice.message) == f"I could {TIME_CALL}"
    assert choice.message.content is None
    assert [c.function.name for c in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "tool_calls"


def test_the_tokens_of_the_reasoning_are_counted_up_to_its_end_tag(client: openai.OpenAI) -> None:
    for text, count in (("<think>\nHm.\n</think>\n\nHi.", 20), ("Hi.", 0), ("<think>Hm", 10), ("Hi.</think>", 0)):
        fields: dict[str, Any] = {"model": MODEL_NAME, "messages": say(text)}
        usage = client.chat.completions.create(**fields).usage
        assert usage is not None
        details = usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens == count
        (*_, last) = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
        assert last.usage == usage


def test_reasoning_that_is_cut_is_all_reasoning(client: openai.OpenAI) -> None:
    choice = ask(client, "<think>\nI never come to an end", max_tokens=20)
    assert (reasoning_of(choice.message), choice.message.content) == ("I never come", None)
    assert choice.finish_reason == "length"


def test_reasoning_can_be_left_out(client: openai.OpenAI) -> None:
    choice = ask(client, "<think>\nHm.\n</think>\n\nHi.", extra_body={"include_reasoning": False})
    assert (reasoning_of(choice.message), choice.message.content) == (None, "Hi.")


def test_a_template_that_closes_the_reasoning_gets_content(client: openai.OpenAI) -> None:
    text = "<think> is a tag"
    for extra in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        choice = ask(client, text, tools=openai.omit, extra_body=extra)
        assert (reasoning_of(choice.message), choice.message.content) == (None, text)
    assert ask(client, text, tools=openai.omit, reasoning_effort="none").message.content == text


# -- what the template gets --------------------------------------------------------------------------------------------


def test_tools_and_documents_reach_the_template(client: openai.OpenAI) -> None:
    user = [{"role": "user", "content": "x"}]
    prompt = prompt_of(client, user, tools=TOOLS, extra_body={"documents": [{"title": "T", "text": "D"}]})
    assert 'documents: [{"title": "T", "text": "D"}]' in prompt
    assert json.dumps(TOOLS[0]) in prompt
    assert '{"type": "function", "function": {"name": "time"}}' in prompt
    assert "weather" in prompt_of(client, user, tools=TOOLS, tool_choice="none")


def test_tokenize_counts_the_tools_too(hermes_server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "x"}]
    reply = httpx.post(f"{hermes_server.url}/tokenize", json={"messages": messages, "tools": TOOLS}).json()
    prompt = prompt_of(openai_client(hermes_server), messages, tools=TOOLS)
    assert bytes(reply["tokens"]).decode() == prompt


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, None, True),
        ({"reasoning_effort": "low"}, "low", True),
        ({"reasoning_effort": "none"}, "none", False),
        ({"reasoning_effort": "high", "enable_thinking": False}, "high", False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high", False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "max"}}, "max", False),
    ],
)
def test_effort_and_thinking_reach_the_template(
    client: openai.OpenAI, fields: dict[str, Any], effort: str | None, thinks: bool
) -> None:
    prompt = prompt_of(client, [{"role": "user", "content": "x"}], extra_body=fields)
    assert prompt.startswith(f"effort: {effort}\n" if effort else "<|im_start|>")
    assert prompt.endswith("assistant\n" if thinks else "</think>\n\n")


def test_an_answer_with_calls_can_be_sent_back_with_the_results(client: openai.OpenAI) -> None:
    answer = ask(client, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}").message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "12°"},
        {
            "role": "tool",
            "tool_call_id": "other",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
        },
    ]
    prompt = prompt_of(client, [{"role": "user", "content": "?"}, answer.model_dump(), *results], tools=TOOLS)
    assert f"<think>\nHm.\n</think>\n\nI look.\n{CALL}<|im_end|>" in prompt
    assert "<tool_response>\n12°\n</tool_response>\n<tool_response>\n1\n2\n</tool_response>" in prompt


@pytest.mark.parametrize("arguments", ['{"city": "Zür', "[1]", "", "null", "{" * 20_000, {"city": "Bern"}, None])
def test_arguments_of_any_kind_in_the_history_are_passed_on(client: openai.OpenAI, arguments: Any) -> None:
    call = {"id": "c", "function": {"name": "weather", "arguments": arguments}}
    history: list[Any] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [{**call, "index": 0}]},
        {"role": "tool", "content": "no"},
    ]
    if isinstance(arguments, str) and len(arguments) > 1000:
        with pytest.raises(openai.BadRequestError, match="the limit is"):
            prompt_of(client, history)
        return
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    assert f'"arguments": {written or "{}"}}}\n</tool_call>' in prompt_of(client, history)


def test_a_server_without_a_parser_says_how_to_start_it(quick_server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
        openai_client(quick_server).chat.completions.create(model=MODEL_NAME, messages=say("x"), tools=TOOLS)


def test_after_all_this_nothing_runs_and_nothing_went_wrong(hermes_server: ServerProcess) -> None:
    assert metric(hermes_server, "num_requests_running") == 0
    assert metric(hermes_server, "kv_cache_usage_perc") == 0
    assert "Traceback" not in hermes_server.log
