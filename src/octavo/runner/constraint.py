"""What may come next in one sequence, as bits of a mask that a backend's `sample` reads.

The seam for whatever holds an output to a form: the sampler asks each constraint of a sequence before it samples, and
tells it the token afterwards. Nothing here knows grammars, requests or backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from octavo.runner.sampling import Array


class TokenConstraint(Protocol):
    """Holds one sequence to something.

    `fill` is called when a step's logits are there, `accept` as soon as its token is sampled, by the same thread. What
    takes long is best begun in `accept`, in a thread of its own, and waited for in `fill`: the model computes
    meanwhile. A sequence that is preempted keeps its constraints, and what it computes again is not told again.
    """

    def fill(self, mask: Array) -> bool:
        """Write all of `mask`, uint32 [mask_words(vocab_size)]: bit i % 32 of word i // 32 is set where id i may come.

        It is a row of the array that the kernel reads. False: any id may come, and the mask does not count.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The next token of the output, whoever allowed it."""
        ...


class AllowedTokens:
    """The same ids all the time (allowed_token_ids)."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._mask = np.zeros(mask_words(vocab_size), np.uint32)
        ids = np.fromiter(token_ids, np.int64)
        ids = ids[ids < vocab_size]
        np.bitwise_or.at(self._mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))

    def fill(self, mask: Array) -> bool:
        mask[:] = self._mask
        return True

    def accept(self, token_id: int) -> None:
        pass


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def fill_mask(constraints: Sequence[TokenConstraint], mask: Array) -> bool:
    """What all of them allow. Where they contradict each other, the later ones have the last word. As `fill`."""
    filled = False
    for constraint in constraints:
        if not filled:
            filled = constraint.fill(mask)
            continue
        later = np.empty_like(mask)
        if constraint.fill(later):
            both = mask & later
            mask[:] = both if both.any() else later
    return filled
