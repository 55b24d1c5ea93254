"""`octavo quantize`, read back by the `gguf` package. How llama.cpp itself took the files: docs/model_files.md."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.cli.main import main
from octavo.cli.quantize import TYPES
from octavo.core.errors import ConfigError, ModelFileError
from octavo.engine.quantize import quantize_model
from octavo.quantization.encode import encode
from octavo.quantization.formats import WeightType
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_quantize import MIXES
from tests.tiny_models import TinyLlama, write_tiny_llama
from tests.weights.test_gguf import write_split

T = WeightType
SPEC = TinyLlama(hidden_size=256, intermediate_size=96, num_layers=8, tied_embeddings=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "tiny.gguf", SPEC)


def quantize(source: Path, target: Path, kind: str, *, force: bool = False) -> GGUFFile:
    quantize_model(str(source), str(target), kind, force=force, wrote=lambda *_: None)
    return GGUFFile.open(target)


@pytest.mark.parametrize("kind", MIXES)
def test_the_gguf_package_reads_what_was_written_with_all_metadata(source: Path, tmp_path: Path, kind: str) -> None:
    file = quantize(source, tmp_path / "out.gguf", kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "out.gguf")
    for name, entry in before.fields.items():
        if not name.startswith("GGUF."):
            assert after.fields[name].types == entry.types
            assert after.fields[name].contents() == entry.contents()
    assert after.fields["general.file_type"].contents() == MIXES[kind].file_type
    assert after.fields["general.quantization_version"].contents() == 2
    values = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in before.tensors}
    for t in after.tensors:
        assert t.tensor_type == int(file.tensor(t.name).type)
        np.testing.assert_array_equal(
            t.data.view(np.uint8).reshape(-1), encode(values[t.name], file.tensor(t.name).type)
        )


def test_a_mixed_type_gives_more_bits_to_what_llama_cpp_gives_more(source: Path, tmp_path: Path) -> None:
    file = quantize(source, tmp_path / "out.gguf", "q4_k_m")
    types = {name: tensor.type for name, tensor in file.tensors.items()}
    assert types["output.weight"] == T.Q6_K
    assert types["token_embd.weight"] == T.Q4_K
    assert types["output_norm.weight"] == types["blk.0.attn_norm.weight"] == T.F32
    assert [types[f"blk.{i}.ffn_gate.weight"] for i in range(8)] == [T.Q4_K] * 8
    # The first eighth, the last, and every third between.
    assert [i for i in range(8) if types[f"blk.{i}.attn_v.weight"] == T.Q6_K] == [0, 3, 6, 7]
    # Rows of 96 and 64 are not whole blocks of 256.
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(8)} == {T.Q8_0, T.Q5_0}
    assert types["blk.1.attn_output.weight"] == T.Q5_0


def test_the_embedding_of_a_tied_model_counts_as_the_output(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "in.gguf", TinyLlama(hidden_size=256))
    assert quantize(source, tmp_path / "out.gguf", "q4_k").tensor("token_embd.weight").type == T.Q6_K


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    with quantize(parts[0], tmp_path / "out.gguf", "q8_0") as file:
        assert not [key for key in file.config if key.startswith("split.")]
        assert [file.tensor(f"t{i}").values()[0] for i in range(6)] == [0, 0, 1, 1, 2, 2]


def test_packed_weights_are_quantized_again_with_a_warning(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(source), str(tmp_path / "q8.gguf"), "--type", "Q8_0"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith(f"{tmp_path / 'q8.gguf'}: ")
    assert captured.out.endswith(" bits a weight\n")
    assert main(["quantize", str(tmp_path / "q8.gguf"), str(tmp_path / "q4.gguf"), "--type", "q4_0"]) == 0
    assert "packed already (Q8_0)" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "q8.gguf"), str(tmp_path / "f16.gguf"), "--type", "f16"]) == 0
    assert capsys.readouterr().err == ""


def test_a_file_that_is_there_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"is there already.*--force"):
        quantize(source, out, "q8_0")
    assert out.read_bytes() == b"mine"
    assert quantize(source, out, "q8_0", force=True).tensor("output.weight").type == T.Q8_0
    assert list(tmp_path.iterdir()) == [out]


def test_what_cannot_be_done_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--type is 'q9'; it must be one of f32, f16.*q4_k_m"):
        quantize(source, tmp_path / "out.gguf", "q9")
    with pytest.raises(ConfigError, match="is a folder: give the path of the file"):
        quantize(source, tmp_path, "q8_0")
    with pytest.raises(ModelFileError, match=r"cannot write .*No such file or directory"):
        quantize(source, tmp_path / "gone" / "out.gguf", "q8_0")
    with pytest.raises(ModelFileError, match=r"cannot write .*name too long.*: name another place"):
        quantize(source, tmp_path / ("x" * 300), "q8_0")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no regular file"):  # a device, for one, must not become a file
        quantize(source, tmp_path / "pipe", "q8_0", force=True)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="IN must be a GGUF"):
        quantize(tmp_path / "hf", tmp_path / "out.gguf", "q8_0")


def test_a_weight_that_cannot_be_quantized_leaves_no_file(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "in.gguf", TinyLlama())
    raw = bytearray(source.read_bytes())
    raw[-4:] = np.float32(np.nan).tobytes()
    at = len(raw) - 64 * 4  # the last tensor is output_norm; before it lies the last matrix
    raw[at - 4 : at] = np.float32(np.nan).tobytes()
    source.write_bytes(raw)
    with pytest.raises(ModelFileError, match="cannot be quantized"):
        quantize(source, tmp_path / "out.gguf", "q8_0")
    assert list(tmp_path.iterdir()) == [source]


def test_a_write_that_fails_midway_leaves_no_file(source: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "octavo", "quantize", source, tmp_path / "out.gguf", "--type", "f16"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "cannot write" in result.stderr
    assert "File too large" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_type() -> None:
    assert tuple(MIXES) == TYPES


def test_a_model_is_not_written_over_a_file_of_itself(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match=r"is a file of IN .*choose another name"):
        quantize(source, tmp_path / "link.gguf", "q8_0", force=True)
    assert source.read_bytes() == before
    parts = write_split(tmp_path)
    with pytest.raises(ConfigError, match="is a file of IN"):
        quantize(parts[0], parts[1], "q8_0", force=True)


def test_a_source_that_is_truncated_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "in.gguf", SPEC)
    size = source.stat().st_size

    def truncate(*_: object) -> None:
        os.truncate(source, 8192)

    with pytest.raises(ModelFileError, match=rf"was truncated while it was read, from {size:,} bytes to 8,192"):
        quantize_model(str(source), str(tmp_path / "out.gguf"), "q8_0", force=False, wrote=truncate)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_part_and_is_said(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def interrupted(*_: object, wrote: Callable[[str, str, float], None], **__: object) -> None:
        quantize_model(
            str(source), str(tmp_path / "out.gguf"), "q8_0", force=False, wrote=lambda *_: os.kill(me, number)
        )

    me = os.getpid()
    before = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.engine.quantize.quantize_model", interrupted)
        assert main(["quantize", str(source), "out.gguf", "--type", "q8_0"]) == 128 + number
    assert capsys.readouterr().err == f"octavo: ended by {number.name}: out.gguf was not written\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


def test_parts_of_dead_processes_are_removed_and_those_of_living_ones_kept(source: Path, tmp_path: Path) -> None:
    dead, living, other = (tmp_path / f".{name}.part" for name in ("out.gguf.1", "out.gguf.2", "another.gguf.1"))
    for part in (dead, living, other):
        part.touch()
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        quantize(source, tmp_path / "out.gguf", "q8_0")
    assert sorted(tmp_path.iterdir()) == sorted([living, other, tmp_path / "out.gguf"])
