from __future__ import annotations

import itertools

from octavo.core.records import KVGroup, Request, SamplingParams, Sequence
from octavo.kv_cache.manager import Admission, KVCacheManager

SIZE = 8
_ids = itertools.count()


def sequence(token_ids: list[int], salt: str | None = None, prompt_logprobs: int | None = None) -> Sequence:
    seq_id = next(_ids)
    request = Request(
        request_id=str(seq_id),
        prompt_token_ids=token_ids,
        params=SamplingParams(seed=0, prompt_logprobs=prompt_logprobs),
        arrival_time=0.0,
        cache_salt=salt,
    )
    return Sequence(seq_id, request, list(token_ids))


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return list(range(start, start + num_tokens))


def compute(cache: KVCacheManager, seq: Sequence, num_computed_tokens: int | None = None) -> None:
    seq.num_computed_tokens = seq.num_tokens if num_computed_tokens is None else num_computed_tokens
    cache.commit(seq)
    cache.check_invariants()


def admitted(cache: KVCacheManager, seq: Sequence) -> Sequence:
    assert cache.admit(seq, max_chunk=SIZE) is Admission.ADMITTED
    cache.check_invariants()
    return seq


def full_table(cache: KVCacheManager, seq: Sequence) -> list[int]:
    return cache.block_tables(seq)[0][0]


def test_a_later_sequence_shares_what_an_earlier_one_computed() -> None:
    cache = KVCacheManager(8, SIZE)
    a = admitted(cache, sequence(prompt(20)))
    compute(cache, a)
    b = admitted(cache, sequence(prompt(17)))
    assert b.num_cached_tokens == b.num_computed_tokens == 16
    assert full_table(cache, b)[:2] == full_table(cache, a)[:2]
    assert cache.num_blocks_in_use == 4
    assert (cache.num_prefix_queries, cache.num_prefix_hits) == (37, 16)


def test_whose_prompt_is_scored_reads_no_cached_prefix_but_leaves_one() -> None:
    cache = KVCacheManager(20, SIZE)
    a = admitted(cache, sequence(prompt(20)))
    compute(cache, a)
    scored = admitted(cache, sequence(prompt(40), prompt_logprobs=0))
    assert scored.num_cached_tokens == scored.num_computed_tokens == 0
    assert not set(full_table(cache, scored)) & set(full_table(cache, a))
    assert cache.num_prefix_queries == 20, "it asked for nothing"
    waiting = sequence(prompt(40))
    assert admitted(cache, waiting).num_cached_tokens == 16, "nobody waits for it"
    cache.free(waiting)
    compute(cache, scored, 24)
    compute(cache, scored)
    cache.free(scored)
    cache.free(a)
    cache.check_invariants()
    assert cache.num_blocks_in_use == 0
    assert admitted(cache, sequence(prompt(41))).num_cached_tokens == 40


def test_an_idle_cache_holds_only_cached_blocks() -> None:
    cache = KVCacheManager(8, SIZE)
    seq = admitted(cache, sequence(prompt(20)))
    compute(cache, seq)
    cache.free(seq)
    cache.check_invariants()
    assert (cache.num_blocks_in_use, cache.num_blocks_cached) == (0, 2)
    assert admitted(cache, sequence(prompt(20))).num_cached_tokens == 16


def test_a_common_new_prefix_is_waited_for_and_waiting_holds_nothing() -> None:
    cache = KVCacheManager(8, SIZE)
    a, b = admitted(cache, sequence(prompt(24))), sequence(prompt(24))
    in_use = cache.num_blocks_in_use
    assert cache.admit(b, max_chunk=1000) is Admission.COMPUTING
    compute(cache, a, 8)
    assert cache.admit(b, max_chunk=1000) is Admission.COMPUTING, "the second block is still being computed"
    assert cache.num_blocks_in_use == in_use
    compute(cache, a, 16)
    assert admitted(cache, b).num_cached_tokens == 16


