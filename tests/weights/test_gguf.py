"""The GGUF reader against the `gguf` package's writer, and against files that are wrong in every way we imagined."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.core.errors import ModelFileError
from octavo.quantization.formats import WeightType, dequantize
from octavo.weights.gguf import MAX_ITEMS, GGUFFile

TENSORS = {
    "embed": (WeightType.Q8_0, (3, 64)),
    "norm": (WeightType.F32, (64,)),
    "wide": (WeightType.F16, (2, 3, 4)),
    "q4": (WeightType.Q4_1, (5, 32)),
}


def write_model(path: Path, *, alignment: int | None = None) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "Grüße, 世界")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["a", "", "Ġb"])
    writer.add_array("nested", [[1, 2], [3]])
    rng = np.random.default_rng(0)
    expected: dict[str, np.ndarray] = {}
    for name, (kind, shape) in TENSORS.items():
        packed = gguf.quantize(rng.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType(kind))
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType(kind))
        expected[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_reads_what_the_gguf_package_writes(path: Path, alignment: int | None) -> None:
    expected = write_model(path, alignment=alignment)
    with GGUFFile.open(path) as file:
        meta = file.metadata
        assert meta["general.architecture"] == "llama"
        assert [meta[k] for k in ("u8", "i8", "u16", "i16")] == [200, -3, 60000, -30000]
        assert [meta[k] for k in ("u32", "i32")] == [2**32 - 1, -(2**31)]
        assert [meta[k] for k in ("u64", "i64")] == [2**64 - 1, -(2**63)]
        assert (meta["f32"], meta["f64"], meta["yes"], meta["no"]) == (0.5, 0.1, True, False)
        assert meta["text"] == "Grüße, 世界"
        assert (meta["ints"], meta["floats"], meta["bools"]) == ([1, -2, 3], [0.5, 1.5], [True, False])
        assert (meta["strings"], meta["nested"]) == (["a", "", "Ġb"], [[1, 2], [3]])
        assert list(file.tensors) == list(TENSORS)
        for name, found in file.tensors.items():
            assert (found.type, found.shape) == TENSORS[name]
            assert found.load().dtype == np.uint8
            assert not found.load().flags.writeable
            np.testing.assert_array_equal(dequantize(found.load(), found.type, found.shape), expected[name])


def test_version_2_has_the_same_layout(path: Path) -> None:
    write_model(path)
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    assert list(GGUFFile.open(path).tensors) == list(TENSORS)


def test_data_outlives_close_and_released_pages_come_back(path: Path) -> None:
    write_model(path)
    file = GGUFFile.open(path)
    data = file.tensors["embed"].load()
    before = data.copy()
    file.release_pages()
    np.testing.assert_array_equal(data, before)
    file.close()
    file.close()
    file.release_pages()
    np.testing.assert_array_equal(data, before)
    assert not file.tensors


def test_strings_that_are_not_utf8_keep_their_bytes(path: Path) -> None:
    path.write_bytes(header(0, 1) + key("token", 8, string(b"\xff\xfea")))
    value = GGUFFile.open(path).metadata["token"]
    assert isinstance(value, str)
    assert value.encode("utf-8", "surrogateescape") == b"\xff\xfea"


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQI", 4, 1, 7)


ONE = struct.pack("<I", 1)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "short magic": (b"GG", "not a GGUF file"),
    "old version": (header(0, 0, version=1), "version 1; versions 2 and 3"),
    "new version": (header(0, 0, version=4), "version 4; versions 2 and 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "absurd key count": (header(0, 2**63), "9,223,372,036,854,775,808 metadata keys"),
    "absurd tensor count": (header(2**40, 0) + bytes(100), "1,099,511,627,776 tensors"),
    "absurd key length": (header(0, 1) + struct.pack("<Q", 2**62) + bytes(20), "limit is 65,535"),
    "absurd string length": (header(0, 1) + key("k", 8, struct.pack("<Q", 2**62)), "truncated"),
    "absurd array count": (header(0, 1) + key("k", 9, struct.pack("<IQ", 8, 2**61)), "elements in"),
    "key twice": (header(0, 2) + key("k", 4, ONE) * 2, "metadata key 'k' twice"),
    "unknown type": (header(0, 1) + key("k", 13, bytes(8)), "unknown type 13"),
    "unknown element type": (header(0, 1) + key("k", 9, struct.pack("<IQ", 77, 1) + bytes(8)), "unknown type 77"),
    "deep nesting": (header(0, 1) + key("k", 9, nested(5)), "nested more than 4"),
    "key not utf-8": (header(0, 1) + key(b"\xff\xff", 4, ONE), "not UTF-8"),
    "neither true nor false": (header(0, 1) + key("k", 7, b"\x02"), "truth value"),
    "neither true nor false in array": (header(0, 1) + key("k", 9, struct.pack("<IQ", 7, 1) + b"\x02"), "truth value"),
    "tensor type": (header(1, 0) + tensor("w", [256], kind=15) + bytes(500), "'w' of type Q8_K (15).*Q4_0"),
    "type of our own": (header(1, 0) + tensor("w", [256], kind=1000) + bytes(500), "unknown (1000)"),
    "unknown tensor type": (header(1, 0) + tensor("w", [256], kind=99) + bytes(500), "unknown (99)"),
    "tensor twice": (header(2, 0) + tensor("w", [8]) * 2 + bytes(500), "tensor 'w' twice"),
    "no dimensions": (header(1, 0) + tensor("w", []) + bytes(500), "0 dimensions"),
    "many dimensions": (header(1, 0) + tensor("w", [1] * 5) + bytes(500), "5 dimensions"),
    "zero dimension": (header(1, 0) + tensor("w", [8, 0]) + bytes(500), "impossible dimensions"),
    "absurd dimension": (header(1, 0) + tensor("w", [2**63, 2**63, 2**63]) + bytes(500), "impossible dimensions"),
    "large product": (header(1, 0) + tensor("w", [400, 400, 400]) + bytes(500), "truncated: the tensor 'w'"),
    "row not whole blocks": (header(1, 0) + tensor("w", [33], kind=8) + bytes(500), "Q8_0 needs a multiple of 32"),
    "alignment": (header(0, 1) + key("general.alignment", 4, struct.pack("<I", 24)), "power of two"),
    "alignment zero": (header(0, 1) + key("general.alignment", 4, bytes(4)), "power of two"),
    "alignment text": (header(0, 1) + key("general.alignment", 8, string("x")), "power of two"),
    "offset not aligned": (header(1, 0) + tensor("w", [8], offset=8) + bytes(500), "multiple of 32"),
    "offset outside": (header(1, 0) + tensor("w", [8], offset=2**40) + bytes(500), "truncated: the tensor 'w'"),
    "overlap": (header(2, 0) + tensor("a", [16]) + tensor("b", [8], offset=32) + bytes(500), "'a' and 'b' overlap"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_says_what_is_wrong(path: Path, case: str) -> None:
    raw, message = MALFORMED[case]
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match=message.replace("(", r"\(").replace(")", r"\)")) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "missing.gguf", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("nul\0byte"), "null byte"),
    ]:
        with pytest.raises(ModelFileError, match=message):
            GGUFFile.open(path)


def opens_or_is_refused(path: Path, raw: bytes) -> bool:
    """True if the bytes open as a model. Anything but success and ModelFileError fails the test."""
    path.write_bytes(raw)
    try:
        with GGUFFile.open(path) as file:
            for found in file.tensors.values():
                dequantize(found.load(), found.type, found.shape)
        return True
    except ModelFileError:
        return False


def test_truncation_at_every_byte_is_refused(path: Path) -> None:
    write_model(path)
    raw = path.read_bytes()
    padding = -5 * 20 % 32  # after the last tensor, five rows of one Q4_1 block
    for length in range(len(raw) + 1):
        assert opens_or_is_refused(path, raw[:length]) == (length >= len(raw) - padding)


def test_random_corruption_never_crashes_or_hangs(path: Path) -> None:
    write_model(path)
    raw = path.read_bytes()
    rng = random.Random(5)
    extremes = [b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 2**31), struct.pack("<Q", 2**20)]
    changes: list[Callable[[bytearray, int], None]] = [
        lambda b, at: b.__setitem__(at, rng.randrange(256)),
        lambda b, at: b.__setitem__(slice(at, at + 8), rng.choice(extremes)),
        lambda b, at: b.__setitem__(slice(at, at + rng.randrange(1, 40)), b""),
        lambda b, at: b.__setitem__(slice(at, at), rng.randbytes(rng.randrange(1, 40))),
    ]
    opened = 0
    for _ in range(800):
        damaged = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            rng.choice(changes)(damaged, rng.randrange(len(damaged)))
        opened += opens_or_is_refused(path, bytes(damaged))
    assert 0 < opened < 700


def test_hostile_counts_in_a_huge_file_allocate_little(path: Path) -> None:
    # Sparse: 8 GiB of zeros that cost no disk. Each count would fit in the file.
    arrays = [(0, 2**32), (0, 2**27), (8, 2**29), (9, 2**28)]
    values = [key("k", 9, struct.pack("<IQ", kind, count)) for kind, count in arrays]
    for value in [*values, key("k", 8, struct.pack("<Q", 2**30))]:
        with path.open("wb") as file:
            file.write(header(0, 1) + value)
            file.truncate(2**33)
        tracemalloc.start()
        with pytest.raises(ModelFileError, match=r"cannot be in|more than"):
            GGUFFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20
    assert MAX_ITEMS < 2**23


def test_vocabulary_sized_arrays_are_read_quickly(path: Path) -> None:
    words = b"".join(string(f"token{i}") for i in range(150_000))
    path.write_bytes(header(0, 1) + key("tokens", 9, struct.pack("<IQ", 8, 150_000)) + words)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        file = GGUFFile.open(path)
        best = min(best, time.perf_counter() - start)
    tokens = file.metadata["tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 150_000
    assert tokens[-1] == "token149999"
    assert best < 0.5  # 0.06 s on an idle machine; the margin is for a busy one


def write_split(folder: Path, *, count: int = 3, **changes: object) -> list[Path]:
    """Parts of two tensors each. `changes`: metadata of the second part that is not as it should be."""
    paths = []
    for i in range(count):
        paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
        keys: dict[str, int] = {"split.no": i, "split.count": count, "split.tensors.count": 2 * count}
        names = [f"t{2 * i}", f"t{2 * i + 1}"]
        if i == 1:
            names[0] = str(changes.pop("name", names[0]))
            keys |= changes  # type: ignore[arg-type]
        raw = header(2, len(keys))
        raw += b"".join(key(name, 2, struct.pack("<H", value)) for name, value in keys.items())
        raw += tensor(names[0], [8]) + tensor(names[1], [8], offset=32)
        data = np.full(16, i, "<f4")
        paths[-1].write_bytes(raw + bytes(-len(raw) % 32) + data.tobytes())
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_all_parts_of_a_split_model_are_opened_whichever_is_named(tmp_path: Path, given: int) -> None:
    with GGUFFile.open(write_split(tmp_path)[given]) as file:
        assert list(file.shapes) == [f"t{i}" for i in range(6)]
        assert file.config["split.no"] == 0
        assert [file.tensor(f"t{i}").values()[0] for i in range(6)] == [0, 0, 1, 1, 2, 2]
        file.release_pages()


def test_a_missing_part_of_a_split_model_is_named(tmp_path: Path) -> None:
    first, second, _ = write_split(tmp_path)
    second.unlink()
    with pytest.raises(ModelFileError, match=r"one of 3 parts of a model, and .*m-00002-of-00003.gguf is missing"):
        GGUFFile.open(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.no": 2}, "m-00002-of-00003.gguf has split.no 2 and split.count 3 instead of 1 and 3"),
        ({"split.count": 4}, "split.no 1 and split.count 4 instead of 1 and 3"),
        ({"name": "t1"}, "m-00002-of-00003.gguf has the tensor 't1', as another part"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        GGUFFile.open(write_split(tmp_path, **changes)[0])


def test_a_split_model_with_other_names_or_another_number_of_tensors_is_refused(tmp_path: Path) -> None:
    first = write_split(tmp_path)[0]
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"name the files NAME-00001-of-00003.gguf"):
        GGUFFile.open(renamed)
    raw = renamed.read_bytes()
    at = raw.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    first.write_bytes(raw[:at] + struct.pack("<H", 7) + raw[at + 2 :])
    with pytest.raises(ModelFileError, match="have 6 tensors instead of 7"):
        GGUFFile.open(first)
    first.write_bytes(raw.replace(b"split.count\x02\0\0\0\x03\0", b"split.count\x02\0\0\0\0\0"))
    with pytest.raises(ModelFileError, match=r"split.count 0"):
        GGUFFile.open(first)
