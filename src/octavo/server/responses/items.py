"""The items that a conversation is made of in the Responses API: read strictly, stored, and turned into chat messages.

An item is a message, the reasoning before one, a call of a function, or a call's output. Knows no response and no
store; items that a request only refers to come from a function it is given.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from octavo.core.errors import InvalidRequestError, short_repr, shorten
from octavo.server.replies import ChatTokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]
Name = Annotated[str, Meta(min_length=1, max_length=256)]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_TEXT_PARTS = ("input_text", "output_text", "refusal")
_SEAL = "octavo1."
_RECORDS = ("annotations", "logprobs")  # of a part: what once was said about it, which asks for nothing


class _Part(Struct, tag_field="type", forbid_unknown_fields=True):
    pass


class InputText(_Part, tag="input_text"):
    text: str


class OutputText(_Part, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class Refusal(_Part, tag="refusal"):
    """What another server's model would not do; it is passed on as text."""

    refusal: str


class ReasoningText(_Part, tag="reasoning_text"):
    text: str


class SummaryText(_Part, tag="summary_text"):
    text: str


class _Item(Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    id: Name
    status: Status = "completed"


class MessageItem(_Item, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText | Refusal]


class ReasoningItem(_Item, tag="reasoning"):
    """encrypted_content: the reasoning as text that clients only keep and send back, if they asked for it."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class CallItem(_Item, tag="function_call"):
    call_id: Name
    name: Name
    arguments: str  # JSON, if the model wrote it well


class CallOutputItem(_Item, tag="function_call_output"):
    call_id: Name
    output: str | list[InputText]


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem
FindItem = Callable[[str], Item | None]

_decoder: msgspec.json.Decoder[Item] = msgspec.json.Decoder(Item)


def encode_items(items: Iterable[Item]) -> tuple[bytes, ...]:
    return tuple(map(msgspec.json.encode, items))


def decode_item(raw: bytes) -> Item:
    return _decoder.decode(raw)


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


# -- reading -----------------------------------------------------------------------------------------------------------


def read_input(value: str | list[Any], history: Sequence[Item], find: FindItem, max_items: int) -> list[Item]:
    """The items of a request's `input`, each with an id. Raises InvalidRequestError naming the offending part.

    find: the stored item of an id. max_items: of history and input together; more could never fit into a prompt.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if len(history) + len(value) > max_items:
        raise InvalidRequestError(
            f"input, with what it goes on from, has {len(history) + len(value):,} items, and a prompt of this model "
            f"{max_items:,} tokens at most: leave out old ones",
            "input",
            "context_length_exceeded",
        )
    calls = {item.call_id for item in history if isinstance(item, CallItem)}
    items: list[Item] = []
    for i, raw in enumerate(value):
        item = _read_item(raw, f"input[{i}]", find)
        if isinstance(item, CallItem):
            calls.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in calls:
            raise InvalidRequestError(
                f"input[{i}].call_id is {short_repr(item.call_id)}, and no function call before it has that id: "
                "send the call too, or the previous_response_id of the response that made it",
                f"input[{i}].call_id",
            )
        items.append(item)
    return items


def _read_item(raw: Any, where: str, find: FindItem) -> Item:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} must be an object with a type", where)
    fields = {name: value for name, value in raw.items() if value is not None}
    kind = fields.setdefault("type", "message" if "role" in fields else "item_reference")
    if kind == "item_reference":
        return _referred_item(fields, where, find)
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise InvalidRequestError(
            f"{where}.type is {short_repr(kind)}; it must be one of {', '.join(_PREFIXES)}, item_reference",
            f"{where}.type",
        )
    fields.setdefault("id", new_item_id(kind))
    match kind:
        case "message":
            fields["content"] = _read_content(fields.get("content"), f"{where}.content", fields.get("role"))
        case "function_call_output" if not isinstance(fields.get("output"), str):
            fields["output"] = _read_parts(fields.get("output"), f"{where}.output", ("input_text",))
        case "reasoning" if "encrypted_content" in fields:
            thoughts = _unsealed(fields.pop("encrypted_content"), f"{where}.encrypted_content")
            if not fields.get("content"):
                fields["content"] = [{"type": "reasoning_text", "text": thoughts}]
    try:
        item: Item = msgspec.convert(fields, Item)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), where) from None
    return item