def test_a_waiting_sequence_computes_for_itself_once_the_owner_is_gone() -> None:
    cache = KVCacheManager(8, SIZE)
    a, b = admitted(cache, sequence(prompt(24))), sequence(prompt(24))
    compute(cache, a, 8)
    assert cache.admit(b, max_chunk=1000) is Admission.COMPUTING
    cache.free(a)
    cache.check_invariants()
    assert admitted(cache, b).num_cached_tokens == 8, "what the owner did compute stays"


def test_another_salt_shares_and_waits_for_nothing() -> None:
    cache = KVCacheManager(8, SIZE)
    compute(cache, admitted(cache, sequence(prompt(20), salt="a")))
    assert admitted(cache, sequence(prompt(20), salt="b")).num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    cache = KVCacheManager(8, SIZE, enable_prefix_caching=False)
    a, b = admitted(cache, sequence(prompt(20))), admitted(cache, sequence(prompt(20)))
    compute(cache, a)
    compute(cache, b)
    assert cache.num_blocks_in_use == 6
    cache.free(a)
    cache.free(b)
    cache.check_invariants()
    assert (cache.num_blocks_in_use, cache.num_blocks_cached, cache.num_prefix_queries) == (0, 0, 0)


def test_admission_is_all_or_nothing() -> None:
    cache = KVCacheManager(3, SIZE)
    first = admitted(cache, sequence(prompt(10)))
    compute(cache, first)
    cache.free(first)
    assert cache.num_blocks_cached == 1
    too_long = sequence(prompt(25))
    assert cache.admit(too_long, max_chunk=1000) is Admission.NO_BLOCKS
    cache.check_invariants()
    assert cache.num_blocks_in_use == 0
    assert admitted(cache, sequence(prompt(24))).num_cached_tokens == 8


def test_the_matched_idle_blocks_do_not_count_as_room_for_the_rest() -> None:
    cache = KVCacheManager(4, SIZE)
    a = admitted(cache, sequence(prompt(17)))
    compute(cache, a)
    cache.free(a)
    admitted(cache, sequence(prompt(9, start=100)))
    assert cache.pool.num_free == 2
    assert cache.admit(sequence(prompt(17)), max_chunk=1000) is Admission.NO_BLOCKS
    cache.check_invariants()


def test_generated_blocks_are_cached_once_known_and_computed() -> None:
    cache = KVCacheManager(8, SIZE)
    a = admitted(cache, sequence(prompt(6)))
    compute(cache, a)
    for token in (6, 7, 8):
        a.token_ids.append(token)
        assert cache.grow(a, a.num_tokens)
        compute(cache, a)
    assert admitted(cache, sequence(prompt(9))).num_cached_tokens == 8


def test_a_planned_but_unknown_token_keeps_its_block_out_of_the_index() -> None:
    cache = KVCacheManager(8, SIZE)
    a = admitted(cache, sequence(prompt(7)))
    compute(cache, a, 8)  # the eighth token is planned before the runner has told what it is
    assert len(list(cache.index.nodes())) == 0
    a.token_ids.append(7)
    compute(cache, a, 8)
    assert admitted(cache, sequence(prompt(9))).num_cached_tokens == 8


def test_growing_says_no_when_blocks_run_out() -> None:
    cache = KVCacheManager(2, SIZE)
    a = admitted(cache, sequence(prompt(16)))
    assert cache.grow(a, 16)
    assert not cache.grow(a, 17)
    cache.check_invariants()


def test_a_block_equal_to_one_in_use_stays_private_and_those_after_it_are_cached() -> None:
    cache = KVCacheManager(12, SIZE)
    a, b = admitted(cache, sequence(prompt(8))), admitted(cache, sequence(prompt(8)))
    for seq in (a, b):
        compute(cache, seq)
        seq.token_ids += prompt(8, start=8 if seq is a else 50)
        assert cache.grow(seq, 16)
        compute(cache, seq)
    assert len(list(cache.index.nodes())) == 3
    cache.free(b)
    cache.check_invariants()
    assert cache.num_blocks_cached == 1, "the second block"
    cache.free(a)
    cache.check_invariants()
    assert cache.num_blocks_cached == 3


