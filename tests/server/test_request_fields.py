"""Every field of a chat or completions request does what it says, as the `openai` package sees it."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from octavo.server.protocol import ChatBody, CompletionBody
from octavo.server.reading import INSTEAD, UNSUPPORTED
from tests.server.fake_engine import MODEL_NAME
from tests.server.harness import ServerProcess, fake_server, openai_client, wait_until

USER = [{"role": "user", "content": "hello"}]
OPEN = [*USER, {"role": "assistant", "content": "well, "}]
FLAGS = [
    *("--enable-log-requests", "--log-format", "json", "--trust-request-chat-template"),
    *("--response-role", "bot", "--default-chat-template-kwargs", '{"mood": "calm"}'),
    *("--chat-template", "{{ mood }}|{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"),
]


@pytest.fixture(scope="module")
def flagged_server() -> Iterator[ServerProcess]:
    yield from fake_server(flags=FLAGS)


def complete(client: openai.OpenAI, prompt: Any = "abc", max_tokens: int = 4, **fields: Any) -> Any:
    return client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, **_apart(fields, CompletionParams)
    )


def chat(client: openai.OpenAI, messages: Any = USER, max_tokens: int = 10, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=max_tokens, **_apart(fields, ChatParams)
    )


ChatParams = set(typing.get_type_hints(chat_create_params.CompletionCreateParamsBase)) | {"stream"}
CompletionParams = set(typing.get_type_hints(completion_create_params.CompletionCreateParamsBase)) | {"stream"}


def _apart(fields: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """vLLM's fields travel in the package's extra_body."""
    return {
        **{name: value for name, value in fields.items() if name in own},
        "extra_body": {name: value for name, value in fields.items() if name not in own},
    }


def refusal(ask: Any, *args: Any, **fields: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(*args, **fields)
    return caught.value


def logged(server: ServerProcess, request_id: str) -> dict[str, Any]:
    """The log's line about what a request asked of the engine."""

    def lines() -> list[str]:
        return [line for line in server.lines if f"-{request_id}" in line and '"params"' in line]

    wait_until(lambda: bool(lines()))
    found: dict[str, Any] = json.loads(lines()[0])
    return found


# -- the prompt --------------------------------------------------------------------------------------------------------


