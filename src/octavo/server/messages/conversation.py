"""A Messages request as a ChatBody: turns of blocks become chat messages, and Anthropic's settings ours.

Knows Anthropic's blocks and the chat route's fields; chat templates and limits are behind that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from octavo.core.errors import InvalidRequestError, short_repr
from octavo.server.messages.bodies import (
    InputMessage,
    MessagesBody,
    OutputFormat,
    PromptBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    check_one_of,
)
from octavo.server.protocol import ChatBody

MAX_PARTS = 50_000
ROLES = ("user", "assistant", "system")
ERROR_MARK = "Error: "  # before a tool's result with is_error: chat templates have no word for it

Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
T = TypeVar("T")

_BLOCKS: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
_BLOCKS_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# Fields of ChatBody and SamplingParams -> where they come from in a Messages request.
_OWN_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
}


def chat_body(body: PromptBody, defaults: Mapping[str, Any]) -> ChatBody:
    """The same request to the chat route; `defaults` are of fields that it leaves out. Raises InvalidRequestError.

    Takes some microseconds for each part.
    """
    if (size := num_parts(body)) > MAX_PARTS:
        raise InvalidRequestError(
            f"messages, system and tools have {size:,} parts, the limit is {MAX_PARTS:,}: join or leave out some",
            "messages",
        )
    turns = _turns(body.messages)
    fields: dict[str, Any] = {**defaults, "model": body.model, "messages": _chat_messages(_system(body.system), turns)}
    role, blocks = turns[-1]
    if role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in blocks):
        fields["continue_final_message"] = True
    fields |= _tool_fields(body) | _thinking_fields(body)
    if (schema := _output_schema(body)) is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema, "strict": True},
        }
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "user": body.metadata.user_id}
        chosen = {name: getattr(body, name) for name in ("temperature", "top_k", "top_p")}
        fields |= {name: value for name, value in chosen.items() if value is not None}
    chat = msgspec.convert(fields, ChatBody)
    chat.check()
    return chat


def num_parts(body: PromptBody) -> int:
    """Messages, blocks and tools, and what blocks hold."""
    contents: list[Any] = [body.system, *(message.content for message in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    held = [block["content"] for block in blocks if isinstance(block.get("content"), list)]
    return len(body.tools) + len(contents) + len(blocks) + sum(map(len, held))


def in_own_words(error: InvalidRequestError) -> InvalidRequestError:
    """A refusal of the chat route with the names of a Messages request."""
    if error.param == "tool_choice":
        return InvalidRequestError(str(error).replace("'required'", "'any'"), error.param, error.code)
    own_name = _OWN_NAMES.get(error.param or "")
    if own_name is None:
        return error
    return InvalidRequestError(str(error).replace(str(error.param), own_name, 1), own_name, error.code)


def _turns(messages: list[InputMessage]) -> list[tuple[str, list[Block]]]:
    """The blocks of each turn. Messages of one role in a row are one turn, as Anthropic has it; some templates too."""
    turns: list[tuple[str, list[Block]]] = []
    for i, message in enumerate(messages):
        check_one_of(message.role, ROLES, f"messages[{i}].role")
        blocks = _blocks(message.content, f"messages[{i}].content", message.role)
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns


def _blocks(content: str | list[dict[str, Any]], where: str, role: str) -> list[Block]:
    if isinstance(content, str):
        return [TextBlock(content)]
    return [_block(block, f"{where}[{i}]", _BLOCKS_OF_ROLE[role]) for i, block in enumerate(content)]


def _block(block: dict[str, Any], where: str, allowed: tuple[str, ...]) -> Block:
    kind = block.get("type")
    if kind not in allowed:
        raise InvalidRequestError(
            f"{where}.type is {short_repr(kind)}; only {', '.join(allowed)} can be read here: leave the block out",
            f"{where}.type",
        )
    read = _converted({name: value for name, value in block.items() if value is not None}, _BLOCKS[kind], where)
    if isinstance(read, TextBlock) and read.citations:
        raise InvalidRequestError(f"{where}.citations is not supported: leave it out", f"{where}.citations")
    if isinstance(read, ToolUseBlock):
        _check_name(read.name, f"{where}.name")
    if isinstance(read, ToolResultBlock) and not isinstance(read.content, str):
        parts = [_block(part, f"{where}.content[{i}]", ("text",)) for i, part in enumerate(read.content)]
        return msgspec.structs.replace(read, content=_text(parts))
    return read


def _chat_messages(system: str, turns: list[tuple[str, list[Block]]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for role, blocks in turns:
        if role == "assistant":
            messages.append(_assistant_message(blocks))
        else:
            messages += _other_messages(role, blocks)
    return messages


def _assistant_message(blocks: list[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _other_messages(role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    """A turn's texts, as a message of `role`, and its results, each as one of the role tool, in their order."""
    messages: list[dict[str, Any]] = []
    texts: list[Block] = []

    def say_texts() -> None:
        if texts:
            messages.append({"role": role, "content": _text(texts)})
            texts.clear()

    for block in blocks:
        if isinstance(block, ToolResultBlock):
            say_texts()
            content = f"{ERROR_MARK}{block.content}" if block.is_error else block.content
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            texts.append(block)
    if not messages and not texts:
        texts.append(TextBlock(""))
    say_texts()
    return messages