def test_long_chains_are_evicted_from_their_ends() -> None:
    cache = KVCacheManager(4, SIZE)
    a = admitted(cache, sequence(prompt(32)))
    compute(cache, a)
    cache.free(a)
    b = admitted(cache, sequence(prompt(16, start=100)))
    compute(cache, b)
    cache.free(b)
    assert admitted(cache, sequence(prompt(17))).num_cached_tokens == 16


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    cache = KVCacheManager(8, SIZE)
    a = admitted(cache, sequence(prompt(10)))
    compute(cache, a)
    a.token_ids += prompt(8, start=10)
    assert cache.grow(a, 18)
    compute(cache, a)
    cache.free(a)
    a.num_preemptions = 1
    admitted(cache, a)
    assert (a.num_computed_tokens, a.num_cached_tokens) == (16, 0)
    assert cache.num_prefix_queries == 10, "a preempted request is not counted again"


WINDOW = 12  # two blocks before a block's end
FULL = KVGroup("full", num_layers=1, num_kv_heads=1, head_dim=1)
SLIDING = KVGroup("sliding", num_layers=1, num_kv_heads=1, head_dim=1, kind="sliding", window=WINDOW)


def run_through(cache: KVCacheManager, seq: Sequence, chunk: int = SIZE, until: int | None = None) -> None:
    """Compute what a sequence lacks in chunks, growing before each."""
    end = seq.num_tokens if until is None else until
    while seq.num_computed_tokens < end:
        num_tokens = min(end, seq.num_computed_tokens + chunk)
        assert cache.grow(seq, num_tokens)
        compute(cache, seq, num_tokens)


def test_a_sliding_group_holds_its_window_and_a_chunk_only() -> None:
    cache = KVCacheManager(64, SIZE, groups=(SLIDING, FULL))
    seq = admitted(cache, sequence(prompt(160)))
    assert cache.num_blocks_in_use == 20, "the full group has its blocks at once"
    run_through(cache, seq)
    (sliding, full), lengths = cache.block_tables(seq)
    assert (len(sliding), len(full)) == lengths == (20, 20)
    assert cache.num_blocks_in_use == 20 + 3
    assert cache.num_blocks_cached == 17, "what left the window is cached"
    assert cache.num_blocks_in_use <= cache.blocks_of_sequence(160, SIZE)


def test_admission_counts_a_window_and_a_chunk_of_sliding_groups() -> None:
    groups = (FULL, SLIDING, SLIDING)
    needed = 10 + 2 * 4  # of a window and a chunk of 8 tokens at any place
    assert KVCacheManager(64, SIZE, groups=groups).blocks_of_sequence(80, max_chunk=8) == needed
    for num_blocks, answer in ((needed, Admission.ADMITTED), (needed - 1, Admission.NO_BLOCKS)):
        cache = KVCacheManager(num_blocks, SIZE, groups=groups)
        seq = sequence(prompt(80))
        assert cache.admit(seq, max_chunk=8) is answer
        cache.check_invariants()
    assert cache.num_blocks_in_use == 0


def test_a_prefix_longer_than_the_window_is_shared_without_the_blocks_before_the_window() -> None:
    cache = KVCacheManager(64, SIZE, groups=(FULL, SLIDING))
    a = admitted(cache, sequence(prompt(80)))
    run_through(cache, a)
    b = admitted(cache, sequence([*prompt(80), 1, 2]))
    assert b.num_cached_tokens == 80
    (full, sliding), _ = cache.block_tables(b)
    (a_full, a_sliding), _ = cache.block_tables(a)
    assert full[:10] == a_full
    assert sliding == [0] * 8 + a_sliding[8:]
    run_through(cache, b)


def test_a_prefix_whose_window_was_evicted_is_computed_again_from_where_one_is_left() -> None:
    cache = KVCacheManager(26, SIZE, groups=(FULL, SLIDING))
    a = admitted(cache, sequence(prompt(80)))
    run_through(cache, a)
    other = admitted(cache, sequence(prompt(40, start=1000)))
    run_through(cache, other)  # takes what was free, and of the cached blocks the oldest
    b = sequence([*prompt(40), 1, 2])  # a's blocks are there, but for those in the sliding group
    assert cache.admit(b, max_chunk=8) is Admission.NO_BLOCKS
    cache.free(other)
    admitted(cache, b)
    assert b.num_cached_tokens == 0
    c = sequence([*prompt(40), 3])
    assert cache.admit(c, max_chunk=8) is Admission.COMPUTING, "lost blocks are computed once too"
    run_through(cache, b)
    assert admitted(cache, c).num_cached_tokens == 40


