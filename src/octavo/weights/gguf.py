"""A memory-mapped reader of GGUF model files: metadata as Python values, tensors as views of their bytes.

It knows the container (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian) and
nothing of what the keys mean. The file is not trusted: every count and length is held against the file's size before
anything is allocated, and whatever is wrong becomes a ModelFileError with the place.

    "GGUF" | u32 version | u64 tensors | u64 keys
    key:    string | u32 type | value          string: u64 length, bytes     array: u32 type, u64 count, values
    tensor: string | u32 dims | u64 dim (fastest first) ... | u32 type | u64 offset from the data section
    padding to `general.alignment` (32 if absent) | data section

A model may be split into files `NAME-00001-of-00003.gguf`: each has `split.no` (from 0), `split.count` and
`split.tensors.count` (of all together), and the first has the model's metadata.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.quantization.formats import FORMATS, GGML_TYPES, WeightType, row_bytes
from octavo.quantization.stored_tensor import StoredTensor
from octavo.weights.mapped_file import MappedFile

MetaValue: TypeAlias = "bool | int | float | str | list[MetaValue]"
_Span: TypeAlias = tuple[MappedFile, int, int]  # first byte, byte after the last

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 65_535
MAX_ARRAY_DEPTH = 4
MAX_PARTS = 10_000
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
# A vocabulary of 260,000 tokens with its merges needs about 1.3 million items and 10 MB. The limits keep a hostile
# file, however large, from turning into gigabytes of Python objects.
MAX_ITEMS = 1 << 22
MAX_HEADER_BYTES = 1 << 28

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_SCALAR_STRUCTS = {kind: struct.Struct(code) for kind, code in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MIN_BYTES = {**{kind: s.size for kind, s in _SCALAR_STRUCTS.items()}, _STRING: 8, _ARRAY: 12}
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# Only for messages: what a file may have that octavo cannot read.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class GGUFFile:
    """An open model of one or several files: a `Checkpoint` whose settings are the metadata.

    Tensor data stays valid after `close()` for as long as somebody holds it.
    """

    def __init__(
        self,
        path: Path,
        files: list[MappedFile],
        metadata: dict[str, MetaValue],
        tensors: dict[str, StoredTensor],
        spans: dict[str, _Span],
        places: dict[str, _Span],
    ) -> None:
        self.path = path
        self.kind: Literal["gguf", "hf"] = "gguf"
        self.quantized_by: str | None = "gguf"
        self.metadata = metadata
        self.tensors = tensors
        self.config: Mapping[str, Any] = metadata
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in tensors.items()}
        self.warnings: list[str] = []
        self._files = files
        self._spans = spans
        self._places = places

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map a file, and with one part of a split model the others, and read the headers.

        Raises ModelFileError if one cannot be opened or is malformed.
        """
        files: list[MappedFile] = []
        try:
            first, *others = _open_parts(Path(path), files)
            tensors, places = first.tensors, first.places
            for part in others:
                for name, tensor in part.tensors.items():
                    if tensors.setdefault(name, tensor) is not tensor:
                        raise ModelFileError(f"{part.path} has the tensor {name!r}, as another part of the model has")
                places |= part.places
            total = first.metadata.get("split.tensors.count", len(tensors))
            if total != len(tensors):
                raise ModelFileError(f"{path} and its other parts have {len(tensors):,} tensors instead of {total!r}")
        except ModelFileError:
            for file in files:
                file.close()
            raise
        return cls(Path(path), files, first.metadata, tensors, first.spans, places)

    def tensor(self, name: str) -> StoredTensor:
        """Raises KeyError for a name that is not in `shapes`."""
        return self.tensors[name]

    def copied_tensor(self, name: str) -> StoredTensor:
        """The same, but `load`, until `close()`, reads the file anew and raises ModelFileError if it was truncated."""
        file, start, end = self._places[name]
        tensor = self.tensors[name]
        return StoredTensor(tensor.shape, tensor.type, partial(file.read, start, end))

    @property
    def paths(self) -> list[Path]:
        """Of all parts, in no order."""
        return [file.path for file in self._files]

    def metadata_entry(self, key: str) -> bytes:
        """Name, type and value of a key in `config`, as they stand in the file: Python's numbers forget their types."""
        file, start, end = self._spans[key]
        return file.read(start, end).tobytes()

    def release_pages(self) -> None:
        """Give the pages of the mapping back to the system; a later look at a tensor reads them from the file again."""
        for file in self._files:
            file.release_pages()

    def close(self) -> None:
        self.tensors = {}
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    metadata: dict[str, MetaValue]
    tensors: dict[str, StoredTensor]
    spans: dict[str, _Span]  # where each metadata entry stands
    places: dict[str, _Span]  # and the bytes of each tensor


