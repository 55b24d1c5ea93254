"""Measures every weight format: bits, accuracy and speed, of the built-in model and of one product alone.

    python bench/formats.py [--folder DIR] [--part accuracy|speed|products] [--only NAME ...] [--threads N]

The built-in model in float32 is the original. It is written as each type of `octavo quantize`, and packed in memory as
Hugging Face checkpoints have it; then its logits on tests/data/essay.txt are compared with the original's (float32
activations and cache), and steps are timed. Since its weights come from a 4-bit file, and how well their grid meets
another one says little about weights that have none, accuracy is measured on a second original too: each weight of it
lies at random in the interval that was rounded to the file's value.

Prints tables for docs/model_files.md. Knows the native part only: no engine, no sampling. With --folder the files that
it writes are kept and used again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu.backend import CpuModel, available_threads, create_executor
from octavo.backends.cpu.lowering import NATURAL_STORAGE
from octavo.core.records import KVGroup
from octavo.engine.loader import load_model
from octavo.graph.builder import GraphBuilder
from octavo.graph.schema import Embed, Linear, RmsNorm, Weight
from octavo.quantization.encode import ENCODERS, encode, encode_int8, int8_row_scales
from octavo.quantization.formats import FORMATS, WeightType, dequantize, row_bytes
from octavo.quantization.stored_tensor import StoredTensor
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.weights.builtin import INSTALL_HINT, find_builtin_model
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_quantize import MIXES, mix_of, quantize_gguf

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
T = WeightType

ESSAY = Path(__file__).parent.parent / "tests" / "data" / "essay.txt"
POSITIONS = 2048
LOGITS_AT_ONCE = 128
PREFILL = 512  # tokens in one step
PROMPT, STEPS = 128, 4  # tokens before and while decoding is timed
SECONDS, LEAST_RUNS, PAUSE = 3.0, 5, 0.02  # of each timing
BLOCK_SIZE, BLOCKS = 16, POSITIONS // 16

GPTQ_GROUP = 64  # 128 is more usual, but no divisor of the model's 576
IN_MEMORY = {"int8": T.INT8, "fp8_e4m3": T.FP8_E4M3, "u8": T.U8, "u4": T.U4}

MATRICES, WIDTH, STRIP = 12, 4096, 256  # of a product alone: 201 million weights, so that no cache holds them


# ---- formats that `octavo quantize` does not write ----


def stored(values: F32, kind: WeightType) -> StoredTensor:
    """values [rows, n] in the format `kind`. IQ4_XS has no encoder: its blocks are random."""
    scales: F32 | None = None
    if kind in ENCODERS:
        data = encode(values, kind)
    elif kind is T.INT8:
        data, scales = encode_int8(values), int8_row_scales(values)
    elif kind is T.FP8_E4M3:
        scales = np.abs(values).max(axis=1) / np.float32(448)
        data = nearest_e4m3(values / scales[:, None])
    elif kind is T.FP8_E4M3_BLOCK:
        blocks = values.reshape(-1, FORMATS[kind].block_length)
        d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(448)
        data = np.concatenate([d.view(np.uint8), nearest_e4m3(blocks / d)], axis=1)
    elif kind in (T.U4, T.U8):
        data = with_zero_point(values, kind)
    else:
        assert kind is T.IQ4_XS
        size = len(values) * row_bytes(kind, values.shape[1])
        data = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
        data.reshape(-1, FORMATS[kind].block_bytes)[:, :2] = np.array([2.0**-14], "<f2").view(np.uint8)
    flat, factors = data.reshape(-1), scales
    return StoredTensor(values.shape, kind, lambda: flat, None if factors is None else lambda: factors)


def nearest_e4m3(x: F32) -> U8:
    """The nearest of the 253 numbers, of the same shape; |x| <= 448."""
    numbers = dequantize(np.arange(127, dtype=np.uint8), T.FP8_E4M3, (127,))  # those that are not negative, ascending
    codes = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.abs(x)).astype(np.uint8)
    return codes | np.signbit(x).astype(np.uint8) << np.uint8(7)


def with_zero_point(x: F32, kind: WeightType) -> U8:
    """U4 or U8 with a scale and a zero point for each GPTQ_GROUP weights, by rounding: GPTQ would choose codes by the
    errors that they cause on a text.
    """
    steps = np.float32(15 if kind is T.U4 else 255)
    groups = x.reshape(-1, GPTQ_GROUP)
    low = np.minimum(groups.min(axis=1, keepdims=True), 0)
    d = ((np.maximum(groups.max(axis=1, keepdims=True), 0) - low) / steps).astype(np.float16)
    scale = np.maximum(d.astype(np.float32), np.float32(2.0**-24))
    zero = np.clip(np.rint(-low / scale), 0, steps)
    codes = np.clip(np.rint(groups / scale) + zero, 0, steps).astype(np.uint8).reshape(-1, 32)
    if kind is T.U4:
        codes = codes[:, :16] | codes[:, 16:] << np.uint8(4)
    head = np.concatenate([d.view(np.uint8), zero.astype(np.uint8), np.zeros_like(zero, np.uint8)], axis=1)
    return np.concatenate([np.repeat(head, GPTQ_GROUP // 32, axis=0), codes], axis=1)


# ---- the built-in model in all of them ----


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens (or GB, or GOP) a second in each run. The best run counts: others' work can only slow one down."""

    rates: list[float]

    @property
    def best(self) -> float:
        return max(self.rates)

    def __str__(self) -> str:
        digits = 0 if self.best >= 100 else 1
        return f"{self.best:,.{digits}f} (median of {len(self.rates)}: {statistics.median(self.rates):,.{digits}f})"