def _text(blocks: list[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _system(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    return _text([_block(block, f"system[{i}]", ("text",)) for i, block in enumerate(system)])


def _tool_fields(body: PromptBody) -> dict[str, Any]:
    fields: dict[str, Any] = {"tools": [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]}
    choice = body.tool_choice
    if choice is not None:
        check_one_of(choice.type, ("auto", "any", "tool", "none"), "tool_choice.type")
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequestError(
                "tool_choice.name goes with tool_choice.type 'tool', and only with it: send both or none",
                "tool_choice.name",
            )
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequestError(
            f"{where}.type is {short_repr(kind)}; only tools of the client's own are supported: describe it as a "
            "custom tool with an input_schema, or leave it out",
            f"{where}.type",
        )
    read = _converted({name: value for name, value in tool.items() if value is not None}, Tool, where)
    _check_name(read.name, f"{where}.name")
    unsupported = {
        "input_examples": bool(read.input_examples),
        "defer_loading": read.defer_loading,
        "allowed_callers": read.allowed_callers not in (None, ["direct"]),
    }
    for name in (name for name, is_asked in unsupported.items() if is_asked):
        raise InvalidRequestError(f"{where}.{name} is not supported: leave it out", f"{where}.{name}")
    function: dict[str, Any] = {"name": read.name, "parameters": read.input_schema}
    if read.description is not None:
        function["description"] = read.description
    if read.strict is not None:
        function["strict"] = read.strict
    return {"type": "function", "function": function}


def _thinking_fields(body: PromptBody) -> dict[str, Any]:
    """Models think, and what they thought is told, only if the request asks for it: Anthropic's clients expect that."""
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    fields: dict[str, Any] = {"enable_thinking": thinks, "include_reasoning": thinks}
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    return fields


def _output_schema(body: PromptBody) -> dict[str, Any] | None:
    formats: list[OutputFormat] = [f for f in (body.output_config.format, body.output_format) if f is not None]
    if len(formats) == 2:
        raise InvalidRequestError("output_format is the older name of output_config.format: send one", "output_format")
    return formats[0].schema if formats else None


def _check_name(name: str, where: str) -> None:
    if not name:
        raise InvalidRequestError(f"{where} is empty: give the tool's name", where)


def _converted(value: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        complaint, _, path = str(error).partition(" - at `$")
        place = where + path.rstrip("`")
        raise InvalidRequestError(f"{place}: {complaint[:1].lower()}{complaint[1:]}", place, "invalid_type") from None
