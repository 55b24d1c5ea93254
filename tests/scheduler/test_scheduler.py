from __future__ import annotations

import msgspec
import pytest

from octavo.core.records import (
    FinishReason,
    KVGroup,
    Request,
    SampledToken,
    SamplingParams,
    SequenceStatus,
    StepPlan,
    StepResult,
)
from octavo.kv_cache.manager import KVCacheManager
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig

SIZE = 8


def make_scheduler(
    num_blocks: int = 64,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    long_prefill_token_threshold: int = 0,
    enable_prefix_caching: bool = True,
    groups: tuple[KVGroup, ...] = (KVGroup("full", num_layers=1, num_kv_heads=1, head_dim=1),),
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, long_prefill_token_threshold)
    return Scheduler(config, KVCacheManager(num_blocks, SIZE, enable_prefix_caching, groups))


def request(request_id: str, num_tokens: int, start: int | None = None, arrival_time: float = 0.0) -> Request:
    """A prompt that shares nothing with others, or else counts up from `start`."""
    first = sum(request_id.encode()) * 1000 if start is None else start
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(first, first + num_tokens)),
        params=SamplingParams(seed=0),
        arrival_time=arrival_time,
    )


def counts(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(s.seq_id, s.first, s.count) for s in plan.scheduled]


def answer(scheduler: Scheduler, plan: StepPlan, *finished: int) -> list[str]:
    """Sample token 5 wherever the plan asks for a token; returns the request ids that ended."""
    sampled = [
        SampledToken(s.seq_id, 5, None, FinishReason.STOP if s.seq_id in finished else None)
        for s in plan.scheduled
        if s.samples
    ]
    ended = scheduler.update(StepResult(plan.step, sampled))
    scheduler._cache.check_invariants()
    return [seq.request.request_id for seq in ended]


def run_step(scheduler: Scheduler, *finished: int) -> StepPlan:
    plan = scheduler.schedule()
    answer(scheduler, plan, *finished)
    return plan


def test_a_request_is_computed_then_decoded_token_by_token_until_it_ends() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(request("a", 10))
    plan = scheduler.schedule()
    assert counts(plan) == [(0, 0, 10)]
    assert plan.new == (seq,)
    assert plan.scheduled[0].samples
    assert answer(scheduler, plan) == []
    assert counts(plan := scheduler.schedule()) == [(0, 10, 1)]
    assert plan.new == ()
    assert answer(scheduler, plan, 0) == ["a"]
    assert (seq.status, seq.finish_reason, seq.num_output_tokens) == (SequenceStatus.FINISHED, FinishReason.STOP, 2)
    assert not scheduler.has_unfinished
    last = scheduler.schedule()
    assert (last.finished, last.scheduled) == ((0,), ())
    assert scheduler.schedule().finished == ()


def test_a_long_prompt_is_cut_to_the_budget_and_samples_only_at_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(request("a", 40))
    plans = [run_step(scheduler) for _ in range(3)]
    assert [counts(plan) for plan in plans] == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 8)]]
    assert [plan.scheduled[0].samples for plan in plans] == [False, False, True]


def test_decoding_sequences_are_served_before_an_earlier_prompt_gets_the_rest() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    scheduler.add(request("a", 40, start=0))
    b = msgspec.structs.replace(request("b", 0), prompt_token_ids=[*range(16), *range(500, 540)])
    scheduler.add(b)  # lets those behind it pass until a has computed their common 16 tokens
    for name in "cde":
        scheduler.add(request(name, 2))
    run_step(scheduler)
    assert counts(run_step(scheduler)) == [(0, 8, 8), (2, 2, 1), (3, 2, 1), (4, 2, 1), (1, 16, 5)]
    assert counts(run_step(scheduler)) == [(0, 16, 8), (1, 21, 5), (2, 3, 1), (3, 3, 1), (4, 3, 1)]


def test_the_threshold_lets_short_prompts_pass_long_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=10)
    scheduler.add(request("a", 40))
    scheduler.add(request("b", 6))
    assert counts(scheduler.schedule()) == [(0, 0, 10), (1, 0, 6)]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 4))
    run_step(scheduler, 0)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert counts(run_step(scheduler)) == [(1, 4, 1), (2, 0, 4)]


def test_a_request_without_room_blocks_those_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(request("a", 40))
    run_step(scheduler)
    scheduler.add(request("b", 40))
    scheduler.add(request("c", 4))
    assert counts(run_step(scheduler)) == [(0, 40, 1)]
    assert scheduler.num_waiting == 2
    run_step(scheduler, 0)
    assert counts(run_step(scheduler)) == [(1, 0, 40), (2, 0, 4)]


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False)
    a, b = scheduler.add(request("a", 31)), scheduler.add(request("b", 31))
    run_step(scheduler)
    scheduler.add(request("c", 4))
    run_step(scheduler)
    plan = run_step(scheduler)
    assert counts(plan) == [(0, 32, 1)], "nobody is admitted in a step that preempts"
    assert b.status is SequenceStatus.WAITING
    assert (scheduler.num_preemptions, b.num_preemptions, a.num_preemptions) == (1, 1, 0)
    assert counts(run_step(scheduler)) == [(0, 33, 1)], "c has room, but b comes first"
    run_step(scheduler, 0)
    plan = run_step(scheduler)
    assert counts(plan) == [(1, 0, 33), (2, 0, 4)], "its two generated tokens are recomputed with the prompt"
    assert plan.new == (scheduler._by_request_id["c"],), "the runner knows b already"
    assert plan.scheduled[0].num_known_blocks == (0,)


