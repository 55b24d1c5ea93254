"""Messages and tools of a chat request, checked and brought into the shape that chat templates read.

Templates are transformers' convention: a content is text or a list of text parts, "developer" is "system", a field
that says nothing is left out. Arguments of a call that are no JSON, as a model may have written them, are passed on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.core.errors import InvalidRequestError, short_repr, shorten

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("role", "content", "name")
_FIELDS_OF_ROLE = {
    "assistant": (*_FIELDS, "tool_calls", "reasoning", "reasoning_content"),
    "tool": (*_FIELDS, "tool_call_id"),
}
_CALL_FIELDS = ("id", "type", "function", "index")  # an index is left over from a stream
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # types of parts -> the field with their text
_SENSES = ("image_url", "input_audio", "audio_url", "video_url", "image", "audio", "video", "file")
_NOTHING: tuple[Any, ...] = (None, [], {}, "")


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation. Raises InvalidRequestError naming the offending part."""
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools. Raises InvalidRequestError naming the offending part."""
    return [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def read_text(message: dict[str, Any]) -> str:
    """The text of a message that `read_messages` has found good."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part[_TEXT_PARTS[part["type"]]] for part in content)


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in CHAT_ROLES:
        raise InvalidRequestError(
            f"{where}.role is {short_repr(role)}; it must be one of {', '.join(CHAT_ROLES)}", f"{where}.role"
        )
    _refuse_others(message, _FIELDS_OF_ROLE.get(role, _FIELDS), where)
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""  # beside calls or reasoning; templates add it to a text
    # Templates know "system" only; OpenAI renamed it for newer models and treats the two alike.
    plain = {"role": "system" if role == "developer" else role, "content": _read_content(content, f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = _text(message, name, where)
    thoughts = next((n for n in ("reasoning_content", "reasoning") if message.get(n) is not None), None)
    if thoughts is not None:
        # Templates know it by either name.
        plain["reasoning_content"] = plain["reasoning"] = _text(message, thoughts, where)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRequestError(f"{where}.tool_calls must be a list of calls", f"{where}.tool_calls")
        plain["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _read_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, list):
        return [{"type": "text", "text": _read_part(part, f"{where}[{i}]")} for i, part in enumerate(content)]
    if not isinstance(content, str):
        raise InvalidRequestError(f"{where} must be text or a list of text parts", where)
    return content


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or "type" not in part:
        raise InvalidRequestError(f"{where} must be an object with a type", where)
    kind = part["type"]
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        why = ": this model has no vision or hearing, and reads no files" if kind in _SENSES else ""
        raise InvalidRequestError(f"{where}.type is {short_repr(kind)}; only 'text' is supported{why}", f"{where}.type")
    _refuse_others(part, ("type", name), where)
    text = part.get(name)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{name} must be text", f"{where}.{name}")
    return text


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = _function_of(call, where)
    _refuse_others(call, _CALL_FIELDS, where)
    _refuse_others(function, ("name", "arguments"), f"{where}.function")
    arguments = function.get("arguments")
    if arguments in _NOTHING:
        arguments = "{}"
    elif not isinstance(arguments, str | dict):
        raise InvalidRequestError(
            f"{where}.function.arguments must be an object, or the JSON text of one", f"{where}.function.arguments"
        )
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        plain["id"] = _text(call, "id", where)
    return plain


def _read_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = _function_of(tool, where)
    _refuse_others(tool, ("type", "function"), where)
    for name, kind, called in (
        ("description", str, "text"),
        ("parameters", dict, "an object, a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(name), kind | None):
            raise InvalidRequestError(f"{where}.function.{name} must be {called}", f"{where}.function.{name}")
    shown = {name: value for name, value in function.items() if name != "strict" and value is not None}
    return {"type": "function", "function": shown}


def _function_of(holder: Any, where: str) -> dict[str, Any]:
    """The `function` of a tool or a call, which has a name."""
    if not isinstance(holder, dict):
        raise InvalidRequestError(f"{where} must be an object with a function", where)
    kind = holder.get("type")
    if kind not in (None, "function"):
        raise InvalidRequestError(f"{where}.type is {short_repr(kind)}; only 'function' is supported", f"{where}.type")
    function = holder.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where}.function must be an object with a name", f"{where}.function")
    if not function.get("name") or not isinstance(function["name"], str):
        raise InvalidRequestError(f"{where}.function.name must be text, and not empty", f"{where}.function.name")
    return function


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    text = fields[name]
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{name} must be text", f"{where}.{name}")
    return text


def _refuse_others(fields: dict[str, Any], known: Iterable[str], where: str) -> None:
    for name, value in fields.items():
        if name not in known and value not in _NOTHING:
            field = f"{where}.{shorten(name)}"
            raise InvalidRequestError(f"{field} is not supported: remove it", field)
