"""Log-probabilities of the tokens of prompts: a backend makes the logits of a step's rows, tile by tile.

It does not know sequences or chunks: rows of the last step come in, each with the token that followed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from octavo.core.records import TokenLogprobs
from octavo.runner.sampler import token_logprobs
from octavo.runner.sampling import Array, ScoreArrays


class NativeScore(Protocol):
    """What a backend does for this (backends.cpu.CpuProgram).

    `select` makes the logits those of the given rows of the last step, int32, as many as sequences may run at most.
    `score` scores the first `rows` of these; `arrays` are the fields of ScoreArrays in order, C-contiguous.
    """

    def select(self, rows: Array) -> None: ...
    def score(self, rows: int, /, *arrays: Array) -> None: ...


def score_tokens(
    program: NativeScore, max_rows: int, rows: Sequence[int], tokens: Sequence[int], num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """For each of `rows` the log-probability of its token, and the best alternatives, as many as it wants.

    The logits of the step are gone afterwards.
    """
    scored: list[TokenLogprobs] = []
    for begin in range(0, len(rows), max_rows):
        tile = slice(begin, begin + max_rows)
        selected = np.array(rows[tile], np.int32)
        count = len(selected)
        wanted = np.array(num_logprobs[tile], np.int32)
        widest = int(wanted.max())
        a = ScoreArrays(
            num_logprobs=wanted,
            token=np.array(tokens[tile], np.int32),
            logprob=np.empty(count, np.float32),
            rank=np.empty(count, np.int32),
            top_ids=np.empty((count, widest), np.int32),
            top_logprobs=np.empty((count, widest), np.float32),
        )
        program.select(selected)
        program.score(count, *a)
        scored += [token_logprobs(a, row) for row in range(count)]
    return scored