def test_who_computes_lost_blocks_again_puts_them_where_they_were() -> None:
    cache = KVCacheManager(64, SIZE, groups=(FULL, SLIDING))
    a = admitted(cache, sequence(prompt(80)))
    run_through(cache, a)
    cache.free(a)
    num_cached = cache.num_blocks_cached
    for node in list(cache.index.nodes())[:5]:
        (block,) = node.blocks[1] or ()
        for lost in cache.index.evict(block):
            cache.pool.forget(lost)
        cache.pool.forget(block)
    cache.check_invariants()
    b = admitted(cache, sequence([*prompt(40), 1]))
    assert b.num_cached_tokens == 0
    run_through(cache, b)
    first, *_ = cache.index.nodes()
    assert first.blocks == [(column[0],) for column in cache.block_tables(b)[0]]
    cache.free(b)
    cache.check_invariants()
    assert cache.num_blocks_cached == num_cached, "b's blocks took the places of a's, which nobody used"
    assert admitted(cache, sequence([*prompt(80), 2])).num_cached_tokens == 80


def test_a_waiter_whose_prefix_was_evicted_meanwhile_computes_what_is_missing() -> None:
    cache = KVCacheManager(15, SIZE, groups=(SLIDING,))
    a, b = admitted(cache, sequence(prompt(96))), sequence([*prompt(16), 1, 2])
    assert cache.admit(b, max_chunk=8) is Admission.COMPUTING
    run_through(cache, a)
    other = admitted(cache, sequence(prompt(96, start=1000)))
    run_through(cache, other)
    admitted(cache, b)
    assert b.num_cached_tokens == 0
    run_through(cache, b)


def test_an_earlier_arrival_does_not_wait_for_a_later_one() -> None:
    cache = KVCacheManager(64, SIZE)
    early, late = sequence(prompt(24)), sequence(prompt(24))
    admitted(cache, late)
    admitted(cache, early)
    run_through(cache, early)
    run_through(cache, late)


def test_evicting_a_full_block_forgets_what_was_built_upon_it() -> None:
    cache = KVCacheManager(8, SIZE, groups=(FULL, SLIDING))
    a = admitted(cache, sequence(prompt(24)))
    run_through(cache, a)
    cache.free(a)
    assert (cache.num_blocks_cached, cache.pool.num_free) == (6, 8)
    for _ in range(3):  # two blocks without content, then the full block of the last node
        cache.pool.allocate()
    assert cache.num_blocks_cached == 4


def test_a_block_behind_the_window_is_kept_until_its_tokens_are_known() -> None:
    sliding = KVGroup("sliding", num_layers=1, num_kv_heads=1, head_dim=1, kind="sliding", window=2)
    cache = KVCacheManager(8, SIZE, groups=(sliding,))
    seq = admitted(cache, sequence(prompt(SIZE - 1)))
    for end in range(SIZE, 2 * SIZE + 2):  # planned ahead: none of the sampled tokens has been told
        assert cache.grow(seq, end)
        compute(cache, seq, end)
    seq.token_ids += prompt(SIZE + 1)
    cache.commit(seq)
    cache.check_invariants()
    cache.free(seq)
    assert cache.num_blocks_cached == 2, "both whole blocks are in the index"


def test_nobody_waits_for_a_block_that_is_computed_again_while_it_is_there() -> None:
    cache = KVCacheManager(16, SIZE)
    a = admitted(cache, sequence(prompt(2 * SIZE)))
    compute(cache, a)
    b = admitted(cache, sequence(prompt(2 * SIZE)))  # computes its last token again, and its block with it
    assert b.num_cached_tokens == SIZE
    assert admitted(cache, sequence(prompt(3 * SIZE))).num_cached_tokens == 2 * SIZE
