"""Random workloads against the scheduler and the cache; see the simulator for what is checked after every step."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.scheduler.simulator import Simulation

NUM_SEEDS = 500
EVENTS = (
    "preemption",
    "prefix hit",
    "sharing within a step",
    "waiting for a computing prefix",
    "passed while waiting for a prefix",
    "eviction",
    "block dropped behind a window",
    "sliding prefix hit",
    "sliding sharing within a step",
    "sliding blocks evicted from a node",
    "evicted sliding blocks computed again",
    "abort",
    "abort in flight",
)


def test_every_workload_ends_rightly_and_every_event_happens() -> None:
    events: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except AssertionError as error:
            pytest.fail(f"Simulation({seed}).run() fails: {error!r}")
        events += simulation.events
    missing = [event for event in EVENTS if not events[event]]
    assert not missing, f"these never happened: {missing}; these did: {events}"
