"""A file mapped into memory for reading, opened so that nothing that is not a plain file makes anybody wait.

Knows nothing of what is in it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError


class MappedFile:
    """Views of the bytes stay valid after `close()` for as long as somebody holds them."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError if there is no such file, or an empty one, or it is not a regular file."""
        self.path = path
        self.mapping = _map(path)
        self.size = len(self.mapping)

    def view(self, start: int, end: int) -> NDArray[np.uint8]:
        """The bytes from start to end, read-only."""
        return np.frombuffer(self.mapping, np.uint8, end - start, start)

    def release_pages(self) -> None:
        """Give the pages back to the system; a later look reads them from the file again."""
        if not self.mapping.closed:
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        # BufferError: somebody holds a view, and the mapping ends with the last one.
        with contextlib.suppress(BufferError):
            self.mapping.close()


def _map(path: Path) -> mmap.mmap:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"cannot open the model file {path}: {reason}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file: give the path of a model file")
        if status.st_size == 0:
            raise ModelFileError(f"{path} is empty: copy or download it again")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"cannot map the model file {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