def test_echo_repeats_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    assert complete(client, echo=True).choices[0].text == "abcabca"
    assert complete(client, [97, 98], echo=True).choices[0].text == "ababab"
    many = complete(client, ["abc", "xy"], echo=True)
    assert [c.text for c in many.choices] == ["abcabca", "xyxyxy"]
    streamed = ["", ""]
    for chunk in complete(client, ["abc", "xy"], echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == ["abcabca", "xyxyxy"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_no_tokens_is_the_prompt_alone(client: openai.OpenAI, stream: bool) -> None:
    reply = complete(client, max_tokens=0, echo=True, stream=stream, **({"stream_options": USAGE} if stream else {}))
    replies = list(reply) if stream else [reply]
    choices = [choice for reply in replies for choice in reply.choices]
    assert "".join(choice.text for choice in choices) == "abc"
    assert choices[-1].finish_reason == "length"
    assert (replies[-1].usage.completion_tokens, replies[-1].usage.total_tokens) == (0, 3)
    assert refusal(complete, client, max_tokens=0).param == "max_tokens"


USAGE = {"include_usage": True}


def test_a_truncated_prompt_keeps_its_last_tokens(client: openai.OpenAI) -> None:
    assert complete(client, "0123456789", truncate_prompt_tokens=3, echo=True).choices[0].text == "7897897"
    assert complete(client, [1, 2, 65], truncate_prompt_tokens=1).choices[0].text == "AAAA"
    long = complete(client, "x" * 5000 + "y", truncate_prompt_tokens=-1, max_tokens=20)
    assert (long.usage.prompt_tokens, long.usage.completion_tokens) == (1004, 20)
    talk = chat(client, truncate_prompt_tokens=4)
    assert (talk.choices[0].message.content, talk.usage.prompt_tokens) == ("lo\n>lo\n>lo", 4)
    for bad in (0, -2, 1025):
        assert refusal(complete, client, truncate_prompt_tokens=bad).param == "truncate_prompt_tokens"


def test_a_text_to_be_truncated_has_a_limit_too(client: openai.OpenAI) -> None:
    error = refusal(complete, client, "x" * 2_000_001, truncate_prompt_tokens=-1)
    assert error.param == "prompt"
    assert "2,000,000" in error.message


# -- the conversation --------------------------------------------------------------------------------------------------


def test_a_final_message_is_gone_on_with(client: openai.OpenAI) -> None:
    reply = chat(client, OPEN, continue_final_message=True, max_tokens=40)
    prompt = "user:hello\nassistant:well, "
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.choices[0].message.content == (prompt * 2)[:40]
    parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "well, "}]}]
    assert chat(client, parts, continue_final_message=True, add_generation_prompt=False).usage.prompt_tokens == 27
    both = refusal(chat, client, OPEN, continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"
    nothing = [*USER, {"role": "assistant", "tool_calls": []}]
    assert chat(client, nothing, continue_final_message=True).usage.prompt_tokens == len("user:hello\nassistant:")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_echo_is_what_the_message_began_with(client: openai.OpenAI, stream: bool) -> None:
    def said(**fields: Any) -> str:
        reply = chat(client, OPEN, echo=True, max_tokens=4, stream=stream, **fields)
        if not stream:
            return str(reply.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in reply)

    assert said(continue_final_message=True) == "well, user"
    assert said() == "well, user"  # as in vLLM: the last message is the assistant's too


def test_no_generation_prompt_and_the_role_of_the_last_message(client: openai.OpenAI) -> None:
    reply = chat(client, add_generation_prompt=False)
    assert reply.usage.prompt_tokens == len("user:hello\n")
    assert reply.choices[0].message.role == "user"


def test_a_servers_template_its_variables_and_its_role(flagged_server: ServerProcess) -> None:
    client = openai_client(flagged_server)
    reply = chat(client, max_tokens=16)
    assert (reply.choices[0].message.role, reply.choices[0].message.content) == ("bot", "calm|user:hello;")
    (first, *_) = chat(client, stream=True)
    assert first.choices[0].delta.role == "bot"
    moody = chat(client, chat_template_kwargs={"mood": "wild"}, max_tokens=4)
    assert moody.choices[0].message.content == "wild"


def test_a_request_may_bring_its_template_where_that_is_trusted(
    client: openai.OpenAI, flagged_server: ServerProcess
) -> None:
    error = refusal(chat, client, chat_template="{{ messages[0].content }}")
    assert error.param == "chat_template"
    assert "--trust-request-chat-template" in error.message
    trusting = openai_client(flagged_server)
    assert chat(trusting, chat_template="<{{ messages[0].content }}>").choices[0].message.content[:7] == "<hello>"
    assert chat(trusting, max_tokens=4).choices[0].message.content == "calm"  # the next one has the server's again
    for bad in ("{% if %}", "{% for i in range(10**9) %}{% endfor %}", "{{ ''.__class__.__mro__ }}", "x" * 70_000):
        assert refusal(chat, trusting, chat_template=bad).param == "chat_template"


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_tokens_can_be_named_by_their_ids(client: openai.OpenAI) -> None:
    told = complete(client, logprobs=2, return_tokens_as_token_ids=True).choices[0].logprobs
    assert told.tokens == ["token_id:97", "token_id:98", "token_id:99", "token_id:97"]
    assert list(told.top_logprobs[0]) == ["token_id:97", "token_id:226"]
    (first, *_) = (
        chat(client, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True).choices[0].logprobs.content
    )
    assert (first.token, first.bytes) == ("token_id:117", [117])
    assert [t.token for t in first.top_logprobs] == ["token_id:117", "token_id:226"]


def test_prompt_logprobs_have_vllms_shape(client: openai.OpenAI) -> None:
    expected = [
        None,
        {
            "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
            "226": {"logprob": -0.25, "rank": 1, "decoded_token": "\ufffd"},
        },
    ]
    fields = {"prompt_logprobs": 1, "max_tokens": 2}
    assert complete(client, "ab", **fields).choices[0].prompt_logprobs == expected
    first, *others = complete(client, "ab", stream=True, **fields)
    assert first.choices[0].prompt_logprobs == expected
    assert not any("prompt_logprobs" in chunk.choices[0].model_extra for chunk in others)
    told = chat(client, prompt_logprobs=0).prompt_logprobs
    assert [list(entry) for entry in told[1:]] == [[str(ord(c))] for c in "ser:hello\n>"]
    (first, *_) = chat(client, prompt_logprobs=0, stream=True)
    assert first.prompt_logprobs == told


def test_an_echo_with_logprobs_has_those_of_the_prompt_first(client: openai.OpenAI) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2}
    choice = complete(client, "aé", **fields).choices[0]
    told = choice.logprobs
    assert choice.text == "aéa\ufffd"
    assert told.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"]
    assert told.text_offset == [0, 1, 2, 2, 3]
    assert told.token_logprobs == [None, -0.5, -1.0, -0.5, -0.5]
    assert told.top_logprobs[:2] == [None, {"bytes:\\xe2": -0.25, "bytes:\\xc3": -0.5}]
    assert told.top_logprobs[-1] == {"bytes:\\xc3": -0.5}
    streamed = [chunk.choices[0] for chunk in complete(client, "aé", stream=True, **fields)]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [x for c in streamed for x in getattr(c.logprobs, name)] == getattr(told, name)
    assert "".join(c.text for c in streamed) == choice.text
    scored = complete(client, "aé", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (scored.text, scored.logprobs.tokens) == ("aé", told.tokens[:3])
    more = complete(client, "aé", prompt_logprobs=2, **fields).choices[0]
    assert more.logprobs == told
    assert len(more.prompt_logprobs[1]) == 2


# -- what goes to the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [complete, chat])
def test_sampling_fields_reach_the_engine(flagged_server: ServerProcess, ask: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "seed": 11,
        "stop": ["~", "^"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "allowed_token_ids": [1, 97, 98],
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
    }
    client = openai_client(flagged_server)
    name = f"fields-of-{ask.__name__}"
    ask(client, max_tokens=4, logit_bias={"97": 5, "98": -200}, request_id=name, **fields)
    params = logged(flagged_server, name)["params"]
    assert {name: params[name] for name in fields if name != "repetition_detection"} == {
        name: value for name, value in fields.items() if name != "repetition_detection"
    }
    assert params["logit_bias"] == {"97": 5.0, "98": -100.0}
    assert "max_pattern_size=4, min_pattern_size=2, min_count=3" in params["repetition_detection"]
    assert params["max_tokens"] == 4


def test_what_a_client_calls_its_request_is_in_the_log_with_the_prompt(flagged_server: ServerProcess) -> None:
    labels = {"user": "u1", "safety_identifier": "s1", "metadata": {"team": "red"}}
    client = openai_client(flagged_server)
    for ask in (complete, chat):
        name = f"labels-of-{ask.__name__}"
        ask(client, **labels, prompt_cache_key="k", service_tier="default", request_id=name)
        line = logged(flagged_server, name)
        assert {label: line[label] for label in labels} == labels


def test_both_values_of_spaces_between_special_tokens_ask_for_what_is_done_anyway(client: openai.OpenAI) -> None:
    assert {complete(client, spaces_between_special_tokens=b).choices[0].text for b in (True, False)} == {"abca"}


def test_a_seed_of_minus_one_is_none(client: openai.OpenAI) -> None:
    seeds = [complete(client, seed=-1, return_seed=True).choices[0].seed for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert min(seeds) >= 0


# -- all of them -------------------------------------------------------------------------------------------------------


def test_every_parameter_of_the_openai_package_is_known() -> None:
    assert set(ChatBody.__struct_fields__) | set(UNSUPPORTED) >= ChatParams
    assert set(CompletionBody.__struct_fields__) | set(UNSUPPORTED) >= CompletionParams


DOCUMENT = Path(__file__).parents[2] / "docs" / "requests.md"


def test_the_document_lists_every_field_and_where_it_works() -> None:
    fields = {
        "both": set(ChatBody.__struct_fields__) & set(CompletionBody.__struct_fields__),
        "chat": set(ChatBody.__struct_fields__) - set(CompletionBody.__struct_fields__),
        "completions": set(CompletionBody.__struct_fields__) - set(ChatBody.__struct_fields__),
    }
    table = DOCUMENT.read_text().split("## What works")[1].split("##")[0]
    listed: dict[str, list[str]] = {where: [] for where in fields}
    for names, where in re.findall(r"^\| (`.*?`) \| (\w+) \|", table, re.MULTILINE):
        listed[where] += re.findall(r"`(\w+)`", names)
    assert {where: sorted(names) for where, names in listed.items()} == {w: sorted(n) for w, n in fields.items()}


def test_the_document_lists_every_refused_field_with_its_harmless_values() -> None:
    def row(name: str, harmless: tuple[Any, ...]) -> str:
        values = [json.dumps(value) for value in harmless if isinstance(value, str | int | list | dict)]
        shown = ", ".join(f"`{value}`" for value in values) or ("any value" if harmless else "none")
        where = "completions" if name in ChatBody.__struct_fields__ else "both"
        return f"| `{name}` | {where} | {shown} | {INSTEAD.get(name, '')} |"

    table = DOCUMENT.read_text().split("## What is refused")[1].split("##")[0]
    listed = [line for line in table.splitlines() if line.startswith("| `")]
    assert listed == [row(name, harmless) for name, harmless in sorted(UNSUPPORTED.items())]


NASTY = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e308, "", "x", "\ud800", "\0", "x" * 5000),
    *([], [[]], [None], [-1], [2**40], [""], ["\ud800"], ["x", 1], [{}], {}, {"": ""}, {"x": None}, {"1": 1e300}),
    *({"1": -(2**70)}, {"type": "text"}, {"type": []}, {"max_pattern_size": 2**70}, [[[[[[]]]]]], "{{ x }}"),
]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_no_value_of_any_field_makes_the_server_fail(flagged_server: ServerProcess, route: str) -> None:
    body = CompletionBody if route == "completions" else ChatBody
    names = {*body.__struct_fields__, *UNSUPPORTED} - {"stream"}
    required = {"prompt": "abc"} if route == "completions" else {"messages": USER}
    with httpx.Client(base_url=f"{flagged_server.url}/v1/", timeout=20) as http:
        for i, name in enumerate(sorted(names)):
            for value in NASTY[i % 3 :: 3]:  # some for each, each for some
                content = json.dumps({"max_tokens": 1, "ignore_eos": True, **required, name: value})
                reply = http.post(route, content=content)
                assert reply.status_code in (200, 400, 404), (name, value, reply.text)
    assert "Traceback" not in flagged_server.log