def test_a_preempted_request_resumes_from_its_cached_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(request("a", 31))
    b = scheduler.add(request("b", 31))
    for _ in range(3):
        run_step(scheduler)
    assert b.num_preemptions == 1
    run_step(scheduler, 0)
    ((seq_id, first, count),) = counts(run_step(scheduler))
    assert (seq_id, first + count) == (1, 33)
    assert first >= 16
    assert b.num_cached_tokens == 0


def test_the_latest_arrival_gives_way_to_none_but_itself() -> None:
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False)
    scheduler.add(request("a", 25))
    b = scheduler.add(request("b", 32))
    run_step(scheduler)
    assert counts(run_step(scheduler)) == [(0, 25, 1)]
    assert b.status is SequenceStatus.WAITING


def test_a_common_new_prefix_is_computed_once_and_later_arrivals_pass() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=10)
    scheduler.add(request("a", 20, start=0))
    b = scheduler.add(request("b", 20, start=0))
    scheduler.add(request("c", 4, start=100))
    assert counts(run_step(scheduler)) == [(0, 0, 10), (2, 0, 4)]
    assert b.status is SequenceStatus.WAITING
    assert counts(run_step(scheduler)) == [(0, 10, 10), (2, 4, 1), (1, 16, 4)]
    assert b.num_cached_tokens == 16


def test_a_prefix_planned_in_this_step_is_shared_in_this_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 20, start=0))
    scheduler.add(request("b", 20, start=0))
    plan = scheduler.schedule()
    assert counts(plan) == [(0, 0, 20), (1, 16, 4)]
    (a,), (b,) = (s.block_tables for s in plan.scheduled)
    assert a[:2] == b[:2]


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_a_request_never_waits_for_a_prefix_whose_owner_is_gone(end: str) -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8)
    scheduler.add(request("a", 30, start=0))
    b = scheduler.add(request("b", 30, start=0))
    run_step(scheduler)
    assert b.status is SequenceStatus.WAITING
    if end == "abort":
        scheduler.abort("a")
    else:
        scheduler.update(StepResult(0, [SampledToken(0, 5, None, FinishReason.ERROR)]))
    assert counts(run_step(scheduler)) == [(1, 8, 8)]


def test_aborting_ends_a_request_in_any_state_and_only_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = scheduler.add(request("a", 10)), scheduler.add(request("b", 10))
    run_step(scheduler)
    assert scheduler.abort("b") is waiting
    assert scheduler.abort("a") is running
    assert waiting.finish_reason is running.finish_reason is FinishReason.ABORT
    assert scheduler.abort("a") is None
    assert scheduler.abort("never seen") is None
    assert not scheduler.has_unfinished
    assert scheduler.schedule().finished == (0,), "the runner has not heard of b"
    assert scheduler._cache.num_blocks_in_use == 0


def test_the_result_of_a_request_aborted_meanwhile_is_dropped() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(request("a", 10))
    scheduler.add(request("b", 10))
    plan = scheduler.schedule()
    scheduler.abort("a")
    assert answer(scheduler, plan, 0, 1) == ["b"]
    assert seq.num_output_tokens == 0
    assert scheduler.schedule().finished == (0, 1)


def test_a_request_id_can_be_used_again_after_its_end() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    with pytest.raises(AssertionError, match="in use"):
        scheduler.add(request("a", 4))
    scheduler.abort("a")
    assert scheduler.add(request("a", 4)).seq_id == 1


def test_known_blocks_are_those_of_the_plan_before() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 15))
    plans = [run_step(scheduler).scheduled[0] for _ in range(4)]
    assert [plan.num_known_blocks for plan in plans] == [(0,), (2,), (2,), (3,)]
    assert len(plans[-1].block_tables[0]) == 3


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(AssertionError, match="must always fit"):
        make_scheduler(num_blocks=7, max_model_len=64)


def sliding(window: int) -> KVGroup:
    return KVGroup("sliding", num_layers=1, num_kv_heads=1, head_dim=1, kind="sliding", window=window)


def test_a_small_pool_serves_sequences_far_longer_than_their_window() -> None:
    scheduler = make_scheduler(
        num_blocks=6, max_num_batched_tokens=8, max_model_len=512, groups=(sliding(8),), enable_prefix_caching=False
    )
    for name in "ab":
        scheduler.add(request(name, 200))
    while scheduler.num_waiting or scheduler.has_unfinished:
        plan = scheduler.schedule()
        answer(scheduler, plan, *[s.seq_id for s in plan.scheduled if s.first >= 300])
    assert scheduler.num_preemptions == 0
    assert scheduler._cache.num_blocks_in_use == 0


def test_known_blocks_are_told_for_each_group() -> None:
    full = KVGroup("full", num_layers=1, num_kv_heads=1, head_dim=1)
    scheduler = make_scheduler(max_num_batched_tokens=10, groups=(sliding(8), full))
    scheduler.add(request("a", 30))
    plans = [run_step(scheduler).scheduled[0] for _ in range(3)]
    assert [plan.num_known_blocks for plan in plans] == [(0, 0), (2, 4), (3, 4)]


def test_a_pool_without_room_for_a_window_and_a_chunk_is_refused() -> None:
    with pytest.raises(AssertionError, match="must always fit"):
        make_scheduler(num_blocks=3, max_num_batched_tokens=17, groups=(sliding(9),))
    make_scheduler(num_blocks=4, max_num_batched_tokens=17, groups=(sliding(9),))
