from __future__ import annotations

import math
from collections import Counter

import pytest

from octavo.core.records import RequestOutput, TokenLogprobs
from octavo.engine.engine import Engine
from tests.simulation.simulation import ENOUGH_SEEDS, SimulationError, missing_events, run_seeds

REPLAY = r"seed (\d+): .* python -m tests.simulation --seeds 1 --start \1$"


@pytest.mark.timeout(900)  # 15 seconds on two free cores
def test_every_request_of_300_random_workloads_comes_out_as_if_it_had_run_alone() -> None:
    events = run_seeds(range(ENOUGH_SEEDS))
    assert not missing_events(events)


def test_an_event_that_never_happened_is_named() -> None:
    happened = Counter(missing_events(Counter()))
    del happened["preemption"]
    assert missing_events(happened) == ["preemption"]


class SloppyEngine(Engine):
    """The smallest possible error in one logprob, and only if two requests sampled in one step."""

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        if len(outputs) == 2 and outputs[1].logprobs:
            (entry,) = outputs[1].logprobs
            wrong = math.nextafter(entry.logprob, -math.inf)
            outputs[1].logprobs = [TokenLogprobs(wrong, entry.rank, entry.top_ids, entry.top_logprobs)]
        return outputs


def test_a_logprob_that_is_off_by_one_bit_is_found_and_the_error_says_how_to_replay_it() -> None:
    with pytest.raises(SimulationError, match="logprobs") as error:
        run_seeds(range(20), make_engine=SloppyEngine)
    assert error.match(REPLAY)


class LeakyEngine(Engine):
    """Loses a block whenever a request is aborted."""

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.cache.pool.allocate()


def test_a_block_that_nobody_gives_back_is_found() -> None:
    with pytest.raises(SimulationError, match=REPLAY):
        run_seeds(range(20), make_engine=LeakyEngine)