class Model:
    """The model in one of the formats, with one sequence that can begin again at any position."""

    def __init__(self, path: Path, kind: WeightType | None, threads: int, *, exact: bool = False) -> None:
        """kind: of the layers' matrices, None for that of the file. exact: float32 activations and cache."""
        with GGUFFile.open(path) as file:
            loaded = load_model(file, POSITIONS)
            tensors = dict(loaded.tensors)
            if kind is not None:
                for name, t in tensors.items():
                    if len(t.shape) > 1:
                        tensors[name] = stored(t.values(), T.Q8_0 if name == "token_embd.weight" else kind)
            model = CpuModel(
                loaded.model.graph,
                tensors,
                create_executor(threads=threads),
                float_activations=exact,
                max_tokens=PREFILL,
                max_sequences=LOGITS_AT_ONCE,
            )
            model.pack()
            self.num_weights = sum(map(prod, file.shapes.values()))
        self._threads, self.weight_bytes = threads, model.weight_bytes
        self.shares = Counter[str]()
        for t in tensors.values():
            if len(t.shape) > 1:
                self.shares[t.type.name] += prod(t.shape)
        self._program = model.allocate(BLOCKS, BLOCK_SIZE, "float32" if exact else "bfloat16")
        self._table = [np.arange(BLOCKS, dtype=np.int32)[None]]

    def run(self, tokens: NDArray[np.int32], first: int, rows: NDArray[np.int32]) -> None:
        span = np.array([0, len(tokens)], np.int32)
        self._program.run(tokens, span, np.array([first], np.int32), self._table, rows)

    def log_probabilities(self, tokens: NDArray[np.int32]) -> Iterator[NDArray[np.float64]]:
        """Of each next token: [LOGITS_AT_ONCE, vocab_size] after [LOGITS_AT_ONCE, vocab_size]."""
        for first in range(0, len(tokens), LOGITS_AT_ONCE):
            part = tokens[first : first + LOGITS_AT_ONCE]
            self.run(part, first, np.arange(len(part), dtype=np.int32))
            logits = self._program.read("logits").astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            yield logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def decode(self, tokens: NDArray[np.int32]) -> Timed:
        """Tokens a second of one sequence, from position PROMPT on."""
        row = np.zeros(1, np.int32)
        self.run(tokens[:PROMPT], 0, row)

        def steps() -> None:
            for at in range(PROMPT, PROMPT + STEPS):
                self.run(tokens[at : at + 1], at, row)

        return timed(steps, STEPS, self._threads)

    def prefill(self, tokens: NDArray[np.int32]) -> Timed:
        row = np.array([PREFILL - 1], np.int32)
        return timed(lambda: self.run(tokens[:PREFILL], 0, row), PREFILL, self._threads)


