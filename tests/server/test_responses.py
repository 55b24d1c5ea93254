"""/v1/responses as the `openai` package sees it, over real sockets. The fake engine says what it is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_engine import MODEL_NAME
from tests.server.harness import ServerProcess, fake_server, metric, openai_client, wait_until
from tests.server.responses_client import frames, say, streamed, validated, whole
from tests.server.test_tools import CALL, TIME_CALL, tools_server

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "time", "parameters": None, "strict": None},
]
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def hermes_server() -> Iterator[ServerProcess]:
    yield from tools_server("--tool-call-parser=hermes", "--reasoning-parser=qwen3")


@pytest.fixture(scope="module")
def small_server() -> Iterator[ServerProcess]:
    """Keeps three responses, for two keys."""
    yield from fake_server(flags=["--responses-store-size", "3", "--api-key", "mine,yours"])


@pytest.fixture
def client(hermes_server: ServerProcess) -> openai.OpenAI:
    return openai_client(hermes_server)


def shape(response: Any) -> list[Any]:
    """What a response says, without the ids."""
    said: list[Any] = []
    for item in response.output:
        match item.type:
            case "message":
                said.append(("message", item.status, *(part.text for part in item.content)))
            case "reasoning":
                said.append(("reasoning", item.status, *(part.text for part in item.content)))
            case "function_call":
                said.append(("call", item.status, item.name, item.arguments))
    return said


def ask(server: ServerProcess, text: str, **fields: Any) -> Any:
    """A whole response that says `text`, after a streamed one has turned out to be the same."""
    body = {"model": MODEL_NAME, "input": say(text), **fields}
    response = whole(server, **body)
    events = streamed(server, **body)
    last = events[-1].response
    assert (shape(last), last.status, last.usage) == (shape(response), response.status, response.usage)
    assert gathered(events) == shape(response)
    return response


def gathered(events: list[Any]) -> list[Any]:
    """What a client that only listens to deltas has in the end, every event having come in its order."""
    items: list[Any] = []
    done: list[Any] = []
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] in ("completed", "incomplete", "failed")
    for name, event in zip(names[2:-1], events[2:-1], strict=True):
        match name:
            case "output_item.added":
                assert event.output_index == len(items) == len(done)
                assert event.item.status == "in_progress"
                items.append([event.item, ""])
            case "content_part.added":
                assert (event.item_id, event.content_index) == (items[-1][0].id, 0)
                assert event.part.text == ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert (event.item_id, event.output_index) == (items[-1][0].id, len(items) - 1)
                items[-1][1] += event.delta
            case "output_text.done" | "reasoning_text.done":
                assert event.text == items[-1][1]
            case "content_part.done":
                assert event.part.text == items[-1][1]
            case "function_call_arguments.done":
                assert event.arguments == items[-1][1]
            case "output_item.done":
                assert (event.item.id, event.item.type) == (items[-1][0].id, items[-1][0].type)
                done.append(event.item)
            case _:
                raise AssertionError(name)
    assert done == events[-1].response.output
    return shape(events[-1].response)


# -- whole and streamed ------------------------------------------------------------------------------------------------


def test_a_response_has_text_status_and_usage(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL_NAME, input=say("Good day."), instructions="Be kind.")
    validated(response.model_dump())
    assert response.output_text == "Good day."
    assert response.id.startswith("resp_")
    assert response.status == "completed"
    assert response.output[0].id.startswith("msg_")
    assert response.usage is not None
    assert response.usage.output_tokens == len("Good day.") + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.completed_at is not None
    assert response.created_at <= response.completed_at


def test_what_was_asked_is_repeated_in_the_response(hermes_server: ServerProcess) -> None:
    asked: dict[str, Any] = {
        "background": False,
        "instructions": "Be kind.",
        "max_output_tokens": 99,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "model": MODEL_NAME,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "default",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "none",
        "tools": [{**TOOLS[0]}, {"type": "function", "name": "time", "description": None} | TOOLS[1]],
        "top_logprobs": 2,
        "top_p": 0.5,
        "truncation": "disabled",
        "user": "u",
    }
    reply = httpx.post(
        f"{hermes_server.url}/v1/responses", json={**asked, "input": say("x"), "include": LOGPROBS}
    ).json()
    validated(reply)
    assert {name: reply[name] for name in asked} == asked


def test_text_reasoning_and_calls_are_items_in_their_order(hermes_server: ServerProcess) -> None:
    assert shape(ask(hermes_server, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{TIME_CALL}\nWait.", tools=TOOLS)) == [
        ("reasoning", "completed", "Hm."),
        ("message", "completed", "I look."),
        ("call", "completed", "weather", '{"city": "Zürich"}'),
        ("call", "completed", "time", "{}"),
        ("message", "completed", "\n\n\nWait."),
    ]


def test_without_parallel_calls_only_the_first_is_given(hermes_server: ServerProcess) -> None:
    response = ask(hermes_server, CALL + TIME_CALL, tools=TOOLS, parallel_tool_calls=False)
    assert [item.name for item in response.output] == ["weather"]


def test_tool_choice_none_makes_calls_text(hermes_server: ServerProcess) -> None:
    assert shape(ask(hermes_server, CALL, tools=TOOLS, tool_choice="none")) == [("message", "completed", CALL)]


def test_a_cut_response_is_incomplete_and_so_is_its_last_item(hermes_server: ServerProcess) -> None:
    text = f"<think>Hm.</think>Hi.{CALL}"
    for cut, last in {
        "<think>Hm": ("reasoning", "incomplete", "Hm"),
        "<think>Hm.</think>H": ("message", "incomplete", "H"),
        text.partition("ich")[0]: ("call", "incomplete", "weather", '{"city": "Zür'),
    }.items():
        response = ask(hermes_server, text, tools=TOOLS, max_output_tokens=len(cut.encode()))
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.completed_at is None
        assert shape(response)[-1] == last


def test_a_stop_string_inside_a_call_leaves_the_call_incomplete(hermes_server: ServerProcess) -> None:
    response = ask(hermes_server, CALL, tools=TOOLS, stop=["ür"])
    assert response.status == "completed"
    assert shape(response) == [("call", "incomplete", "weather", '{"city": "Zür')]


def test_an_answer_of_nothing_is_an_empty_message(hermes_server: ServerProcess) -> None:
    assert shape(ask(hermes_server, "")) == [("message", "completed", "")]


def test_reasoning_tokens_are_counted_with_their_tags(hermes_server: ServerProcess) -> None:
    thought = "<think>\nHm.\n</think>"
    response = ask(hermes_server, f"{thought}\n\nHi.")
    assert response.usage.output_tokens_details.reasoning_tokens == len(thought)
    assert ask(hermes_server, "Hi.").usage.output_tokens_details.reasoning_tokens == 0
    cut = ask(hermes_server, thought, max_output_tokens=9)
    assert cut.usage.output_tokens_details.reasoning_tokens == 9


def test_logprobs_are_those_of_the_message(hermes_server: ServerProcess) -> None:
    fields: dict[str, Any] = {"include": LOGPROBS, "top_logprobs": 2, "tools": TOOLS}
    response = ask(hermes_server, f"<think>Hm.</think>Grüß\n{CALL}", **fields)
    (part,) = response.output[1].content
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode().strip() == "Grüß"
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * len(part.logprobs)
    events = streamed(hermes_server, model=MODEL_NAME, input=say("<think>Hm.</think>Grüß"), **fields)
    told = [entry.model_dump() for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    (done,) = (e for e in events if e.type == "response.output_text.done")
    assert told == [entry.model_dump() for entry in done.logprobs]
    assert len(told) == len("Grüß".encode())
    assert ask(hermes_server, "Hi.").output[0].content[0].logprobs == []


def test_reasoning_comes_as_opaque_text_if_wanted_and_can_be_sent_back_as_that_alone(client: openai.OpenAI) -> None:
    text = say("<think>let me see: é</think>Yes")
    plain = client.responses.create(model=MODEL_NAME, input=text, max_output_tokens=100)
    assert plain.output[0].encrypted_content is None
    asked: Any = {"model": MODEL_NAME, "input": text, "max_output_tokens": 100}
    with client.responses.stream(**asked, include=["reasoning.encrypted_content"]) as stream:
        response = stream.get_final_response()
    thought = response.output[0]
    assert "let me see" not in thought.encrypted_content

    def prompt_of(item: dict[str, Any]) -> Any:
        items = [{"role": "user", "content": "Well?"}, item, {"role": "user", "content": "So?"}]
        return client.responses.create(model=MODEL_NAME, input=items, max_output_tokens=1).usage.input_tokens

    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    content = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me see: é"}]}
    assert prompt_of(sealed) == prompt_of(content)


def test_the_openai_stream_helper_puts_the_response_together(client: openai.OpenAI) -> None:
    text = f"<think>Hm.</think>Hi.{CALL}"
    strict_free: Any = [{**tool, "strict": False} for tool in TOOLS]
    with client.responses.stream(model=MODEL_NAME, input=say(text), tools=strict_free) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert final.output_text == "Hi."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_the_openai_parse_helper_reads_a_plain_response(client: openai.OpenAI) -> None:
    assert client.responses.parse(model=MODEL_NAME, input=say("Hi.")).output_text == "Hi."


def test_effort_and_template_variables_reach_the_template(hermes_server: ServerProcess) -> None:
    def prompt_tokens(**fields: Any) -> int:
        tokens: int = whole(hermes_server, input="x", max_output_tokens=1, **fields).usage.input_tokens
        return tokens

    bare = prompt_tokens()
    assert prompt_tokens(reasoning={"effort": "low"}) == bare + len("effort: low\n")
    assert prompt_tokens(chat_template_kwargs={"mood": "glad"}) == bare + len("mood: glad\n")
    assert prompt_tokens(enable_thinking=False) == bare + len("<think>\n\n</think>\n\n")


def test_chat_fields_of_vllm_do_here_what_they_do_there(quick_server: ServerProcess) -> None:
    def text(**fields: Any) -> str:
        said: str = whole(quick_server, input="hello", max_output_tokens=10, **fields).output_text
        return said

    assert text() == "user:hello"
    assert text(stop="he") == "user:he"  # the fake engine cuts nothing off
    assert text(truncate_prompt_tokens=4) == "llo\n>"[1:] * 2 + "lo"
    reply = httpx.post(f"{quick_server.url}/v1/responses", json={"input": "x" * 2000})
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    long = whole(quick_server, input="x" * 2000, truncation="auto", max_output_tokens=4)
    assert (long.truncation, long.usage.input_tokens, long.output_text) == ("auto", 1020, "xxxx")


# -- conversations -----------------------------------------------------------------------------------------------------


def echo(client: openai.OpenAI, **fields: Any) -> str:
    """The prompt that the template makes, as the fake engine repeats it; it ends with a mark."""
    response = client.responses.create(model=MODEL_NAME, stream=False, **fields)
    return response.output_text


@pytest.fixture
def echo_client(quick_server: ServerProcess) -> openai.OpenAI:
    return openai_client(quick_server)


def test_a_list_of_items_is_the_conversation_that_the_model_sees(echo_client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "developer", "content": "d"},
    ]
    prompt = "system:I\nsystem:S\nuser:a\nb\nassistant:c\nassistant:\ntool:12\nassistant:no\nsystem:d\n>"
    assert echo(echo_client, input=items, instructions="I", max_output_tokens=len(prompt)) == prompt


def test_a_conversation_goes_on_from_the_response_before_without_its_instructions(
    echo_client: openai.OpenAI,
) -> None:
    first = echo_client.responses.create(model=MODEL_NAME, input="b", instructions="I", max_output_tokens=2)
    assert first.output_text == "sy"  # the beginning of its prompt
    prompt = "system:J\nuser:b\nassistant:sy\nuser:c\n>"
    second = echo_client.responses.create(
        model=MODEL_NAME,
        input="c",
        previous_response_id=first.id,
        instructions="J",
        max_output_tokens=len(prompt),
    )
    assert (second.previous_response_id, second.output_text) == (first.id, prompt)
    third = echo(echo_client, input="d", previous_response_id=second.id, max_output_tokens=90)
    assert third.startswith(f"user:b\nassistant:sy\nuser:c\nassistant:{prompt}\nuser:d\n>")


def test_a_call_and_its_output_go_on_by_id_and_by_sending_the_items_back(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": say(f"<think>Hm.</think>I look.{CALL}")}]
    first = client.responses.create(model=MODEL_NAME, input=asked, tools=TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": say("It is 12.")}
    by_id = client.responses.create(model=MODEL_NAME, input=[result], previous_response_id=first.id, tools=TOOLS)
    sent_back = client.responses.create(model=MODEL_NAME, input=[*asked, *first.output, result], tools=TOOLS)
    by_reference = client.responses.create(
        model=MODEL_NAME,
        input=[*asked, *({"type": "item_reference", "id": item.id} for item in first.output), result],
        tools=TOOLS,
    )
    for response in (by_id, sent_back, by_reference):
        assert response.output_text == "It is 12."
        assert response.usage is not None
        assert by_id.usage is not None
        assert response.usage.input_tokens == by_id.usage.input_tokens


def test_parsed_items_can_be_sent_back_as_they_are(client: openai.OpenAI) -> None:
    first = client.responses.parse(model=MODEL_NAME, input=say(f"Hi.{CALL}"), tools=[{**TOOLS[0]}])
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": say("ok")}  # type: ignore[union-attr]
    asked: Any = [{"role": "user", "content": "x"}, *first.output, result]
    assert client.responses.create(model=MODEL_NAME, input=asked).output_text == "ok"


# -- the store ---------------------------------------------------------------------------------------------------------


def test_a_stored_response_can_be_read_and_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL_NAME, input=say("Hi."))
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    for use in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.delete(response.id),
        lambda: client.responses.input_items.list(response.id),
        lambda: client.responses.create(model=MODEL_NAME, input="x", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError, match="deleted or evicted"):
            use()


def test_a_streamed_response_is_stored_like_any_other(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL_NAME, input=say("Hi.")) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == "Hi."


def test_with_store_false_nothing_is_kept(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL_NAME, input=say("Hi."), store=False)
    with pytest.raises(openai.NotFoundError, match="store=false"):
        client.responses.retrieve(response.id)


def test_the_input_items_of_a_response_are_listed_page_by_page(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(i)} for i in range(30)]
    response = client.responses.create(model=MODEL_NAME, input=items, max_output_tokens=1)
    listed = list(client.responses.input_items.list(response.id))  # the package turns the pages
    assert [item.content[0].text for item in listed] == [str(i) for i in reversed(range(30))]  # type: ignore[union-attr]
    page = client.responses.input_items.list(response.id, order="asc", limit=2, after=listed[-3].id or "")
    assert [item.content[0].text for item in page.data] == ["3", "4"]  # type: ignore[union-attr]
    assert page.has_more
    again = client.responses.create(model=MODEL_NAME, input="x", previous_response_id=response.id)
    assert len(client.responses.input_items.list(again.id).data) == 1


def with_key(server: ServerProcess, key: str) -> openai.OpenAI:
    return openai_client(server).with_options(api_key=key)


def test_the_least_used_response_is_evicted_and_says_so(small_server: ServerProcess) -> None:
    client = with_key(small_server, "mine")
    first, second, third = (client.responses.create(model=MODEL_NAME, input=say(t)) for t in "abc")
    client.responses.retrieve(first.id)
    client.responses.create(model=MODEL_NAME, input=say("d"))
    assert client.responses.retrieve(first.id).output_text == "a"
    assert client.responses.retrieve(third.id).output_text == "c"
    with pytest.raises(openai.NotFoundError, match="the last 3 are kept"):
        client.responses.create(model=MODEL_NAME, input="x", previous_response_id=second.id)


def test_another_key_finds_nothing(small_server: ServerProcess) -> None:
    mine, yours = with_key(small_server, "mine"), with_key(small_server, "yours")
    response = mine.responses.create(model=MODEL_NAME, input=say("secret"))
    item: Any = {"type": "item_reference", "id": response.output[0].id}
    for use in (
        lambda: yours.responses.retrieve(response.id),
        lambda: yours.responses.delete(response.id),
        lambda: yours.responses.cancel(response.id),
        lambda: yours.responses.input_items.list(response.id),
        lambda: yours.responses.create(model=MODEL_NAME, input="x", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError) as refusal:
            use()
        assert refusal.value.body["code"] == "response_not_found"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="no stored response has such an item"):
        yours.responses.create(model=MODEL_NAME, input=[item])
    assert mine.responses.retrieve(response.id).output_text == "secret"


def test_a_client_cannot_choose_the_id_of_another_ones_response(client: openai.OpenAI) -> None:
    ids = {
        client.responses.create(model=MODEL_NAME, input=say("x"), extra_headers={"X-Request-Id": "same"}).id
        for _ in range(2)
    }
    assert len(ids) == 2


def test_a_server_without_a_store_says_so_where_one_is_needed() -> None:
    for process in fake_server(flags=["--responses-store-size", "0"]):
        client = openai_client(process)
        response = client.responses.create(model=MODEL_NAME, input=say("Hi."))
        assert (response.output_text, (response.model_extra or {})["store"]) == ("Hi.", False)
        for fields in ({"store": True}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="--responses-store-size 0"):
                client.responses.create(model=MODEL_NAME, input="x", **fields)  # type: ignore[call-overload]


# -- in the background -------------------------------------------------------------------------------------------------


def test_a_response_in_the_background_is_made_without_its_client(steady_server: ServerProcess) -> None:
    client = openai_client(steady_server)
    response = client.responses.create(model=MODEL_NAME, input=say("x" * 300), background=True)
    assert (response.status, response.output, response.background) == ("queued", [], True)
    wait_until(lambda: client.responses.retrieve(response.id).status == "in_progress")
    assert httpx.get(f"{steady_server.url}/load").json()["server_load"] >= 1
    with pytest.raises(openai.BadRequestError, match="still being made"):
        client.responses.create(model=MODEL_NAME, input="x", previous_response_id=response.id)
    wait_until(lambda: client.responses.retrieve(response.id).status == "completed")
    done = client.responses.retrieve(response.id)
    validated(done.model_dump())
    assert done.output_text == "x" * 300
    with pytest.raises(openai.BadRequestError, match="has ended already"):
        client.responses.cancel(response.id)
    assert (
        client.responses.create(model=MODEL_NAME, input=say("y"), previous_response_id=response.id).output_text == "y"
    )


def test_a_response_in_the_background_can_be_cancelled_and_deleted(steady_server: ServerProcess) -> None:
    client = openai_client(steady_server)
    one, two = (client.responses.create(model=MODEL_NAME, input=say("x" * 900), background=True) for _ in range(2))
    wait_until(lambda: client.responses.retrieve(one.id).status == "in_progress")
    cancelled = client.responses.cancel(one.id)
    validated(cancelled.model_dump())
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(one.id) == client.responses.retrieve(one.id) == cancelled
    with pytest.raises(openai.BadRequestError, match="has cancelled"):
        client.responses.create(model=MODEL_NAME, input="x", previous_response_id=one.id)
    client.responses.delete(two.id)
    wait_until(lambda: metric(steady_server, "num_requests_running") == 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(two.id)


def test_a_stream_from_the_background_can_be_left_and_taken_up_again(steady_server: ServerProcess) -> None:
    body = {"input": say("y" * 60), "background": True, "stream": True}
    response_id = ""
    for event in frames(steady_server, "POST", "/v1/responses", body):
        if event.type == "response.created":
            assert event.response.status == "queued"
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            break
    path = f"/v1/responses/{response_id}?stream=true"
    late = list(frames(steady_server, "GET", f"{path}&starting_after=5", first=6))
    early = list(frames(steady_server, "GET", path))
    assert early[6:] == late
    assert [e.type for e in early[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert early[-1].type == "response.completed"
    assert early[-1].response.output_text == "y" * 60
    client = openai_client(steady_server)
    with client.responses.stream(response_id=response_id, starting_after=5) as stream:
        assert next(iter(stream)).sequence_number == 6
        assert stream.get_final_response().output_text == "y" * 60


def test_events_after_the_last_are_none(quick_server: ServerProcess) -> None:
    events = streamed(quick_server, input="abc", max_output_tokens=3, background=True)
    path = f"/v1/responses/{events[0].response.id}?stream=true&starting_after="
    number = events[-1].sequence_number
    assert [e.type for e in frames(quick_server, "GET", f"{path}{number - 1}", first=number)] == [events[-1].type]
    assert not list(frames(quick_server, "GET", f"{path}{number + 9}"))


def test_a_response_whose_events_fill_the_store_fails_and_says_so() -> None:
    for server in fake_server(flags=["--responses-store-bytes", "65536"]):
        events = streamed(server, input="abc", max_output_tokens=900, background=True)
        assert events[-1].type == "response.failed"
        assert len(events) < 800
        response = openai_client(server).responses.retrieve(events[0].response.id)
        assert response.status == "failed"
        assert response.error is not None
        assert "--responses-store-bytes" in response.error.message
        assert whole(server, input="abc", max_output_tokens=5).status == "incomplete"


def test_only_so_many_responses_wait_in_the_background() -> None:
    for process in fake_server(0.005, flags=["--responses-store-size", "2"]):
        client = openai_client(process)
        running = [client.responses.create(model=MODEL_NAME, input=say("x" * 900), background=True) for _ in range(2)]
        with pytest.raises(openai.InternalServerError, match="2 responses are being made") as refusal:
            client.responses.create(model=MODEL_NAME, input="x", background=True)
        assert refusal.value.status_code == 503
        assert client.responses.create(model=MODEL_NAME, input=say("Hi.")).output_text == "Hi."
        assert client.responses.cancel(running[0].id).status == "cancelled"
        assert client.responses.create(model=MODEL_NAME, input=say("y"), background=True).status == "queued"
        assert process.end(signal.SIGTERM) == 0


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_response(steady_server: ServerProcess) -> None:
    asked = {"input": say("x" * 900)}
    events = frames(steady_server, "POST", "/v1/responses", {**asked, "stream": True})
    next(events)
    assert metric(steady_server, "num_requests_running") == 1
    events.close()
    wait_until(lambda: metric(steady_server, "num_requests_running") == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{steady_server.url}/v1/responses", json=asked, timeout=0.2)
    wait_until(lambda: metric(steady_server, "num_requests_running") == 0)
    assert metric(steady_server, "kv_cache_usage_perc") == 0


def test_an_engine_that_dies_is_told_to_whoever_waits(own_server: ServerProcess) -> None:
    client = openai_client(own_server)
    background = client.responses.create(model=MODEL_NAME, input=say("x" * 450), background=True)
    events = frames(own_server, "POST", "/v1/responses", {"input": say("x" * 450), "stream": True})
    for event in events:
        if event.type == "response.output_text.delta":
            os.kill(own_server.engine_pid(), signal.SIGKILL)
            break
    rest = list(events)
    assert [e.type for e in rest[-2:]] == ["response.output_item.done", "response.failed"]
    failed = rest[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "engine" in failed.error.message
    assert failed.output[0].status == "incomplete"
    wait_until(lambda: client.responses.retrieve(background.id).status == "failed")
    assert "Traceback" not in own_server.log


def test_an_error_before_the_first_event_is_a_plain_http_error(hermes_server: ServerProcess) -> None:
    for stream in (True, False):
        reply = httpx.post(f"{hermes_server.url}/v1/responses", json={"input": "!refuse", "stream": stream})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "refused")


def test_a_failure_after_the_first_event_is_an_event(quick_server: ServerProcess) -> None:
    events = streamed(quick_server, input="!fail")
    assert events[-1].type == "response.failed"
    assert "on purpose" in events[-1].response.error.message
    assert httpx.post(f"{quick_server.url}/v1/responses", json={"input": "!fail"}).status_code == 500


def test_the_page_about_the_api_shows_routes_and_fields(quick_server: ServerProcess) -> None:
    page = httpx.get(f"{quick_server.url}/docs").text
    for text in ("/v1/responses/{response_id}/cancel", "<td>previous_response_id</td>", "ReasoningOptions"):
        assert text in page
    unknown = httpx.get(f"{quick_server.url}/v1/nothing").json()["error"]["message"]
    assert "/v1/responses/{response_id}/input_items" in unknown
    wrong = httpx.put(f"{quick_server.url}/v1/responses/x")
    assert (wrong.status_code, "GET" in wrong.json()["error"]["message"]) == (405, True)


def test_after_all_this_nothing_runs_and_nothing_went_wrong(
    hermes_server: ServerProcess, steady_server: ServerProcess, quick_server: ServerProcess
) -> None:
    for process in (hermes_server, steady_server, quick_server):
        assert metric(process, "num_requests_running") == 0
        assert metric(process, "kv_cache_usage_perc") == 0
        assert json.loads(httpx.get(f"{process.url}/load").text) == {"server_load": 0}
        assert "Traceback" not in process.log
