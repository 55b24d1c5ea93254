"""A histogram that costs a token next to nothing. Knows numbers only; `metrics` says what they mean.

prometheus_client's own takes a lock and walks its buckets with each observation: 2 us, ten times as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Histogram:
    """Counts of values at or below each of `bounds` (ascending), and above the last."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values at or below it), the last bound "+Inf", as Prometheus counts."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(map(float, self._counts)), strict=True))


def one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds: list[float] = []
    power = 1
    while power <= limit:
        bounds += [factor * power for factor in (1, 2, 5) if factor * power <= limit]
        power *= 10
    return bounds