def timed(work: Callable[[], None], amount: float, threads: int) -> Timed:
    """Short runs for some seconds, with pauses in which the machine's other processes have their turn.

    A single thread's own time is counted, so that on a busy machine the turns of others are left out.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    work()  # warm
    rates: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(rates) < LEAST_RUNS or time.perf_counter() < end:
        time.sleep(PAUSE)
        begin = clock()
        work()
        rates.append(amount / (clock() - begin))
    return Timed(rates)


class Originals:
    """One of the two originals in all types; files are written when they are needed."""

    def __init__(self, folder: Path, *, spread: bool = False) -> None:
        self._folder, self._spread = folder / "spread" if spread else folder, spread

    def file(self, name: str) -> Path:
        """The model as a GGUF of that type."""
        path = self._folder / f"{name}.gguf"
        if path.exists():
            return path
        self._folder.mkdir(parents=True, exist_ok=True)
        source = find_builtin_model() if name == "f32" else self.file("f32")
        assert source is not None, f"the built-in model is needed: {INSTALL_HINT}"
        with GGUFFile.open(source) as file:
            if name == "f32" and self._spread:
                file.tensors = {name: spread(tensor, i) for i, (name, tensor) in enumerate(file.tensors.items())}
            quantize_gguf(file, path, mix_of(name), lambda name, tensor: None)
        return path

    def open(self, name: str, threads: int) -> Model:
        if name in IN_MEMORY:
            return Model(self.file("f32"), IN_MEMORY[name], threads)
        return Model(self.file(name), None, threads)

    def exact(self, threads: int) -> Model:
        return Model(self.file("f32"), None, threads, exact=True)


def spread(tensor: StoredTensor, seed: int) -> StoredTensor:
    """As float32; the built-in model's Q4_1 and Q8_0 begin with the float16 distance of their grid."""
    if tensor.type not in (T.Q4_1, T.Q8_0):
        return tensor

    def load() -> U8:
        form = FORMATS[tensor.type]
        blocks = tensor.load().reshape(-1, form.block_bytes)
        distance = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        shift = np.random.default_rng(seed).random((len(blocks), form.block_length), np.float32) - np.float32(0.5)
        return (form.decode(blocks) + shift * distance).view(np.uint8).reshape(-1)

    return StoredTensor(tensor.shape, T.F32, load)


class Divergence:
    """How far a model's next-token distributions are from the original's."""

    def __init__(self, originals: Originals, tokens: NDArray[np.int32], threads: int) -> None:
        self._tokens = tokens
        self._original = [part.astype(np.float32) for part in originals.exact(threads).log_probabilities(tokens)]

    def of(self, model: Model) -> tuple[str, str]:
        """(mean KL in nats, share of positions with the same first token)"""
        kl, same = 0.0, 0
        for theirs, ours in zip(self._original, model.log_probabilities(self._tokens), strict=True):
            exact = theirs.astype(np.float64)
            kl += float((np.exp(exact) * (exact - ours)).sum())
            same += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        return f"{kl / len(self._tokens):.5f}", f"{same / len(self._tokens):.1%}"


def report_accuracy(folder: Path, names: list[str], tokens: NDArray[np.int32], threads: int) -> None:
    as_filed, spread_out = Originals(folder), Originals(folder, spread=True)
    from_filed, from_spread = Divergence(as_filed, tokens, threads), Divergence(spread_out, tokens, threads)
    row(
        "type", "its matrices", "bits in the file", "bits in memory", "KL, nats", "top-1", "KL, spread", "top-1, spread"
    )
    for name in names:
        model = as_filed.open(name, threads)
        matrices = ", ".join(f"{kind} {n / model.shares.total():.0%}" for kind, n in model.shares.most_common())
        in_file = "" if name in IN_MEMORY else f"{8 * as_filed.file(name).stat().st_size / model.num_weights:.2f}"
        in_memory = f"{8 * model.weight_bytes / model.num_weights:.2f}"
        figures = from_filed.of(model)
        del model
        row(name, matrices, in_file, in_memory, *figures, *from_spread.of(spread_out.open(name, threads)))


def report_speed(folder: Path, names: list[str], tokens: NDArray[np.int32], threads: int) -> None:
    row("type", "MB of weights", "decode, tok/s", "GB/s", f"prefill of {PREFILL}, tok/s")
    originals = Originals(folder)
    for name in names:
        model = originals.open(name, threads)
        decode, megabytes = model.decode(tokens), model.weight_bytes / 1e6
        per_second = decode.best * megabytes / 1e3
        row(name, f"{megabytes:.1f}", str(decode), f"{per_second:.1f}", str(model.prefill(tokens)))


# ---- one product alone ----


