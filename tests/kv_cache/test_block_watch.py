from __future__ import annotations

from octavo.core.clock import VirtualClock
from octavo.core.records import BlockTimes, Request, SamplingParams, Sequence
from octavo.kv_cache.block_watch import MAX_PENDING, BlockWatch
from octavo.kv_cache.manager import Admission, KVCacheManager

BLOCK_SIZE = 4


def watched(clock: VirtualClock, num_blocks: int = 3, sample: float = 1.0) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, watch=BlockWatch(num_blocks, clock, sample))


def compute(cache: KVCacheManager, seq_id: int, tokens: list[int]) -> None:
    """A sequence of one step that computes all its tokens, and ends."""
    request = Request(request_id=str(seq_id), prompt_token_ids=tokens, params=SamplingParams(), arrival_time=0)
    seq = Sequence(seq_id, request, tokens)
    assert cache.admit(seq, max_chunk=100) is Admission.ADMITTED
    seq.num_computed_tokens = len(tokens)
    cache.commit(seq)
    cache.free(seq)


def test_an_evicted_block_tells_its_life_and_its_idle_time_and_each_reuse_its_gap() -> None:
    clock = VirtualClock(100)
    cache = watched(clock)
    compute(cache, 0, [1, 2, 3, 4, 5])  # one whole block stays cached
    assert cache.take_block_times() is None
    clock.advance(2)
    compute(cache, 1, [1, 2, 3, 4, 6])
    assert cache.take_block_times() == BlockTimes(reuse_gaps=[2.0])
    clock.advance(5)
    compute(cache, 2, list(range(10, 22)))  # takes all three blocks
    assert cache.take_block_times() == BlockTimes(lifetimes=[7.0], idle_times=[5.0])
    assert cache.take_block_times() is None


def test_a_block_without_cached_content_is_not_evicted() -> None:
    clock = VirtualClock()
    cache = watched(clock)
    for seq_id in range(5):
        compute(cache, seq_id, [seq_id])
        clock.advance(1)
    assert cache.take_block_times() is None


def test_a_sample_is_watched_in_about_its_share_and_the_same_each_time() -> None:
    def lifetimes() -> list[float]:
        clock = VirtualClock()
        cache = watched(clock, num_blocks=100, sample=0.1)
        for seq_id in range(3000):
            compute(cache, seq_id, [4 * seq_id + i for i in range(4)])
            clock.advance(1)
        times = cache.take_block_times()
        assert times is not None
        return times.lifetimes

    assert 200 < len(lifetimes()) < 400
    assert lifetimes() == lifetimes()


def test_times_that_nobody_takes_are_bounded() -> None:
    clock = VirtualClock()
    watch = BlockWatch(1, clock, sample=1.0)
    for _ in range(MAX_PENDING + 10):
        watch.handed_out(0, evicted=True)
    times = watch.take()
    assert times is not None
    assert len(times.lifetimes) == len(times.idle_times) == MAX_PENDING


def test_a_cache_that_nobody_watches_has_no_times() -> None:
    cache = KVCacheManager(3, BLOCK_SIZE)
    compute(cache, 0, [1, 2, 3, 4, 5])
    assert cache.take_block_times() is None
