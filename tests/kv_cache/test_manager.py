from __future__ import annotations

import itertools

from octavo.core.records import Request, SamplingParams, Sequence
from octavo.kv_cache.manager import Admission, KVCacheManager

SIZE = 8
_ids = itertools.count()


def sequence(token_ids: list[int], salt: str | None = None) -> Sequence:
    seq_id = next(_ids)
    request = Request(
        request_id=str(seq_id),
        prompt_token_ids=token_ids,
        params=SamplingParams(seed=0),
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
    assert cache.admit(seq) is Admission.ADMITTED
    cache.check_invariants()
    return seq


def test_a_later_sequence_shares_what_an_earlier_one_computed() -> None:
    cache = KVCacheManager(8, SIZE)
    a = admitted(cache, sequence(prompt(20)))
    compute(cache, a)
    b = admitted(cache, sequence(prompt(17)))
    assert b.num_cached_tokens == b.num_computed_tokens == 16
    assert cache.block_table(b)[:2] == cache.block_table(a)[:2]
    assert cache.num_blocks_in_use == 4
    assert (cache.num_prefix_queries, cache.num_prefix_hits) == (37, 16)


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
    assert cache.admit(b) is Admission.COMPUTING
    compute(cache, a, 8)
    assert cache.admit(b) is Admission.COMPUTING, "the second block is still being computed"
    assert cache.num_blocks_in_use == in_use
    compute(cache, a, 16)
    assert admitted(cache, b).num_cached_tokens == 16


def test_a_waiting_sequence_computes_for_itself_once_the_owner_is_gone() -> None:
    cache = KVCacheManager(8, SIZE)
    a, b = admitted(cache, sequence(prompt(24))), sequence(prompt(24))
    compute(cache, a, 8)
    assert cache.admit(b) is Admission.COMPUTING
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
    assert cache.admit(too_long) is Admission.NO_BLOCKS
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
    assert cache.admit(sequence(prompt(17))) is Admission.NO_BLOCKS
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


def test_a_block_equal_to_an_existing_one_and_all_after_it_stay_private() -> None:
    cache = KVCacheManager(12, SIZE)
    a, b = admitted(cache, sequence(prompt(8))), admitted(cache, sequence(prompt(8)))
    for seq in (a, b):
        compute(cache, seq)
        seq.token_ids += prompt(8, start=8 if seq is a else 50)
        assert cache.grow(seq, 16)
        compute(cache, seq)
    assert len(list(cache.index.nodes())) == 2, "only the first one's two blocks"
    cache.free(a)
    cache.check_invariants()
    cache.free(b)
    cache.check_invariants()
    assert cache.num_blocks_cached == 2


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