def sealed(thoughts: str) -> str:
    """Reasoning as text that is opaque to clients. No secret: they have the reasoning itself too."""
    return _SEAL + base64.urlsafe_b64encode(thoughts.encode()).decode()


def _unsealed(text: Any, where: str) -> str:
    try:
        if not isinstance(text, str) or not text.startswith(_SEAL):
            raise ValueError
        return base64.b64decode(text.removeprefix(_SEAL), b"-_", validate=True).decode()
    except ValueError:
        raise InvalidRequestError(
            f"{where} was not made by octavo, or was changed since: send the reasoning as content, or leave the item "
            "out",
            where,
            "invalid_encrypted_content",
        ) from None


def _referred_item(fields: dict[str, Any], where: str, find: FindItem) -> Item:
    wanted = fields.get("id")
    if not isinstance(wanted, str):
        raise InvalidRequestError(f"{where} must have a type, or the id of a stored item", where)
    item = find(wanted)
    if item is None:
        raise InvalidRequestError(
            f"{where}.id is {short_repr(wanted)}, and no stored response has such an item: it never had, or was "
            "deleted or evicted since; send the item itself",
            f"{where}.id",
            "item_not_found",
        )
    return item


def _read_content(content: Any, where: str, role: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    return _read_parts(content, where, _TEXT_PARTS)


def _read_parts(parts: Any, where: str, kinds: tuple[str, ...]) -> list[Any]:
    if not isinstance(parts, list):
        raise InvalidRequestError(f"{where} must be text or a list of text parts", where)
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise InvalidRequestError(
                f"{where}[{i}].type is {short_repr(kind)}; this model reads text only: it must be one of "
                f"{', '.join(kinds)}",
                f"{where}[{i}].type",
            )
    return [{n: v for n, v in part.items() if v is not None and n not in _RECORDS} for part in parts]


def _wrong(text: str, where: str) -> InvalidRequestError:
    complaint, _, path = text.partition(" - at `$")
    field = where + path.rstrip("`")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", complaint):
        field = f"{field}.{missing[1]}"
        return InvalidRequestError(f"{field} is missing: it is required", field, "missing_required_parameter")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", complaint, re.DOTALL):
        field = f"{field}.{shorten(unknown[1])}"
        return InvalidRequestError(f"{field} is not supported: remove it", field, "unknown_parameter")
    return InvalidRequestError(f"{field}: {shorten(complaint[:1].lower() + complaint[1:], 120)}", field, "invalid_type")


# -- as chat messages --------------------------------------------------------------------------------------------------


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """The conversation as chat messages, the instructions first.

    Reasoning, text and calls of one turn are items of their own here and one message there. So they are put together
    again: a turn ends with anything that is not the assistant's, with new reasoning, or with a second text in a row.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if turn is None or (turn["content"] and "tool_calls" not in turn):
                    turn = _new_turn(messages)
                turn["content"] += "".join(map(_text, item.content))
            case MessageItem():
                turn = None
                messages.append({"role": item.role, "content": _chat_content(item.content)})
            case ReasoningItem():
                thoughts = "\n".join(part.text for part in item.content or item.summary)
                if turn is None or turn["content"] or "tool_calls" in turn:
                    turn = _new_turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
            case CallItem():
                turn = turn or _new_turn(messages)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                turn = None
                content = item.output if isinstance(item.output, str) else _chat_content(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return messages


def _new_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _chat_content(parts: Sequence[InputText | OutputText | Refusal]) -> str | list[dict[str, Any]]:
    texts = [_text(part) for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(part: InputText | OutputText | Refusal) -> str:
    return part.refusal if isinstance(part, Refusal) else part.text