class Products:
    """MATRICES products one after the other, each with a matrix of WIDTH x WIDTH."""

    def __init__(self, kind: WeightType, threads: int) -> None:
        values = (np.random.default_rng(0).normal(size=(STRIP, WIDTH)) / WIDTH**0.5).astype(np.float32)
        tensors = {"rows": stored(np.ones((PREFILL, WIDTH), np.float32), T.F32), "norm": vector_of_ones(WIDTH)}
        matrix = repeated(stored(values, kind), WIDTH // STRIP)
        g = GraphBuilder()
        x = g(Embed(Weight("rows", (PREFILL, WIDTH))))
        for i in range(MATRICES):
            tensors[f"{i}"] = matrix
            x = g(Linear(x, (Weight(f"{i}", matrix.shape),), (None,)))
        x = g(RmsNorm(x, Weight("norm", (WIDTH,)), 1e-6))  # a product that is an output would be one of logits
        graph = g.build({"out": x}, (KVGroup("none", 1, 1, 32),))
        executor = create_executor(threads=threads)
        model = CpuModel(graph, tensors, executor, max_tokens=PREFILL, max_sequences=1)
        model.pack()
        self.num_weights = MATRICES * WIDTH * WIDTH
        self.weight_bytes = model.weight_bytes - 4 * (PREFILL + 1) * WIDTH
        self._program = model.allocate(1, BLOCK_SIZE, "bfloat16")

    def run(self, rows: int) -> None:
        token_ids, span = np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32)
        zero, table = np.zeros(1, np.int32), np.zeros((1, PREFILL // BLOCK_SIZE), np.int32)
        self._program.run(token_ids, span, zero, [table], zero)


def vector_of_ones(width: int) -> StoredTensor:
    return StoredTensor((width,), T.F32, lambda: np.ones(width, np.float32).view(np.uint8))


def repeated(strip: StoredTensor, times: int) -> StoredTensor:
    """The same rows several times: encoding as many different ones would take minutes."""
    data, of_strip = np.tile(strip.load(), times), strip.row_scales
    scales = None if of_strip is None else lambda: np.tile(of_strip(), times)
    return StoredTensor((strip.shape[0] * times, strip.shape[1]), strip.type, lambda: data, scales)


def relative_error(kind: WeightType) -> str:
    """RMS of the error over RMS of the values, Student's t with 6 degrees of freedom."""
    if kind is T.IQ4_XS:
        return ""
    values = (np.random.default_rng(0).standard_t(6, size=(64, 2048)) * 0.02).astype(np.float32)
    error = stored(values, kind).values() - values
    return f"{float(np.sqrt((error**2).mean() / (values**2).mean())):.4f}"


def report_products(threads: int) -> None:
    row("format", "bits", "bits in memory", "relative error", "1 row, GB/s", f"{PREFILL} rows, GOP/s")
    for kind in NATURAL_STORAGE:
        products = Products(kind, threads)
        form = FORMATS[kind]
        one = timed(partial(products.run, 1), products.weight_bytes / 1e9, threads)
        many = timed(partial(products.run, PREFILL), 2e-9 * products.num_weights * PREFILL, threads)
        row(
            kind.name,
            f"{8 * form.block_bytes / form.block_length:.2f}",
            f"{8 * products.weight_bytes / products.num_weights:.2f}",
            relative_error(kind),
            str(one),
            str(many),
        )


def row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure every weight format; prints tables.")
    parser.add_argument("--folder", type=Path, help="keep the files of the model in all types here (5 GB)")
    parser.add_argument("--part", choices=("accuracy", "speed", "products"), help="only this table")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=(*MIXES, *IN_MEMORY), help="only these types")
    parser.add_argument(
        "--threads", type=int, default=available_threads(), help="1 for figures that load does not change"
    )
    args = parser.parse_args()
    names = args.only or [*MIXES, *IN_MEMORY]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        with GGUFFile.open(Originals(folder).file("f32")) as file:
            ids = Tokenizer.from_gguf(file.metadata).encode(ESSAY.read_text())
        tokens = np.array(ids[:POSITIONS], np.int32)
        assert len(tokens) == POSITIONS, f"{ESSAY} has {len(tokens)} tokens"
        if args.part in (None, "accuracy"):
            report_accuracy(folder, names, tokens, args.threads)
        if args.part in (None, "speed"):
            report_speed(folder, names, tokens, args.threads)
    if args.part in (None, "products"):
        report_products(args.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