def _open_parts(path: Path, files: list[MappedFile]) -> list[_Part]:
    """The parts of the model in order; every opened file is appended to `files`, of a failed attempt too."""

    def read(path: Path) -> _Part:
        files.append(MappedFile(path))
        return _Header(files[-1]).read()

    given = read(path)
    count = given.metadata.get("split.count", 1)
    if type(count) is not int or not 1 <= count <= MAX_PARTS:
        raise ModelFileError(f"{path} has split.count {count!r}; a model has 1 to {MAX_PARTS:,} parts")
    if count == 1:
        return [given]
    paths = split_paths(path)
    if len(paths) != count:
        wanted = f"NAME-00001-of-{count:05}.gguf"
        raise ModelFileError(f"{path} is one of {count} parts of a model: name the files {wanted} and so on again")
    missing = next((part for part in paths if not part.exists()), None)
    if missing is not None:
        raise ModelFileError(f"{path} is one of {count} parts of a model, and {missing} is missing: get this one too")
    parts = [given if part == path else read(part) for part in paths]
    for number, part in enumerate(parts):
        found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if found != (number, count):
            raise ModelFileError(
                f"{part.path} has split.no {found[0]!r} and split.count {found[1]!r} instead of {number} and {count}: "
                "it belongs to another model or place"
            )
    return parts


