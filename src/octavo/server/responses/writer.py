"""What a model says becomes output items of a response, and the events that tell of them as they grow.

Pure: given the events of an answer's text in order, it knows neither engine nor stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from octavo.server.replies import ChatTokenLogprob
from octavo.server.responses import replies
from octavo.server.responses.items import (
    CallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    new_item_id,
    sealed,
)
from octavo.server.responses.replies import OutputItem, ResponseEvent, ResponseReply, StreamEvent
from octavo.server.text_parser import CallArguments, CallStart, Content, Event, Reasoning

E_ = TypeVar("E_", bound=StreamEvent)


class ResponseWriter:
    """Appends to `reply.output` what is finished. `call_id`: the id of the call of an index.

    Each kind of text is an item of its own, in the order of the text: reasoning, a message, a call, a message again.
    """

    def __init__(self, reply: ResponseReply, call_id: Callable[[int], str], *, seals_reasoning: bool = False) -> None:
        self._reply = reply
        self._call_id = call_id
        self._seals_reasoning = seals_reasoning
        self._num_events = 0
        self._events: list[StreamEvent] = []  # of the call that runs
        self._open: OutputItem | None = None  # as it began
        self._pieces: list[str] = []  # of the open item's text
        self._logprobs: list[ChatTokenLogprob] = []  # of the open message
        self._untold: list[ChatTokenLogprob] = []  # of tokens whose text is held back

    @property
    def is_empty(self) -> bool:
        return self._open is None and not self._reply.output

    @property
    def is_in_call(self) -> bool:
        return isinstance(self._open, CallItem)

    def drop_logprobs(self) -> None:
        """The tokens that brought no text yet are not of a message."""
        self._untold = []

    def tell(self, kind: type[ResponseEvent]) -> StreamEvent:
        """The next event about the response as a whole."""
        event = kind(sequence_number=self._num_events, response=self._reply)
        self._num_events += 1
        return event

    def write(self, events: Sequence[Event], logprobs: Sequence[ChatTokenLogprob] = ()) -> list[StreamEvent]:
        """What `events` add. `logprobs` are of the tokens that brought them."""
        self._events = []
        self._untold += logprobs
        for event in events:
            match event:
                case Content():
                    self._say(event.text)
                case Reasoning():
                    self._reason(event.text)
                case CallStart():
                    item = CallItem(
                        id=new_item_id("function_call"),
                        status="in_progress",
                        call_id=self._call_id(event.index),
                        name=event.name,
                        arguments="",
                    )
                    self._begin(item)
                case CallArguments():
                    self.drop_logprobs()
                    self._pieces.append(event.text)
                    self._put(replies.ArgumentsDelta, delta=event.text)
        return self._events

    def finish(self, *, is_whole: bool) -> list[StreamEvent]:
        """The end of the text. is_whole: the item that is open has come to its end, rather than been cut."""
        self._events = []
        if isinstance(self._open, MessageItem) and self._untold:
            self._tell_text("")
        self._close(is_whole=is_whole)
        return self._events

    def _say(self, text: str) -> None:
        if not isinstance(self._open, MessageItem):
            item = MessageItem(id=new_item_id("message"), status="in_progress", role="assistant", content=[])
            self._begin(item, OutputText(""))
        if text:
            self._tell_text(text)

    def _tell_text(self, text: str) -> None:
        self._pieces.append(text)
        self._logprobs += self._untold
        self._put(replies.TextDelta, delta=text, logprobs=self._untold)
        self._untold = []

    def _reason(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            self._begin(ReasoningItem(id=new_item_id("reasoning"), status="in_progress"), ReasoningText(""))
        self._pieces.append(text)
        self._put(replies.ReasoningDelta, delta=text)

    def _begin(self, item: OutputItem, part: OutputText | ReasoningText | None = None) -> None:
        self._close(is_whole=True)
        self._open = item
        self._put_item(replies.ItemAdded, item)
        if part is not None:
            self._put(replies.PartAdded, part=part)

    def _close(self, *, is_whole: bool) -> None:
        text = "".join(self._pieces)
        done: OutputItem
        status = "completed" if is_whole else "incomplete"
        match self._open:
            case None:
                return
            case MessageItem():
                said = OutputText(text, [], self._logprobs)
                self._put(replies.TextDone, text=text, logprobs=self._logprobs)
                self._put(replies.PartDone, part=said)
                done = replace(self._open, content=[said], status=status)
            case ReasoningItem():
                thought = ReasoningText(text)
                self._put(replies.ReasoningDone, text=text)
                self._put(replies.PartDone, part=thought)
                seal = sealed(text) if self._seals_reasoning else None
                done = replace(self._open, content=[thought], encrypted_content=seal, status=status)
            case CallItem():
                self._put(replies.ArgumentsDone, arguments=text)
                done = replace(self._open, arguments=text, status=status)
        self._put_item(replies.ItemDone, done)
        self._reply.output.append(done)
        self._open = None
        self._pieces, self._logprobs = [], []

    def _put(self, kind: type[E_], **fields: Any) -> None:
        """An event in the open item."""
        assert self._open is not None
        self._add(kind, output_index=len(self._reply.output), item_id=self._open.id, **fields)

    def _put_item(self, kind: type[E_], item: OutputItem) -> None:
        self._add(kind, output_index=len(self._reply.output), item=item)

    def _add(self, kind: type[E_], **fields: Any) -> None:
        self._events.append(kind(sequence_number=self._num_events, **fields))
        self._num_events += 1
