"""A file mapped into memory for reading, opened so that nothing that is not a plain file makes anybody wait.

Knows nothing of what is in it, but that a pointer of Git LFS is not it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError

LFS_POINTER = b"version https://git-lfs.github.com/spec"


class MappedFile:
    """Views of the bytes stay valid after `close()` for as long as somebody holds them."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError if there is no such file, or an empty one, or a pointer, or one that is not regular."""
        self.path = path
        self._descriptor = _open(path)
        self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)
        self.mapping = _map(path, self._descriptor)
        self.size = len(self.mapping)
        if self.mapping[: len(LFS_POINTER)] == LFS_POINTER:
            raise ModelFileError(
                f"{path} is a pointer of Git LFS, not the model file itself: run 'git lfs pull' in {path.parent} to "
                "fetch it"
            )

    def view(self, start: int, end: int) -> NDArray[np.uint8]:
        """The bytes from start to end, read-only."""
        return np.frombuffer(self.mapping, np.uint8, end - start, start)

    def read(self, start: int, end: int) -> NDArray[np.uint8]:
        """A copy of the bytes from start to end, [end - start]; not after `close()`.

        Raises ModelFileError if the file has become shorter, where a look at a view would end the process (SIGBUS).
        """
        data = np.empty(end - start, np.uint8)
        done = 0
        while done < data.size:
            try:
                count = os.preadv(self._descriptor, [data.data[done:]], start + done)
            except OSError as error:
                raise ModelFileError(f"cannot read the model file {self.path}: {error.strerror}") from error
            if count == 0:
                left = os.fstat(self._descriptor).st_size
                raise ModelFileError(
                    f"{self.path} was truncated while it was read, from {self.size:,} bytes to {left:,}: copy or "
                    "download it again, and leave it alone meanwhile"
                )
            done += count
        return data

    def release_pages(self) -> None:
        """Give the pages back to the system; a later look reads them from the file again."""
        if not self.mapping.closed:
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        # BufferError: somebody holds a view, and the mapping ends with the last one.
        with contextlib.suppress(BufferError):
            self.mapping.close()
        self._close_descriptor()


def _open(path: Path) -> int:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"cannot open the model file {path}: {reason}") from error


def _map(path: Path, descriptor: int) -> mmap.mmap:
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file: give the path of a model file")
        if status.st_size == 0:
            raise ModelFileError(f"{path} is empty: copy or download it again")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"cannot map the model file {path}: {error.strerror}") from error
