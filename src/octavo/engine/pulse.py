"""The pulse of an engine process: counters in memory that it shares with its parent, which move on while it works.

The parent reads them without asking, so that neither a long step, nor a held interpreter lock, nor a stopped process
can keep it waiting, and the engine needs no thread for it. Knows nothing of what is counted.
"""

from __future__ import annotations

import mmap
import os

BYTES = 128
LOOP, KERNELS = 0, 8  # places of the counters, each in a cache line of its own: one writer each


class Pulse:
    """`fd`: memory of BYTES bytes that both processes map; it may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BYTES)
        self._counters = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> tuple[Pulse, int]:
        """A new one, and the file descriptor for the other process."""
        fd = os.memfd_create("octavo-pulse")
        os.ftruncate(fd, BYTES)
        return cls(fd), fd

    @property
    def beats(self) -> int:
        """A number that differs from the one before if anything was done in between."""
        return self._counters[LOOP] + self._counters[KERNELS]

    def beat(self) -> None:
        """One more round of the engine's loop."""
        self._counters[LOOP] += 1

    @property
    def kernel_counter(self) -> memoryview:
        """uint64 [1], for the executor to count in."""
        return self._counters[KERNELS : KERNELS + 1]

    def close(self) -> None:
        """Gives the memory back; nobody may hold its `kernel_counter`."""
        self._counters.release()
        self._memory.close()
