"""Files that a fuzzer damaged, each of which must be refused: quickly, in words, without taking memory.

The fuzzer knows where a good file has its counts, lengths, types and offsets, and puts into each what cannot be.
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from octavo.core.errors import ModelFileError
from octavo.weights.open_checkpoint import open_checkpoint
from tests.tiny_models import TinyLlama, write_tiny_llama

U32, U64 = "<I", "<Q"
MAX_SECONDS, MAX_BYTES = 2.0, 1 << 23
Write = Callable[[Path], Path]


class _Cursor:
    """Walks over the header of a good GGUF file and notes each field: name, place, form, value."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 4
        self.fields: list[tuple[str, int, str, int]] = []

    def take(self, name: str, form: str) -> int:
        (value,) = struct.unpack_from(form, self.raw, self.at)
        self.fields.append((name, self.at, form, value))
        self.at += struct.calcsize(form)
        return int(value)

    def string(self, name: str) -> None:
        length = self.take(name, U64)
        self.at += length

    def value(self, kind: int) -> None:
        if kind == 8:
            self.string("string length")
        elif kind == 9:
            element, count = self.take("element type", U32), self.take("array count", U64)
            for _ in range(count):
                self.value(element)
        else:
            self.at += {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)


def gguf_fields(raw: bytes) -> list[tuple[str, int, str, int]]:
    cursor = _Cursor(raw)
    cursor.take("version", U32)
    num_tensors, num_keys = cursor.take("tensor count", U64), cursor.take("key count", U64)
    for _ in range(num_keys):
        cursor.string("key length")
        cursor.value(cursor.take("value type", U32))
    for _ in range(num_tensors):
        cursor.string("tensor name length")
        for _ in range(cursor.take("dimension count", U32)):
            cursor.take("dimension", U64)
        cursor.take("tensor type", U32)
        cursor.take("tensor offset", U64)
    return cursor.fields


WRONG: dict[str, list[int]] = {
    "version": [0, 1, 4, 2**31],
    "tensor count": [2**63, 2**40, 2**32],
    "key count": [2**63, 2**40, 2**32],
    "key length": [2**62, 2**33, 70_000],
    "value type": [13, 255, 2**31],
    "string length": [2**64 - 1, 2**62, 2**33],
    "element type": [13, 2**31],
    "array count": [2**64 - 1, 2**61, 2**32],
    "tensor name length": [2**62, 70_000],
    "dimension count": [0, 5, 2**31],
    "dimension": [0, 2**63, 2**40],
    "tensor type": [4, 9, 1000, 2**31],
    "tensor offset": [1, 2**63, 2**40, 32],  # the last: where another tensor lies
}


