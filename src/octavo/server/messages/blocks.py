"""The events of an answer as content blocks, one after the other: as they come, or gathered.

Knows Anthropic's blocks; nothing of engines, parsers or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from octavo.server.messages.arguments import JsonArguments
from octavo.server.messages.bodies import (
    BlockDelta,
    BlockEvent,
    BlockOut,
    BlockPiece,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextDelta,
    TextOut,
    ThinkingDelta,
    ThinkingOut,
    ToolUseOut,
)
from octavo.server.text_parser import CallArguments, CallStart, Content, Event, Reasoning

SIGNATURE = "octavo"  # clients want one to send thinking back with; nothing here depends on it


class BlockWriter:
    """call_id: the id of the call with an index. shows_thinking: False leaves the text of thinking blocks out."""

    def __init__(self, call_id: Callable[[int], str], *, shows_thinking: bool) -> None:
        self._call_id = call_id
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: BlockOut | None = None
        self._arguments = JsonArguments()
        self._found: list[BlockEvent] = []

    def write(self, events: Iterable[Event]) -> list[BlockEvent]:
        """What `events` add."""
        for event in events:
            match event:
                case Content(text):
                    if not isinstance(self._open, TextOut):
                        if self._open is not None and not (text := text.lstrip()):
                            continue  # what parts a text from the block before it is not a part of either
                        self._start(TextOut())
                    self._add(TextDelta(text))
                case Reasoning(text):
                    if not isinstance(self._open, ThinkingOut):
                        self._start(ThinkingOut())
                    if self._shows_thinking:
                        self._add(ThinkingDelta(text))
                case CallStart(index, name):
                    self._start(ToolUseOut(self._call_id(index), name))
                    self._arguments = JsonArguments()
                case CallArguments(_, text):
                    self._argue(self._arguments.next(text))
        return self._release()

    def finish(self) -> list[BlockEvent]:
        """The end of the last block."""
        self._stop()
        return self._release()

    def _start(self, block: BlockOut) -> None:
        self._stop()
        self._index += 1
        self._open = block
        self._found.append(BlockStart(self._index, block))

    def _stop(self) -> None:
        match self._open:
            case None:
                return
            case ThinkingOut():
                self._add(SignatureDelta(SIGNATURE))
            case ToolUseOut():
                self._argue(self._arguments.end())
        self._found.append(BlockStop(self._index))
        self._open = None

    def _argue(self, text: str) -> None:
        if text:
            self._add(InputJsonDelta(text))

    def _add(self, delta: BlockDelta) -> None:
        self._found.append(BlockPiece(self._index, delta))

    def _release(self) -> list[BlockEvent]:
        found, self._found = self._found, []
        return found


def gathered(events: Iterable[BlockEvent]) -> list[BlockOut]:
    """The whole blocks that a stream of these events amounts to."""
    blocks: list[BlockOut] = []
    pieces: list[str] = []
    for event in events:
        match event:
            case BlockStart():
                blocks.append(event.content_block)
                pieces = []
            case BlockPiece(_, TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text)):
                pieces.append(text)
            case BlockStop():
                blocks[-1] = _whole(blocks[-1], "".join(pieces))
    return blocks


def _whole(block: BlockOut, text: str) -> BlockOut:
    match block:
        case TextOut():
            return TextOut(text)
        case ThinkingOut():
            return ThinkingOut(text, SIGNATURE)
        case ToolUseOut():
            return ToolUseOut(block.id, block.name, msgspec.Raw(text.encode()))
