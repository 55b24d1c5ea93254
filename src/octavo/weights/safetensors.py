"""A Hugging Face folder (config.json and safetensors files) as a checkpoint: numbers as the model's names have them.

The `safetensors` library checks each file when it is opened; tensors are views of the mapped bytes, which the library
cannot give for bfloat16 and float8. Knows nothing of architectures, and leaves packed matrices to `hf_quantization.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from octavo.core.errors import ModelFileError, shorten
from octavo.quantization.stored_tensor import StoredTensor
from octavo.weights.hf_quantization import plain_and_packed
from octavo.weights.mapped_file import MappedFile
from octavo.weights.raw_tensor import ITEM_BYTES, RawTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 1 << 26  # the index of a model of 100,000 tensors has 10 MB
MAX_HEADER_BYTES = 100_000_000  # as the library has it
MAX_TENSORS = 1 << 20


class HFCheckpoint:
    """A `Checkpoint` whose settings are config.json. Tensor data outlives `close()` while somebody holds it."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        files: list[MappedFile],
        tensors: Mapping[str, Callable[[], StoredTensor]],
        shapes: Mapping[str, tuple[int, ...]],
        warnings: list[str],
        quantized_by: str | None,
    ) -> None:
        self.path = path
        self.kind: Literal["gguf", "hf"] = "hf"
        self.config: Mapping[str, Any] = config
        self.shapes = shapes
        self.warnings = warnings
        self.quantized_by = quantized_by
        self._tensors = tensors
        self._files = files

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Read config.json and the headers of all files. Raises ModelFileError if something is missing or malformed."""
        folder = Path(folder)
        config = read_json(folder / "config.json")
        files: list[MappedFile] = []
        try:
            raw = _read_headers(folder, files)
            contents = plain_and_packed(folder, config, raw)
        except ModelFileError:
            for file in files:
                file.close()
            raise
        return cls(folder, config, files, contents.tensors, contents.shapes, contents.warnings, contents.quantized_by)

    def tensor(self, name: str) -> StoredTensor:
        """Raises KeyError for a name that is not in `shapes`, ModelFileError for a type that is not supported."""
        return self._tensors[name]()

    def release_pages(self) -> None:
        """Give the pages of the files back to the system; a later look reads them again."""
        for file in self._files:
            file.release_pages()

    def close(self) -> None:
        self._tensors = {}
        for file in self._files:
            file.close()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelFileError if there is none, or it is not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path} has {path.stat().st_size:,} bytes; the limit is {MAX_JSON_BYTES:,}")
        if not path.is_file():
            raise ModelFileError(f"{path} is not a regular file")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read {path} ({error.strerror}): copy or download the whole folder") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not JSON ({shorten(str(error))}): copy or download it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds {shorten(repr(value))}; it must be a JSON object")
    return value


def _read_headers(folder: Path, files: list[MappedFile]) -> dict[str, RawTensor]:
    """All tensors of the folder; every opened file is appended to `files`, of a failed attempt too."""
    paths, index = _model_files(folder)
    tensors: dict[str, RawTensor] = {}
    owner: dict[str, str] = {}
    for path in paths:
        files.append(MappedFile(path))
        for name, tensor in _read_header(files[-1]).items():
            if index.get(name, path.name) != path.name:
                continue  # the index says that another file's is meant
            if name in tensors:
                raise ModelFileError(f"{folder} has the tensor {name!r} in {owner[name]} and in {path.name}")
            tensors[name], owner[name] = tensor, path.name
    lost = next((name for name in index if name not in tensors), None)
    if lost is not None:
        raise ModelFileError(f"{folder / INDEX_FILE} says that {index[lost]} has the tensor {lost!r}, but it has not")
    return tensors


def _model_files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The safetensors files to read, and which of them has which tensor (nothing if there is only one)."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE], {}
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) == 1:
            return found, {}
        what = f"has {len(found)} safetensors files but no" if found else f"has neither {SINGLE_FILE} nor"
        raise ModelFileError(f"{folder} {what} {INDEX_FILE}: copy or download the whole folder")
    index = read_json(index_path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ModelFileError(f"{index_path} lacks a weight_map from tensors to files: copy or download it again")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{index_path} names the file {shorten(name)!r}; it must be a safetensors file beside")
    missing = next((name for name in names if not (folder / name).exists()), None)
    if missing is not None:
        raise ModelFileError(f"{folder} lacks {missing}, one of {len(names)} files that {INDEX_FILE} names: get it too")
    return [folder / name for name in names], index


def _read_header(file: MappedFile) -> dict[str, RawTensor]:
    """The tensors of one file by name. u64 length | JSON {name: {dtype, shape, data_offsets}} | data."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file.path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise ModelFileError(f"{file.path} is damaged ({shorten(str(error), 120)}): download it again") from None
    # The library has just accepted the file, and everything that a view depends on is checked once more.
    length = int.from_bytes(file.mapping[:8], "little")
    start = 8 + length
    if length > MAX_HEADER_BYTES or start > file.size:
        raise ModelFileError(f"{file.path} is damaged: its header has {length:,} bytes, the file {file.size:,}")
    try:
        header = json.loads(file.mapping[8:start])
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file.path} has a header that is not JSON ({shorten(str(error))})") from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ModelFileError(f"{file.path} has a header that is no JSON object of at most {MAX_TENSORS:,} tensors")
    header.pop("__metadata__", None)
    return {name: _raw_tensor(file, start, name, entry) for name, entry in header.items()}


def _raw_tensor(file: MappedFile, start: int, name: str, entry: Any) -> RawTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(end)]}:
            size = ITEM_BYTES.get(dtype)
            if size is None:
                supported = ", ".join(ITEM_BYTES)
                raise ModelFileError(f"{file.path}: tensor {name!r} has the type {dtype!r}; known are {supported}")
            fits = all(type(n) is int and n >= 0 for n in shape) and 0 <= first <= end <= file.size - start
            if fits and end - first == size * prod(shape):
                return RawTensor(name, tuple(shape) or (1,), dtype, file.view(start + first, start + end))
    raise ModelFileError(f"{file.path} has a damaged entry for the tensor {name!r}: {shorten(repr(entry), 120)}")