def damaged_ggufs(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Each wrong value in a field of each kind: the first of the kind, and the last."""
    fields = gguf_fields(raw)
    for kind, values in WRONG.items():
        places = [field for field in fields if field[0] == kind]
        for where, (_, at, form, old) in {"first": places[0], "last": places[-1]}.items():
            for value in values:
                if value != old:
                    changed = raw[:at] + struct.pack(form, value) + raw[at + struct.calcsize(form) :]
                    yield f"gguf {where} {kind} {value}", changed
    for share in (0.001, 0.01, 0.3, 0.6, 0.999):
        yield f"gguf cut at {share}", raw[: int(len(raw) * share)]


def good_folder(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(GOOD_TENSORS)
    return folder


GOOD_TENSORS = save({name: torch.randn(8, 32) for name in ("a", "b", "c")})
HEADER_BYTES = int.from_bytes(GOOD_TENSORS[:8], "little")
HEADER: dict[str, Any] = json.loads(GOOD_TENSORS[8 : 8 + HEADER_BYTES])


def with_header(header: bytes, length: int | None = None) -> bytes:
    count = len(header) if length is None else length
    return count.to_bytes(8, "little") + header + GOOD_TENSORS[8 + HEADER_BYTES :]


def changed(name: str, **entry: object) -> bytes:
    return with_header(json.dumps({**HEADER, name: {**HEADER[name], **entry}}).encode())


def damaged_safetensors() -> Iterator[tuple[str, bytes]]:
    text = json.dumps(HEADER).encode()
    for length in (0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1):
        yield f"header length {length}", with_header(text, length)
    for name, header in {
        "nothing": b"",
        "a list": b"[]",
        "a number": b"7",
        "text": b"hello",
        "half": text[: len(text) // 2],
        "zeros": bytes(100),
        "nesting": b"[" * 50_000 + b"]" * 50_000,
        "not UTF-8": text.replace(b'"a"', b'"\xff"'),
        "an empty entry": b'{"a": {}}',
        "a null entry": b'{"a": null}',
    }.items():
        yield f"header is {name}", with_header(header)
    for shape in ([8, 31], [8, 33], [2**62, 2**62], [2**64], [-8, 32], [8.5, 32], ["8", 32], "8", None):
        yield f"shape {shape}", changed("b", shape=shape)
    for dtype in ("F16", "F64", "Q4_0", "", 7, None):
        yield f"dtype {dtype!r}", changed("b", dtype=dtype)
    size = 8 * 32 * 4
    for offsets in (
        [0, size],
        [size, 3 * size],
        [size, size],
        [2 * size, size],
        [2**40, 2**40 + size],
        [-size, 0],
        [size],
        [],
    ):
        yield f"offsets {offsets}", changed("b", data_offsets=offsets)
    for share in (0.0, 0.001, 0.1, 0.5, 0.999):
        yield f"cut at {share}", GOOD_TENSORS[: int(len(GOOD_TENSORS) * share)]
    yield "more at the end", GOOD_TENSORS + bytes(64)


CONFIGS = {"a list": "[]", "a number": "3", "nothing": "", "half": '{"a"', "nesting": "[" * 100_000, "binary": "\0\1\2"}
CONFIGS["an endless number"] = '{"a": ' + "9" * 100_000 + "}"
INDEXES: dict[str, object] = {
    "outside": {"weight_map": {"a": "../model.safetensors"}},
    "absolute": {"weight_map": {"a": "/etc/passwd"}},
    "nowhere": {"weight_map": {"a": "gone.safetensors"}},
    "a folder": {"weight_map": {"a": "."}},
    "another tensor": {"weight_map": {"z": "shard.safetensors"}},
    "no text": {"weight_map": {"a": 1}},
    "a list": {"weight_map": ["a"]},
    "no map": {},
}


def cases() -> Iterator[tuple[str, Write]]:
    """What is wrong, and what writes it into a folder and gives the path to open."""

    def file(raw: bytes) -> Write:
        def write(folder: Path) -> Path:
            (good_folder(folder) / "model.safetensors").write_bytes(raw)
            return folder

        return write

    def config(text: str) -> Write:
        def write(folder: Path) -> Path:
            (good_folder(folder) / "config.json").write_text(text)
            return folder

        return write

    def index(value: object) -> Write:
        def write(folder: Path) -> Path:
            (good_folder(folder) / "model.safetensors").rename(folder / "shard.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps(value))
            return folder

        return write

    yield from ((f"safetensors {name}", file(raw)) for name, raw in damaged_safetensors())
    yield from ((f"config.json {name}", config(text)) for name, text in CONFIGS.items())
    yield from ((f"index {name}", index(value)) for name, value in INDEXES.items())


def refused(path: Path) -> None:
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(ModelFileError) as caught:
            open_checkpoint(path)
        assert time.perf_counter() - start < MAX_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


CASES = dict(cases())


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder_is_refused(tmp_path: Path, case: str) -> None:
    refused(CASES[case](tmp_path))


def test_the_undamaged_files_open(tmp_path: Path) -> None:
    assert set(open_checkpoint(good_folder(tmp_path)).shapes) == {"a", "b", "c"}
    assert open_checkpoint(write_tiny_llama(tmp_path / "good.gguf", TinyLlama(num_layers=1))).shapes


def test_every_damaged_gguf_is_refused(tmp_path: Path) -> None:
    raw = write_tiny_llama(tmp_path / "good.gguf", TinyLlama(num_layers=1)).read_bytes()
    count = 0
    for name, damaged in damaged_ggufs(raw):
        count += 1
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            refused(tmp_path / "damaged.gguf")
        except BaseException as error:
            error.add_note(name)
            raise
    assert count + len(CASES) >= 60
