"""The runner over a fake program, whose memory holds the tokens themselves."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.core import records
from octavo.core.records import Request, SamplingParams, ScheduledSequence, StepPlan, TokenLogprobs
from octavo.runner.runner import Ints, Runner
from octavo.runner.sampling import SampleArrays, ScoreArrays

SIZE = 4  # tokens in a block
VOCAB_SIZE = 101
EOS = 7


def answer(contexts: Sequence[Sequence[int]]) -> int:
    """The fake model: what follows depends on every token that a KV group keeps, and on its place."""
    return sum((g + i + 1) * (t + 1) for g, context in enumerate(contexts) for i, t in enumerate(context)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], count: int, windows: Sequence[int] = (0,)) -> list[int]:
    """windows: of each KV group, 0 if it keeps all tokens."""
    context = list(prompt)
    for _ in range(count):
        context.append(answer([context[-window:] for window in windows]))
    return context[len(prompt) :]


class FakeProgram:
    """Writes tokens to paged memory where a real one writes keys and values, and answers from what it reads back."""

    def __init__(self, windows: Sequence[int], num_blocks: int = 64) -> None:
        self.windows = windows
        self.memory = np.full((num_blocks, SIZE), -1000, np.int32)
        self.calls: list[str] = []
        self.sampled: SampleArrays
        self._answers: list[int] = []
        self._by_row: dict[int, int] = {}
        self.max_selected = 4

    def run(
        self, token_ids: Ints, first_row: Ints, first_position: Ints, block_tables: Sequence[Ints], selected_rows: Ints
    ) -> None:
        self.calls.append("run")
        assert len(block_tables) == len(self.windows)
        arrays = (token_ids, first_row, first_position, *block_tables, selected_rows)
        assert all(a.flags.c_contiguous and a.dtype == np.int32 for a in arrays)
        assert all(len(first_row) - 1 == len(first_position) == len(tables) for tables in block_tables)
        assert first_row[-1] == len(token_ids)
        answers = {}
        for s in range(len(first_position)):
            for row in range(first_row[s], first_row[s + 1]):
                position = first_position[s] + row - first_row[s]
                contexts = []
                for window, table in zip(self.windows, [tables[s] for tables in block_tables], strict=True):
                    self.memory[table[position // SIZE], position % SIZE] = token_ids[row]
                    context = self.memory[table[: position // SIZE + 1]].reshape(-1)[: position + 1]
                    contexts.append(context[-window:].tolist())
                answers[row] = answer(contexts)
        self._by_row = answers
        self._answers = [answers[row] for row in selected_rows.tolist()]

    def sample(self, rows: int, /, *arrays: NDArray[Any]) -> None:
        self.calls.append("sample")
        assert rows == len(self._answers)
        self.sampled = SampleArrays(*arrays)
        self.sampled.token[:rows] = self._answers

    def select(self, rows: Ints) -> None:
        self.calls.append("select")
        assert rows.flags.c_contiguous
        assert 1 <= len(rows) <= self.max_selected
        self._answers = [self._by_row[row] for row in rows.tolist()]

    def score(self, rows: int, /, *arrays: NDArray[Any]) -> None:
        """Token and expected token become the numbers that the real one computes from them."""
        self.calls.append("score")
        assert rows == len(self._answers)
        a = ScoreArrays(*arrays)
        a.rank[:rows] = a.token[:rows]
        a.logprob[:rows] = self._answers
        for row, wanted in enumerate(a.num_logprobs[:rows].tolist()):
            a.top_ids[row, :wanted] = np.arange(wanted)
            a.top_logprobs[row, :wanted] = self._answers[row]

    def copy_blocks(self, source: Ints, destination: Ints) -> None:
        self.calls.append("copy")
        assert source.flags.c_contiguous
        assert destination.flags.c_contiguous
        for a, b in zip(source, destination, strict=True):
            self.memory[b] = self.memory[a]


class Driver:
    """Writes plans by hand: which sequences compute how much, and where their blocks are."""

    def __init__(self, max_num_seqs: int = 4, max_model_len: int = 40, windows: Sequence[int] = (0,)) -> None:
        self.windows = windows
        self.program = FakeProgram(windows)
        self.runner = Runner(
            self.program,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            block_size=SIZE,
            num_kv_groups=len(windows),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
        )
        self.outputs: dict[int, list[int]] = {}
        self.scored: dict[int, list[TokenLogprobs]] = {}
        self._seqs: dict[int, records.Sequence] = {}
        self._known: dict[int, tuple[int, ...]] = {}
        self._computed: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}  # of each KV group
        self._new: list[records.Sequence] = []
        self._blocks = itertools.count()
        self._steps = itertools.count()

    def add(self, seq_id: int, prompt: list[int], **params: Any) -> None:
        sampling = SamplingParams(**{"seed": 1, "max_tokens": 16, **params})
        request = Request(request_id=str(seq_id), prompt_token_ids=prompt, params=sampling, arrival_time=0.0)
        self._seqs[seq_id] = records.Sequence(seq_id, request, list(prompt))
        self._new.append(self._seqs[seq_id])
        self._computed[seq_id] = 0
        self._known[seq_id] = (0,) * len(self.windows)
        self._tables[seq_id] = [[] for _ in self.windows]
        self.outputs[seq_id] = []
        self.scored[seq_id] = []

    def preempt(self, seq_id: int) -> None:
        self._computed[seq_id] = 0
        self._known[seq_id] = (0,) * len(self.windows)
        self._tables[seq_id] = [[] for _ in self.windows]

    def step(
        self,
        *seq_ids: int,
        counts: dict[int, int] | None = None,
        finished: Iterable[int] = (),
        copies: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Compute all that is known of the sequences, in this order, or `counts` of it."""
        scheduled = []
        for seq_id in seq_ids:
            seq, first, tables = self._seqs[seq_id], self._computed[seq_id], self._tables[seq_id]
            count = (counts or {}).get(seq_id, len(seq.token_ids) - first)
            end = self._computed[seq_id] = first + count
            for window, table in zip(self.windows, tables, strict=True):
                num_tokens = end if window else len(seq.token_ids)  # what slides grows step by step
                table.extend(next(self._blocks) for _ in range(len(table), -(-num_tokens // SIZE)))
                if window:
                    self.program.memory[table[: max(0, first - window + 1) // SIZE]] = -1000
            # What the runner was told before must not be read again.
            shown = tuple([-1] * n + table[n:] for n, table in zip(self._known[seq_id], tables, strict=True))
            samples = end == len(seq.token_ids)
            scheduled.append(ScheduledSequence(seq_id, first, count, shown, self._known[seq_id], samples))
            self._known[seq_id] = tuple(map(len, tables))
        new, self._new = tuple(self._new), []
        plan = StepPlan(next(self._steps), tuple(finished), new, copies, tuple(scheduled))
        result = self.runner.execute(plan)
        assert result.step == plan.step
        assert [s.seq_id for s in result.sampled] == [s.seq_id for s in scheduled if s.samples]
        for scored in result.scored:
            assert scored.logprobs
            self.scored[scored.seq_id] += scored.logprobs
        for sampled in result.sampled:
            self._seqs[sampled.seq_id].token_ids.append(sampled.token_id)
            self.outputs[sampled.seq_id].append(sampled.token_id)


def test_a_sequence_continues_from_its_own_tokens() -> None:
    driver = Driver()
    driver.add(0, [3, 1, 4, 1, 5])
    for _ in range(9):
        driver.step(0)
    assert driver.outputs[0] == continuation([3, 1, 4, 1, 5], 9)


def test_a_prompt_in_chunks_samples_only_once_it_has_caught_up() -> None:
    driver = Driver()
    driver.add(0, list(range(11)))
    for count in (1, 4, 5):
        driver.step(0, counts={0: count})
        assert driver.outputs[0] == []
    assert driver.program.calls == ["run"] * 3
    driver.step(0)
    driver.step(0)
    assert driver.outputs[0] == continuation(range(11), 2)


def test_sequences_of_all_kinds_share_a_step() -> None:
    driver = Driver()
    driver.add(0, [9, 8])
    driver.step(0)
    driver.add(1, [5] * 10)
    driver.add(2, [6] * 3)
    driver.step(0, 1, 2, counts={1: 6})
    driver.step(0, 1, 2)
    assert driver.outputs == {0: continuation([9, 8], 3), 1: continuation([5] * 10, 1), 2: continuation([6] * 3, 2)}


def test_a_preempted_sequence_computes_its_prompt_and_output_again_from_fresh_blocks() -> None:
    driver = Driver()
    driver.add(0, [3, 1, 4, 1, 5])
    for _ in range(5):
        driver.step(0)
    driver.preempt(0)
    driver.program.memory[:] = -1000
    driver.step(0, counts={0: 7})
    driver.step(0)
    driver.step(0)
    assert driver.outputs[0] == continuation([3, 1, 4, 1, 5], 7)


def test_whoever_finishes_makes_room_and_the_others_move_up() -> None:
    driver = Driver()
    for seq_id in range(4):
        driver.add(seq_id, [seq_id] * 6)
    driver.step(0, 1, 2, 3)
    driver.step(1, 2, 3, finished=[0])
    driver.add(4, [40, 41])
    driver.step(2, 3, 4, finished=[1])
    driver.step(2, 3, 4)
    assert driver.outputs[3] == continuation([3] * 6, 4)
    assert driver.outputs[4] == continuation([40, 41], 2)


def test_a_sequence_that_returns_to_its_row_finds_its_blocks_after_another_was_there() -> None:
    driver = Driver()
    driver.add(0, [1] * 6)
    driver.add(1, [2] * 6)
    for order in ((0,), (1,), (0,), (0, 1), (1,)):
        driver.step(*order)
    assert driver.outputs == {0: continuation([1] * 6, 3), 1: continuation([2] * 6, 3)}


def test_a_sequence_that_returns_to_its_row_finds_the_blocks_it_got_elsewhere() -> None:
    driver = Driver()
    driver.add(0, [1] * 3)
    driver.add(1, [2] * 3)
    driver.step(0, 1)
    for _ in range(6):  # row 1 is empty while sequence 1 grows in row 0
        driver.step(1)
    driver.step(0, 1)
    assert driver.outputs == {0: continuation([1] * 3, 2), 1: continuation([2] * 3, 8)}


def test_each_group_has_its_own_tables_which_grow_at_their_own_pace() -> None:
    windows = (5, 0, 3, 5)
    driver = Driver(windows=windows)
    driver.add(0, [1] * 9)
    driver.step(0, counts={0: 2})
    driver.add(1, [2] * 6)
    driver.step(0, 1, counts={0: 6})
    for order in ((1, 0), (0, 1), (1,), (0, 1)):
        driver.step(*order)
    assert driver.outputs == {0: continuation([1] * 9, 3, windows), 1: continuation([2] * 6, 5, windows)}


def test_blocks_are_copied_before_anything_is_computed() -> None:
    driver = Driver()
    driver.add(0, [1, 2, 3])
    driver.step(0)
    driver.program.calls.clear()
    driver.step(0, copies=((0, 50), (50, 51)))
    assert driver.program.calls == ["copy", "run", "sample"]
    assert driver.program.memory[51, :3].tolist() == [1, 2, 3]


def test_a_plan_for_nobody_leaves_the_program_alone() -> None:
    driver = Driver()
    driver.add(0, [1, 2])
    driver.step(0)
    driver.program.calls.clear()
    driver.step(finished=[0])
    assert driver.program.calls == []


def test_nothing_is_kept_of_a_sequence_that_has_finished() -> None:
    driver = Driver()
    driver.add(0, [1, 2], prompt_logprobs=1)
    driver.add(1, [3, 4])
    driver.step(0, 1)
    states = [weakref.ref(known.sampler) for known in driver.runner._known.values()]
    driver.step(1, finished=[0])
    assert [state() is None for state in states] == [True, False]


def test_an_aborted_prompt_leaves_nothing_to_be_scored() -> None:
    driver = Driver()
    driver.add(0, [1, 2, 3, 4], prompt_logprobs=1)
    driver.step(0, counts={0: 2})
    assert driver.runner._unscored == {0}
    driver.step(finished=[0])
    assert driver.runner._unscored == set()


def test_sampling_hears_of_seeds_positions_and_what_min_tokens_forbids() -> None:
    driver = Driver()
    driver.add(0, [1, 2], seed=5)
    driver.add(1, [3], seed=6, min_tokens=2, stop_token_ids=(9,))
    for position in range(3):
        driver.step(0, 1)
        arrays = driver.program.sampled
        assert arrays.seed[:2].tolist() == [5, 6]
        assert arrays.position[:2].tolist() == [position, position]
        forbidden = arrays.mask_ids[arrays.mask_offsets[1] : arrays.mask_offsets[2]].tolist()
        assert forbidden == ([EOS, 9] if position < 2 else [])


def test_output_may_go_up_to_the_models_length() -> None:
    driver = Driver(max_model_len=12)
    driver.add(0, [1, 2], max_tokens=1_000_000_000)
    for _ in range(10):
        driver.step(0)
    assert driver.outputs[0] == continuation([1, 2], 10)


def scores(prompt: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
    """What the fake program says of a prompt's tokens from the second on."""
    said = [(token, float(answer([prompt[:i]]))) for i, token in enumerate(prompt) if i]
    return [
        TokenLogprobs(logprob, token, list(range(num_logprobs)), [logprob] * num_logprobs) for token, logprob in said
    ]


def test_prompts_are_scored_in_tiles_and_the_samples_stay_what_they_are() -> None:
    driver = Driver()
    prompts = {0: list(range(11)), 1: [5, 6, 7], 2: [9] * 9, 3: [8]}
    wishes = {0: {"prompt_logprobs": 2}, 1: {}, 2: {"prompt_logprobs": 0}, 3: {"prompt_logprobs": -1}}
    for seq_id, prompt in prompts.items():
        driver.add(seq_id, prompt, **wishes[seq_id])
    driver.step(0, 1, 2, 3)
    assert driver.program.calls == ["run", "sample", *["select", "score"] * 5]  # 10 + 8 rows, 4 at a time
    driver.step(0, 1, 2, 3)
    assert driver.program.calls[-2:] == ["run", "sample"]
    assert driver.scored == {0: scores(prompts[0], 2), 1: [], 2: scores(prompts[2], 0), 3: []}
    assert driver.outputs == {seq_id: continuation(prompt, 2) for seq_id, prompt in prompts.items()}


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 5), (10,), (3, 7, 1)])
def test_each_prompt_token_is_scored_once_however_the_prompt_is_cut_and_preempted(counts: tuple[int, ...]) -> None:
    driver = Driver()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    driver.add(0, prompt, prompt_logprobs=1)
    driver.add(1, [7, 7])
    done = 0
    for count in counts:
        driver.step(1, 0, counts={0: count})
        done += count
        assert driver.scored[0] == scores(prompt, 1)[:done]
    driver.preempt(0)
    driver.program.memory[:] = -1000
    driver.preempt(1)
    driver.step(0, counts={0: 6})
    driver.step(0)
    driver.step(0)
    driver.preempt(0)
    driver.step(0)
    assert driver.scored[0] == scores(prompt, 1)
    assert driver.outputs[0] == continuation(prompt, 4 if done == len(prompt) else 3)
