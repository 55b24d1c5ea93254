"""What KV groups have in common: those that keep the same tokens are of one kind and do everything in step.

Arithmetic over counts only: which blocks a sequence needs, not which ones it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.records import KVGroup


@dataclass(frozen=True, slots=True)
class GroupKind:
    """The groups that keep all tokens (window None), or those that keep the last `window` ones."""

    window: int | None
    groups: tuple[int, ...]  # their places among the model's groups

    def num_window_blocks(self, block_size: int) -> int:
        """Blocks before a block boundary that the token behind the boundary attends to. Only for sliding kinds."""
        assert self.window is not None
        return -(-(self.window - 1) // block_size)

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks that each group holds for one sequence, of whose tokens a step computes up to `max_chunk`."""
        all_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return all_blocks
        # A step needs window - 1 + max_chunk tokens in a row, of which the first may be the last one of its block.
        return min(all_blocks, -(-(self.window + max_chunk - 2) // block_size) + 1)


def kinds_of(groups: Sequence[KVGroup]) -> tuple[GroupKind, ...]:
    """The kinds among a model's groups, the full one first."""
    by_window: dict[int | None, list[int]] = {}
    for i, group in enumerate(groups):
        by_window.setdefault(group.window if group.kind == "sliding" else None, []).append(i)
    assert all(window is None or window >= 1 for window in by_window), "a token attends to itself at least"
    kinds = [GroupKind(window, tuple(places)) for window, places in by_window.items()]
    return tuple(sorted(kinds, key=lambda kind: kind.window is not None))


def blocks_of_sequence(kinds: Sequence[GroupKind], num_tokens: int, max_chunk: int, block_size: int) -> int:
    """Most blocks that one sequence holds over all groups."""
    return sum(len(kind.groups) * kind.max_blocks(num_tokens, max_chunk, block_size) for kind in kinds)
