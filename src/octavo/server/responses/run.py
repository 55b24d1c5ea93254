"""One response being made: the engine's outputs become events and, in the end, the response that is stored.

Knows no HTTP: whether somebody listens to the events, and how, is the routes' business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from octavo.core.records import FinishReason, RequestOutput
from octavo.engine.frontend import Frontend
from octavo.server.answer import Answer
from octavo.server.errors import ApiError
from octavo.server.generation import Generation
from octavo.server.logprobs import TokenNames, chat_logprobs
from octavo.server.replies import ChatTokenLogprob
from octavo.server.responses import replies
from octavo.server.responses.replies import ResponseReply, StreamEvent, event_frame
from octavo.server.responses.writer import ResponseWriter
from octavo.server.text_parser import Content

logger = logging.getLogger(__name__)

INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens"}
# OpenAI has no event of its own for a response that was cancelled.
ENDS = {
    "completed": replies.Completed,
    "incomplete": replies.Incomplete,
    "cancelled": replies.Failed,
    "failed": replies.Failed,
}


class Run:
    """`at_end` is called once the reply says how it ended, and before any event does."""

    def __init__(
        self,
        frontend: Frontend,
        answer: Answer,
        generation: Generation,
        reply: ResponseReply,
        at_end: Callable[[], None],
        *,
        seals_reasoning: bool = False,
    ) -> None:
        self.reply = reply
        self.generation = generation
        self._frontend = frontend
        self._answer = answer
        self._at_end = at_end
        self._names = TokenNames(frontend.token_bytes, as_ids=False)
        self._writer = ResponseWriter(reply, answer.call_id, seals_reasoning=seals_reasoning)
        self._cancelled = False
        self._why_failed = "the server is stopping: ask again when it is back"

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Raises what the engine raises: before the first event, unless the response is made in the background."""
        tell = self._writer.tell
        begun, reason = False, None
        if self.reply.background:
            yield tell(replies.Created)
            yield tell(replies.Queued)
        async for text, output in self.generation.pieces():
            if not begun:
                begun = True
                self.reply.status = "in_progress"
                if not self.reply.background:
                    yield tell(replies.Created)
                yield tell(replies.InProgress)
            for event in self._read(text, output):
                yield event
            reason = output.finish_reason
        assert reason is not None
        for event in self._finish(reason):
            yield event

    async def frames(self) -> AsyncIterator[bytes]:
        """The events as the wire has them; an error after the first one is an event too."""
        begun = False
        try:
            async for event in self.events():
                begun = True
                yield event_frame(event)
        except Exception as error:
            if not begun:
                raise
            for event in self._fail(error):
                yield event_frame(event)

    def cancel(self) -> None:
        self._cancelled = True
        self.generation.abort()

    def give_up(self, why: str) -> None:
        """It fails, soon."""
        self._why_failed = why
        self.generation.abort()

    def _read(self, text: str, output: RequestOutput) -> list[StreamEvent]:
        answer, num_before = self._answer, self._answer.num_reasoning_tokens
        is_last = output.finish_reason is not None
        events = answer.events(text, is_last=is_last, num_tokens=len(output.token_ids))
        if answer.num_reasoning_tokens > num_before:
            self._writer.drop_logprobs()
            return self._writer.write(events)
        return self._writer.write(events, self._logprobs(output))

    def _logprobs(self, output: RequestOutput) -> list[ChatTokenLogprob]:
        if output.logprobs is None:
            return []
        entries = chat_logprobs(output.token_ids, output.logprobs, self._names).content
        shown = [bool(self._frontend.visible_bytes(t, skip_special_tokens=True)) for t in output.token_ids]
        return [entry for entry, is_shown in zip(entries, shown, strict=True) if is_shown]

    def _finish(self, reason: FinishReason) -> list[StreamEvent]:
        reply, writer = self.reply, self._writer
        stopped, aborted = reason is FinishReason.STOP, reason is FinishReason.ABORT
        events: list[StreamEvent] = []
        if writer.is_empty and not aborted:
            events += writer.write([Content("")])  # so that a conversation goes on in turns
        events += writer.finish(is_whole=stopped and (self._answer.last_call_is_whole or not writer.is_in_call))
        if aborted and self._cancelled:
            reply.status = "cancelled"
        elif aborted:
            reply.status = "failed"
            reply.error = replies.ResponseError("server_error", self._why_failed)
        elif stopped:
            reply.status = "completed"
            reply.completed_at = int(time.time())
        else:
            reply.status = "incomplete"
            reply.incomplete_details = replies.IncompleteDetails(INCOMPLETE.get(reason, str(reason)))
        self._end()
        return [*events, writer.tell(ENDS[reply.status])]

    def _fail(self, error: Exception) -> list[StreamEvent]:
        shown = ApiError.of(error)
        if shown.code == "internal_error":
            logger.error("response %s failed", self.reply.id, exc_info=error)
        events = self._writer.finish(is_whole=False)
        self.reply.status = "failed"
        code = "server_error" if shown.status >= 500 else "invalid_prompt"
        self.reply.error = replies.ResponseError(code, str(shown))
        self._end()
        return [*events, self._writer.tell(replies.Failed)]

    def _end(self) -> None:
        prompt, said = len(self.generation.request.prompt_token_ids), self.generation.num_output_tokens
        self.reply.usage = replies.ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=replies.InputTokensDetails(self.generation.num_cached_tokens),
            output_tokens=said,
            output_tokens_details=replies.OutputTokensDetails(self._answer.num_reasoning_tokens),
            total_tokens=prompt + said,
        )
        self._at_end()

    def encoded(self) -> bytes:
        """The response as it stands."""
        return msgspec.json.encode(self.reply)