def split_paths(path: Path) -> list[Path]:
    """The files of a split model by the name of one of them, whether they are there or not; a plain name alone."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return [path]
    return [path.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf") for i in range(int(match[3]))]


def _stored(shape: tuple[int, ...], kind: WeightType, data: NDArray[np.uint8]) -> StoredTensor:
    """`load` gives a read-only view of the file, [num_bytes]."""
    return StoredTensor(shape, kind, lambda: data)


class _Header:
    """A cursor over the header of one file."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._path = file.path
        self._mapping = file.mapping
        self._size = file.size
        self._end = min(self._size, MAX_HEADER_BYTES)
        self._at = 0
        self._items = 0

    def read(self) -> _Part:
        if self._mapping[:4] != b"GGUF":
            raise self._error(f"is not a GGUF file: it begins with {self._mapping[:4]!r} instead of b'GGUF'")
        self._at = 4
        version = self._u32("the version")
        if version & 0xFFFF == 0 and version:
            raise self._error("is a big-endian GGUF file: convert it to little-endian")
        if version not in SUPPORTED_VERSIONS:
            supported = " and ".join(map(str, SUPPORTED_VERSIONS))
            raise self._error(f"has GGUF version {version}; versions {supported} are supported: convert it again")
        num_tensors = self._u64("the number of tensors")
        num_keys = self._u64("the number of metadata keys")
        self._check_count(num_keys, _MIN_KEY_BYTES, "metadata keys")
        metadata: dict[str, MetaValue] = {}
        spans: dict[str, _Span] = {}
        for _ in range(num_keys):
            start = self._at
            key = self._name("a metadata key")
            if key in metadata:
                raise self._error(f"has the metadata key {key!r} twice")
            metadata[key] = self._value(self._u32(f"the type of {key!r}"), f"the metadata value {key!r}", depth=0)
            spans[key] = (self._file, start, self._at)
        self._check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        tensors, places = self._tensors(num_tensors, metadata)
        return _Part(self._path, metadata, tensors, spans, places)

    def _tensors(self, count: int, metadata: dict[str, MetaValue]) -> tuple[dict[str, StoredTensor], dict[str, _Span]]:
        entries: dict[str, tuple[tuple[int, ...], WeightType, int]] = {}  # shape, type, offset in the data section
        for _ in range(count):
            name = self._name("a tensor's name")
            if name in entries:
                raise self._error(f"has the tensor {name!r} twice")
            entries[name] = self._tensor_entry(name)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment & alignment - 1:
            raise self._error(f"has general.alignment {alignment!r}; it must be a power of two")
        data_start = -(-self._at // alignment) * alignment

        spans: list[tuple[int, int, str]] = []  # first byte, byte after the last, tensor
        for name, (shape, kind, offset) in entries.items():
            if offset % alignment:
                raise self._error(f"has the tensor {name!r} at offset {offset}, not a multiple of {alignment}")
            start = data_start + offset
            end = start + prod(shape[:-1]) * row_bytes(kind, shape[-1])
            if end > self._size:
                place = f"the bytes {start:,} to {end:,}, but the file has {self._size:,}"
                raise self._error(f"is truncated: the tensor {name!r} takes {place}")
            spans.append((start, end, name))
        for (_, end, name), (start, _, other) in itertools.pairwise(sorted(spans)):
            if start < end:
                raise self._error(f"has the tensors {name!r} and {other!r} overlapping at byte {start:,}")
        tensors = {name: _stored(*entries[name][:2], self._file.view(start, end)) for start, end, name in spans}
        return tensors, {name: (self._file, start, end) for start, end, name in spans}

    def _tensor_entry(self, name: str) -> tuple[tuple[int, ...], WeightType, int]:
        num_dims = self._u32(f"the dimensions of {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"has the tensor {name!r} with {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [self._u64(f"the dimensions of {name!r}") for _ in range(num_dims)]
        number = self._u32(f"the type of {name!r}")
        offset = self._u64(f"the offset of {name!r}")
        if number not in GGML_TYPES:
            raise self._error(
                f"has the tensor {name!r} of type {_OTHER_TYPES.get(number, 'unknown')} ({number}); the supported types"
                f" are {', '.join(t.name for t in GGML_TYPES)}: quantize the model to one of these"
            )
        kind = WeightType(number)
        if min(dims) < 1 or max(dims) > self._size * FORMATS[kind].block_length:
            raise self._error(f"has the tensor {name!r} with impossible dimensions {dims}")
        if dims[0] % FORMATS[kind].block_length:
            raise self._error(
                f"has the tensor {name!r} with rows of {dims[0]} elements;"
                f" {kind.name} needs a multiple of {FORMATS[kind].block_length}"
            )
        return tuple(reversed(dims)), kind, offset

    def _value(self, kind: int, what: str, depth: int) -> MetaValue:
        if kind == _STRING:
            return self._strings(1, what)[0]
        if kind == _ARRAY:
            return self._array(what, depth + 1)
        scalar = _SCALAR_STRUCTS.get(kind)
        if scalar is None:
            raise self._error(f"has {what} of the unknown type {kind}")
        value: int | float = self._unpack(scalar, what)
        return self._bool(value, what) if kind == _BOOL else value

    def _array(self, what: str, depth: int) -> list[MetaValue]:
        if depth > MAX_ARRAY_DEPTH:
            raise self._error(f"has arrays nested more than {MAX_ARRAY_DEPTH} deep in {what}")
        kind, count = self._u32(what), self._u64(what)
        if kind not in _MIN_BYTES:
            raise self._error(f"has {what} with elements of the unknown type {kind}")
        self._check_count(count, _MIN_BYTES[kind], f"elements in {what}")
        if kind == _STRING:
            return list(self._strings(count, what))
        if kind == _ARRAY:
            return [self._array(what, depth + 1) for _ in range(count)]
        start = self._at
        self._at += count * _MIN_BYTES[kind]
        numbers: list[MetaValue] = np.frombuffer(self._mapping[start : self._at], _SCALARS[kind]).tolist()
        return [self._bool(n, what) for n in numbers] if kind == _BOOL else numbers

    def _bool(self, value: Any, what: str) -> bool:
        if value not in (0, 1):
            raise self._error(f"has {what} with the byte {value} as a truth value; it must be 0 or 1")
        return bool(value)

    def _strings(self, count: int, what: str) -> list[str]:
        """One tight loop: a vocabulary and its merges are 100,000 strings and more, read at every start."""
        mapping, at, limit, length_at = self._mapping, self._at, self._end, _U64.unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = at + 8
            if start > limit:
                raise self._too_short(what)
            at = start + length_at(mapping, at)[0]
            if at > limit:
                raise self._too_short(what)
            strings.append(mapping[start:at].decode("utf-8", "surrogateescape"))
        self._at = at
        return strings

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if length > MAX_NAME_BYTES:
            raise self._error(f"has {what} of {length:,} bytes; the limit is {MAX_NAME_BYTES:,}")
        if self._at + length > self._end:
            raise self._too_short(what)
        raw = self._mapping[self._at : self._at + length]
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"has {what} that is not UTF-8: {raw[:40]!r}") from None
        self._at += length
        return name

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        """A count is believed only if its items could be in the rest of the file."""
        left = self._end - self._at
        if count * min_bytes > left:
            raise self._error(f"is truncated or damaged: {count:,} {what} cannot be in the {left:,} bytes that follow")
        self._items += count
        if self._items > MAX_ITEMS:
            raise self._error(f"has more than {MAX_ITEMS:,} header entries with {count:,} {what}: the file is damaged")

    def _u32(self, what: str) -> int:
        return int(self._unpack(_U32, what))

    def _u64(self, what: str) -> int:
        return int(self._unpack(_U64, what))

    def _unpack(self, form: struct.Struct, what: str) -> Any:
        if self._at + form.size > self._end:
            raise self._too_short(what)
        value = form.unpack_from(self._mapping, self._at)[0]
        self._at += form.size
        return value

    def _too_short(self, what: str) -> ModelFileError:
        if self._end < self._size:
            return self._error(f"has a header of more than {MAX_HEADER_BYTES:,} bytes: {what} is damaged")
        return self._error(f"is truncated: {what} goes beyond the file's end at byte {self._size:,}")

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._path} {problem} (header position: byte {self._at:,})")
