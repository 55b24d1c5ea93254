"""The parts of /v1/responses by themselves: items, the writer, the store, the log of events."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from octavo.server.protocol import ChatBody
from octavo.server.responses import replies
from octavo.server.responses.background import EventLog, Job
from octavo.server.responses.body import PASSED, UNSUPPORTED, ResponsesBody
from octavo.server.responses.items import (
    CallItem,
    CallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    chat_messages,
    decode_item,
    encode_items,
    read_input,
)
from octavo.server.responses.replies import ResponseReply
from octavo.server.responses.store import ResponseStore, StoredResponse
from octavo.server.responses.writer import ResponseWriter
from octavo.server.text_parser import CallArguments, CallStart, Content, Event, Reasoning
from tests.server.harness import ROOT

ids = (f"i{number}" for number in itertools.count())


def user(text: str) -> MessageItem:
    return MessageItem(id=next(ids), role="user", content=[InputText(text)])


def said(text: str) -> MessageItem:
    return MessageItem(id=next(ids), role="assistant", content=[OutputText(text)])


def thought(text: str) -> ReasoningItem:
    return ReasoningItem(id=next(ids), content=[ReasoningText(text)])


def call(call_id: str) -> CallItem:
    return CallItem(id=next(ids), call_id=call_id, name="f", arguments="{}")


def output(call_id: str) -> CallOutputItem:
    return CallOutputItem(id=next(ids), call_id=call_id, output="1")


def chat_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


# -- items -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([said("a"), said("b")], [{"content": "a"}, {"content": "b"}]),
        ([thought("t"), said("a")], [{"content": "a", "reasoning_content": "t"}]),
        ([said("a"), thought("t"), said("b")], [{"content": "a"}, {"content": "b", "reasoning_content": "t"}]),
        ([said("a"), call("1"), call("2")], [{"content": "a", "tool_calls": [chat_call("1"), chat_call("2")]}]),
        ([said("a"), call("1"), said("b")], [{"content": "ab", "tool_calls": [chat_call("1")]}]),
        (
            [thought("t"), call("1"), thought("u"), call("2")],
            [
                {"content": "", "reasoning_content": "t", "tool_calls": [chat_call("1")]},
                {"content": "", "reasoning_content": "u", "tool_calls": [chat_call("2")]},
            ],
        ),
        (
            [call("1"), output("1"), call("2"), output("2"), said("a")],
            [
                {"content": "", "tool_calls": [chat_call("1")]},
                {"role": "tool", "tool_call_id": "1", "content": "1"},
                {"content": "", "tool_calls": [chat_call("2")]},
                {"role": "tool", "tool_call_id": "2", "content": "1"},
                {"content": "a"},
            ],
        ),
        ([thought("t"), user("x")], [{"content": "", "reasoning_content": "t"}, {"role": "user", "content": "x"}]),
    ],
)
def test_items_of_one_turn_are_one_message(items: list[Item], messages: list[dict[str, Any]]) -> None:
    assert chat_messages(None, items) == [{"role": "assistant", **message} for message in messages]


def test_instructions_come_first() -> None:
    assert chat_messages("I", [user("x")])[0] == {"role": "system", "content": "I"}
    assert chat_messages("", [user("x")])[0]["role"] == "user"


def test_an_item_survives_the_store_byte_for_byte() -> None:
    for item in (user("ü"), said("a"), thought("t"), call("1"), output("1")):
        (raw,) = encode_items([item])
        assert decode_item(raw) == item
        assert read_input([msgspec.json.decode(raw)], [call("1")], lambda _: None, 9) == [item]


def test_an_output_may_answer_a_call_of_the_history() -> None:
    raw = {"type": "function_call_output", "call_id": "1", "output": "x"}
    assert len(read_input([raw], [call("1")], lambda _: None, 9)) == 1


# -- the writer --------------------------------------------------------------------------------------------------------


def new_reply() -> ResponseReply:
    nothing: dict[str, Any] = {
        field.name: None
        for field in msgspec.structs.fields(ResponseReply)
        if field.required and field.name not in ("id", "status")
    }
    return ResponseReply(id="r", status="in_progress", **nothing)


ANSWER: list[Event] = [
    Reasoning("Hm"),
    Reasoning("."),
    Content("I "),
    Content("look."),
    CallStart(0, "f"),
    CallArguments(0, "{"),
    CallArguments(0, "}"),
    CallStart(1, "g"),
    Content("Bye."),
]


def shape(reply: ResponseReply) -> list[Any]:
    plain: list[Any] = msgspec.to_builtins(reply.output)
    return [{name: value for name, value in item.items() if name != "id"} for item in plain]


def test_output_does_not_depend_on_how_the_events_came() -> None:
    shapes = []
    for size in (1, 2, 3, len(ANSWER)):
        reply = new_reply()
        writer = ResponseWriter(reply, lambda index: f"c{index}")
        events = [writer.tell(replies.Created)]
        for first in range(0, len(ANSWER), size):
            events += writer.write(ANSWER[first : first + size])
        events += writer.finish(is_whole=True)
        assert [e.sequence_number for e in events] == list(range(len(events)))
        shapes.append((shape(reply), [type(e) for e in events]))
    assert all(s == shapes[0] for s in shapes)
    assert [item["type"] for item in shapes[0][0]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert shapes[0][0][3] == {
        "type": "function_call",
        "status": "completed",
        "call_id": "c1",
        "name": "g",
        "arguments": "",
    }


# -- the store ---------------------------------------------------------------------------------------------------------


def stored(owner: bytes, *items: Item, before: tuple[bytes, ...] = (), size: int = 100) -> StoredResponse:
    ids = tuple(item.id for item in items)
    return StoredResponse(owner, before, encode_items(items), ids, "completed", reply=b"r" * size)


def test_the_store_keeps_to_its_number_and_drops_the_least_used() -> None:
    store = ResponseStore(2, 1 << 20)
    for name in ("a", "b"):
        assert store.put(name, stored(b"", user(name)))
    assert store.get("a", b"") is not None
    assert store.put("c", stored(b"", user("c")))
    assert store.get("b", b"") is None
    assert store.get("a", b"") is not None
    assert len(store) == 2


def test_the_store_keeps_to_its_bytes_whatever_comes_and_goes() -> None:
    store = ResponseStore(1000, 100_000)
    history: tuple[bytes, ...] = ()
    for i in range(300):
        entry = stored(b"", user("x" * (i * 37 % 500)), before=history, size=i * 53 % 3000)
        history = entry.conversation()[-40:]
        assert store.put(str(i % 90), entry)
        if i % 7 == 0:
            store.remove(str(i * 3 % 90))
        assert store.num_bytes <= 100_000
        assert store.num_bytes == sum(s.num_bytes for s in (store.get(k, b"") for k in map(str, range(90))) if s)
    assert not store.put("huge", stored(b"", user("x"), size=100_000))
    for i in range(90):
        store.remove(str(i))
    assert (len(store), store.num_bytes) == (0, 0)


def test_items_are_found_by_their_owner_until_the_last_response_with_them_goes() -> None:
    store = ResponseStore(10, 1 << 20)
    item = user("x")
    store.put("a", stored(b"mine", item))
    store.put("b", stored(b"mine", item))
    assert store.find_item(item.id, b"mine") == item
    assert store.find_item(item.id, b"yours") is None
    store.remove("a")
    assert store.find_item(item.id, b"mine") == item
    store.remove("b")
    assert store.find_item(item.id, b"mine") is None


def test_what_runs_is_never_evicted() -> None:
    async def never() -> Any:
        yield b""

    job = Job(never(), lambda: b"now", lambda: None, None)
    store = ResponseStore(2, 1 << 20)
    running = StoredResponse(b"", (), (), (), "queued", job=job)
    assert store.put("a", running)
    assert store.put("b", StoredResponse(b"", (), (), (), "queued", job=job))
    assert not store.put("c", stored(b""))
    assert running.encoded() == b"now"
    running.reply, running.job = b"done", None
    assert running.encoded() == b"done"
    assert store.put("c", stored(b""))
    assert store.get("a", b"") is None


# -- the log of events -------------------------------------------------------------------------------------------------


def test_what_grows_while_it_runs_is_counted_and_makes_room_or_has_none() -> None:
    async def frames() -> AsyncIterator[bytes]:
        yield b""

    store = ResponseStore(3, 100_000)
    done, running = stored(b"a", size=10_000), stored(b"a", size=10)
    running.job, running.log = Job(frames(), bytes, lambda: None, None), EventLog()
    assert store.put("done", done)
    assert store.put("running", running)
    before = store.num_bytes
    running.log.add(bytes(50_000))
    assert store.recount("running")
    assert store.num_bytes == before + 50_000
    running.log.add(bytes(45_000))
    assert store.recount("running")
    assert store.get("done", b"a") is None
    running.log.add(bytes(10_000))
    assert not store.recount("running")
    store.remove("running")
    assert store.num_bytes == 0


def test_a_job_tells_that_its_log_grows() -> None:
    async def frames() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield bytes(20_000)

    async def run() -> int:
        calls: list[int] = []
        job = Job(frames(), bytes, lambda: None, EventLog(), lambda: calls.append(1))
        job.start()
        await job.cancel()
        return len(calls)

    assert asyncio.run(run()) == 2


def test_every_reader_of_a_log_gets_all_of_it() -> None:
    async def run() -> list[list[bytes]]:
        log = EventLog()

        async def read(first: int) -> list[bytes]:
            return [frame async for frame in log.read(first)]

        log.add(b"0")
        readers = [asyncio.create_task(read(first)) for first in (0, 1, 9)]
        for frame in (b"1", b"2"):
            await asyncio.sleep(0)
            log.add(frame)
        log.add(b"3")
        log.end()
        late = await read(2)
        return [*await asyncio.gather(*readers), late]

    assert asyncio.run(run()) == [[b"0", b"1", b"2", b"3"], [b"1", b"2", b"3"], [], [b"2", b"3"]]


def test_a_job_ends_when_it_is_cancelled_and_its_log_with_it() -> None:
    async def run() -> list[bytes]:
        ended = asyncio.Event()

        async def frames() -> Any:
            yield b"first"
            await ended.wait()

        log = EventLog()
        job = Job(frames(), lambda: b"", ended.set, log)
        job.start()
        await asyncio.sleep(0)
        await asyncio.wait_for(job.cancel(), 5)
        return [frame async for frame in log.read()]

    assert asyncio.run(run()) == [b"first"]


# -- the document ------------------------------------------------------------------------------------------------------


def test_the_document_has_every_field_and_no_other() -> None:
    text = (ROOT / "docs" / "responses.md").read_text().split("## Fields")[1].split("## Items")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith(("| `", "| refused"))]
    works = [name for row in rows if "refused" not in row for name in re.findall(r"`(\w+)`", row)]
    refused = [name for row in rows if "refused" in row for name in re.findall(r"`(\w+)`", row)]
    assert sorted(works) == sorted(ResponsesBody.__struct_fields__)
    assert sorted(refused) == sorted(UNSUPPORTED)


def test_passed_fields_are_the_same_in_chat() -> None:
    ours, theirs = ({f.name: f for f in msgspec.structs.fields(body)} for body in (ResponsesBody, ChatBody))
    for name in PASSED:
        assert ours[name].type == theirs[name].type, name
        assert (ours[name].default, ours[name].default_factory) == (theirs[name].default, theirs[name].default_factory)
