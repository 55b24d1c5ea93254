"""One prompt being answered: its outputs as pieces of text, counted for `usage`.

Shared by every route that generates; knows nothing of reply shapes or HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import msgspec

from octavo.core.errors import EngineDeadError, RequestFailedError
from octavo.core.records import FinishReason, Request, RequestOutput, TokenLogprobs
from octavo.engine.frontend import Detokenizer
from octavo.engine.supervisor import EngineSupervisor
from octavo.server.metrics import Metrics
from octavo.server.replies import PromptTokensDetails, Usage


class Generation:
    """A submitted request. Iterate `pieces` once; `usage` and the counts grow as it goes.

    interval: tokens that a piece waits for, unless it is the first or the last. on_end: called by `abort`, with which
    the life of each ends.
    """

    def __init__(
        self,
        client: EngineSupervisor,
        metrics: Metrics,
        request: Request,
        interval: int = 1,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self._on_end = on_end
        self._interval = interval
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []  # if asked for, whole before the first piece
        self._stream = client.generate(request, metrics.observer(request))

    async def pieces(self) -> AsyncIterator[tuple[str, RequestOutput]]:
        """Each output with the text it adds, the last one with a finish reason that is not ERROR.

        Raises EngineDeadError if the engine fails, RequestFailedError if this request does. Closing it early aborts the
        request.
        """
        detokenizer = Detokenizer()
        held: RequestOutput | None = None
        wanted = 1
        async with aclosing(self._stream):
            async for output in self._stream:
                self.num_output_tokens += len(output.token_ids)
                if output.num_cached_tokens is not None:
                    self.num_cached_tokens = output.num_cached_tokens
                if output.finish_reason is FinishReason.ERROR:
                    kind = RequestFailedError if output.is_alone else EngineDeadError
                    raise kind(output.error or "the engine failed on this request; its log says why")
                self.prompt_logprobs += output.prompt_logprobs or []
                if not output.token_ids and output.finish_reason is None:
                    continue
                held = output if held is None else _joined(held, output)
                if len(held.token_ids) >= wanted or held.finish_reason is not None:
                    whole, held, wanted = held, None, self._interval
                    yield detokenizer.feed(whole), whole

    @property
    def seed(self) -> int:
        """The request's own, or the one that the door drew."""
        assert self.request.params.seed is not None
        return self.request.params.seed

    def abort(self) -> None:
        self._stream.abort()
        self._on_end()


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Both as one. Prompt's news is not in it, for that has been taken."""
    logprobs = None if first.logprobs is None else [*first.logprobs, *(second.logprobs or [])]
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        text=first.text + second.text,
        num_cached_tokens=first.num_cached_tokens,
    )


def usage_of(generations: list[Generation]) -> Usage:
    prompt = sum(len(g.request.prompt_token_ids) for g in generations)
    completion = sum(g.num_output_tokens for g in generations)
    cached = sum(g.num_cached_tokens for g in generations)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
