"""What the HTTP process and the engine process say to each other, and the facts about an engine that the door needs.

Knows neither how messages travel (`channel`) nor who acts on them (`process`, `client`).
"""

from __future__ import annotations

import msgspec

from octavo.core.config import EngineConfig
from octavo.core.records import EngineStats, Request, RequestOutput


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine turned out to be. Lengths are in tokens."""

    served_model_name: str  # the one in replies
    other_model_names: list[str] = []  # under which requests may ask for it too
    max_model_len: int  # prompt and output together
    can_be_longer: bool = True  # whether the model allows a larger --max-model-len
    max_prompt_tokens: int  # a longer prompt can never be scheduled: refused at the door
    vocab_size: int
    max_num_seqs: int
    max_logprobs: int = 20  # most alternatives of a token that a request may ask for; -1: no limit
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    kv_cache_dtype: str
    isa: str
    threads: int
    memory_table: list[tuple[str, str]]  # (name, value) rows, shown at start
    warnings: list[str] = []  # one sentence each, shown at start

    def ways_out_of_length(self, first: str) -> str:
        """What a client whose request is too long can do: `first`, or have a longer model, if there can be one."""
        if self.can_be_longer:
            return f"{first}, or start the server with a larger --max-model-len"
        return f"{first} (this is the most that the model allows)"


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first message to an engine process: load this. `pulse_fd`: the memory of its Pulse."""

    config: EngineConfig
    pulse_fd: int


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this request any more; no output follows."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End now; whatever still runs is dropped."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Send Outputs, even if there is nothing new."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; requests are welcome."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or broke, and ends. `kind` is the name of the error's class."""

    kind: str
    error: str


class Refusal(msgspec.Struct, frozen=True):
    """An InvalidRequestError that `Engine.submit` raised, on its way back to its client."""

    request_id: str
    error: str
    param: str | None
    code: str | None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All the news of one step in one frame. `time` is the engine's Clock.now() at the end of the step."""

    outputs: list[RequestOutput]
    stats: EngineStats
    refusals: list[Refusal] = []
    time: float = 0.0


ToEngine = Configure | Submit | Abort | Ping | Shutdown
FromEngine = Ready | Failed | Outputs
