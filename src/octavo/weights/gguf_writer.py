"""Writes GGUF files, one tensor after the other, so that a model of any size needs the memory of one tensor.

The layout is drawn in `gguf.py`. A file appears under its name when it is complete, and not before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO

from octavo.core.errors import ModelFileError
from octavo.quantization.formats import row_bytes
from octavo.weights.checkpoint import StoredTensor

VERSION = 3
UINT32 = 4  # GGUF's number of the value type


def uint32_entry(key: str, value: int) -> bytes:
    """A metadata entry as it stands in the file."""
    return _string(key) + struct.pack("<II", UINT32, value)


def write_gguf(
    path: Path,
    entries: Sequence[bytes],
    tensors: Mapping[str, StoredTensor],
    *,
    alignment: int,
    wrote: Callable[[str, StoredTensor], None],
) -> None:
    """Write a file, over one that is there.

    entries: the metadata, each as it stands in a file. alignment: the power of two that the metadata says.
    wrote: called after each tensor. Raises ModelFileError if the file cannot be written; then nothing is left of it.
    """
    infos, offset = [], 0
    for name, t in tensors.items():
        dims = t.shape[::-1]
        infos.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.type, offset))
        offset += _up(_size(t), alignment)
    with _replacing(path, offset) as file:
        file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(entries)))
        file.writelines(entries)
        file.writelines(infos)
        file.write(bytes(-file.tell() % alignment))
        for name, t in tensors.items():
            data = t.load()
            assert data.size == _size(t), f"{name} gave {data.size} bytes instead of {_size(t)}"
            file.write(data.data)
            file.write(bytes(-data.size % alignment))
            wrote(name, t)


def _size(t: StoredTensor) -> int:
    return prod(t.shape[:-1]) * row_bytes(t.type, t.shape[-1])


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


@contextlib.contextmanager
def _replacing(path: Path, data_bytes: int) -> Iterator[BinaryIO]:
    """A file beside `path` that becomes it at the end, or vanishes if the block fails."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _remove_abandoned_parts(path)
        with beside.open("xb") as file:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            room = os.fstatvfs(file.fileno())
            if room.f_bavail * room.f_frsize < data_bytes:  # better now than after an hour
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = f"{data_bytes:,} bytes are needed there" if full else "name another place"
        raise ModelFileError(f"cannot write {path} ({error.strerror}): {remedy}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _remove_abandoned_parts(path: Path) -> None:
    """What killed processes have left of the same file. A process that lives holds the lock of its part."""
    for part in path.parent.glob(glob.escape(f".{path.name}.") + "[0-9]*.part"):
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)
