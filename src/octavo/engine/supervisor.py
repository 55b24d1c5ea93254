"""Keeps an engine running: whoever holds the supervisor asks it as if there were one engine; when that dies, it starts
the next one, later and later if that does not help.

Knows nothing of HTTP, nor of how an engine is watched (`client`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from octavo.core.clock import Clock
from octavo.core.errors import EngineDeadError, EngineUnavailableError, OctavoError
from octavo.core.records import EngineStats, Request
from octavo.engine.client import Death, EngineClient, Observer, OutputStream
from octavo.engine.messages import EngineInfo
from octavo.engine.process import EngineProcess

logger = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds before a restart that follows on a failure; doubled each time
HEALTHY_SECONDS = 60.0  # an engine that lived so long starts the count of failures anew
FIXED = ("served_model_name", "max_model_len", "max_prompt_tokens", "vocab_size")  # of EngineInfo: what the door knows


class EngineSupervisor:
    """`info` is of the newest engine; what the door knows of it (FIXED) is the same for all.

    on_stats: called with each snapshot of an engine.
    launch: starts another engine process. engine_timeout: as EngineClient's.
    max_restarts: how many times in a row to try; None: always again. Then `gave_up` is set and `on_give_up` called.
    """

    def __init__(
        self,
        launch: Callable[[], EngineProcess],
        clock: Clock,
        *,
        engine_timeout: float = 0.0,
        max_restarts: int | None = None,
        on_give_up: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._launch = launch
        self._clock = clock
        self._engine_timeout = engine_timeout
        self._max_restarts = max_restarts
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self._on_give_up = on_give_up
        self._sleep = sleep
        self._client: EngineClient
        self._watching: asyncio.Task[None] | None = None
        self._past = EngineStats()  # totals of the engines that ended
        self._num_failures = 0  # in a row
        self._load_seconds = 0.0
        self._started_at = 0.0
        self._back_at = 0.0  # when, at a guess, the next engine is ready
        self._stopping = False
        self.num_restarts = 0
        self.gave_up = False

    async def start(self, process: EngineProcess) -> None:
        """Take the first engine. Raises as `EngineClient.connect`; from then on its end is our business."""
        self._client = await self._connect(process)
        self.info: EngineInfo = self._client.info
        self._watching = asyncio.create_task(self._supervise())

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    @property
    def pid(self) -> int:
        return self._client.pid

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return self._client.num_requests

    @property
    def totals(self) -> EngineStats:
        """The newest snapshot, with totals since the first engine started."""
        return self._client.stats.with_totals_of(self._past)

    def generate(self, request: Request, observer: Observer | None = None) -> OutputStream:
        """As `EngineClient.generate`. Raises EngineUnavailableError."""
        self._check_available()
        return self._client.generate(request, observer)

    async def check_health(self) -> None:
        """Ask the engine for a sign of life. Raises EngineUnavailableError if there is none, or if we are to end."""
        self._check_available()
        if not await self._client.is_responsive():
            self._check_available()
            raise EngineUnavailableError("the engine does not answer and gets nothing done; the log will say more", 1)

    def refuse_new(self) -> None:
        """From now on no request is taken and no engine started; what runs may end."""
        self._stopping = True
        if not self.is_alive and self._watching is not None:
            self._watching.cancel()

    def abort_all(self) -> None:
        """Abort every running request; each stream ends with FinishReason.ABORT."""
        self._client.abort_all()

    async def close(self) -> None:
        """Abort what runs and end the engine process, or the start of the next one."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            await self._client.close()

    def _check_available(self) -> None:
        if self._stopping:
            raise EngineUnavailableError("the server is stopping: ask again when it is back", None)
        if not self.is_alive:
            wait = max(1, math.ceil(self._back_at - self._clock.now()))
            raise EngineUnavailableError(f"the engine died and is being started again: ask again in {wait} s", wait)

    async def _connect(self, process: EngineProcess) -> EngineClient:
        began = self._clock.now()
        client = await EngineClient.connect(process, self._engine_timeout)
        client.on_stats = lambda stats: self.on_stats(stats)
        self._started_at = self._clock.now()
        self._load_seconds = self._started_at - began
        return client

    async def _supervise(self) -> None:
        while True:
            death = await asyncio.shield(self._client.death)
            if self._clock.now() - self._started_at >= HEALTHY_SECONDS:
                self._num_failures = 0
            self._report(death)
            await self._client.close()
            if self._stopping or not await self._restart():
                return

    async def _restart(self) -> bool:
        """Try until there is an engine again; False if that has been tried often enough."""
        while self._max_restarts is None or self._num_failures < self._max_restarts:
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (self._num_failures - 1)) if self._num_failures else 0.0
            self._num_failures += 1
            self._back_at = self._clock.now() + delay + self._load_seconds
            logger.info("the engine is started again%s", f" in {delay:g} s" if delay else "")
            await self._sleep(delay)
            try:
                client = await self._connect(self._launch())
                await self._check_same(client)
            except Exception as error:  # whatever it is, whoever keeps an engine running goes on
                known = isinstance(error, OctavoError | OSError)
                logger.error("the engine could not be started again: %s", error, exc_info=not known)
                continue
            self._past, self._client, self.info = self.totals, client, client.info
            self.num_restarts += 1
            logger.info("the engine is back, loaded in %.2f s", self._load_seconds, extra={"fields": {"pid": self.pid}})
            return True
        logger.error("the engine failed %d times in a row: the server ends", self._num_failures + 1)
        self.gave_up = True
        self._on_give_up()
        return False

    async def _check_same(self, client: EngineClient) -> None:
        for name in FIXED:
            before, now = getattr(self.info, name), getattr(client.info, name)
            if before != now:
                await client.close()
                raise EngineDeadError(
                    f"the model's files have changed: its {name} is now {now}, and the server began with {before}. "
                    "Restart the server to serve the new ones, or put the old ones back"
                )

    def _report(self, death: Death) -> None:
        logger.error(
            "the engine process %s (%s); %d requests were running and have failed",
            death.how,
            death.why,
            death.num_requests,
            extra={"fields": {"death": death.how, "cause": death.why, "num_requests": death.num_requests}},
        )
