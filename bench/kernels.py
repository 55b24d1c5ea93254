"""Measures matrix products of one instruction set against what AVX2 can do on this machine, in the same run.

    python bench/kernels.py [--isa avx2] [--threads 2] [--types Q4_0,Q8_0]

A product is one Linear operation with four weights of [2048, 8192], so that a single row streams them from memory.
The limits come from avx2_limits.cpp beside this file: instructions on registers, and plain kernels over the same number
of weights. Knows backends and weight formats; knows nothing of models.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from octavo.backends.cpu.backend import CpuModel, create_executor
from octavo.core.records import KVGroup
from octavo.graph.builder import GraphBuilder
from octavo.graph.schema import Add, Embed, Linear, Weight
from octavo.quantization.encode import encode
from octavo.quantization.formats import WeightType
from octavo.weights.checkpoint import StoredTensor

WEIGHTS, OUT, IN = 4, 2048, 8192
ROWS = (1, 8, 512)  # as in avx2_limits.cpp
SOURCE = Path(__file__).with_name("avx2_limits.cpp")
FLAGS = ("-std=c++20", "-O3", "-mavx2", "-mfma", "-mf16c", "-pthread")
FLOATS = (WeightType.F32, WeightType.F16, WeightType.BF16)


def limits(threads: int) -> dict[tuple[str, int], float]:
    """(name, rows) -> 10^9 operations a second."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "limits")
        subprocess.run(["c++", *FLAGS, str(SOURCE), "-o", program], check=True)
        run = subprocess.run(
            [program, str(threads), str(WEIGHTS * OUT), str(IN)], check=True, capture_output=True, text=True
        )
    lines = [line.split() for line in run.stdout.splitlines()]
    return {(name, int(rows)): float(rate) for name, rows, rate in lines}


def rates(kind: WeightType, isa: str, threads: int) -> list[float]:
    """10^9 operations a second for each of ROWS, of processor time: the machine may be shared."""
    g = GraphBuilder()
    tensors = {}
    random = np.random.default_rng(0)

    def weight(name: str, n: int, k: int, as_type: WeightType) -> Weight:
        few = encode(random.normal(size=(16, k)).astype(np.float32), as_type)
        data = np.tile(few.reshape(-1), n // 16)
        tensors[name] = StoredTensor((n, k), as_type, lambda: data)
        return Weight(name, (n, k))

    x = g(Embed(weight("x", max(ROWS), IN, WeightType.F32)))
    weights = tuple(weight(f"w{i}", OUT, IN, kind) for i in range(WEIGHTS))
    y, *others = g.outputs_of(Linear(x, weights, (None,) * WEIGHTS))
    for other in others:
        y = g(Add(y, other))
    graph = g.build({"y": y}, (KVGroup("full", 1, 1, 32),))
    executor = create_executor(isa, threads)
    model = CpuModel(graph, tensors, executor, max_tokens=max(ROWS), max_sequences=1)
    model.pack()
    program = model.allocate(1, 16, "float32")
    table, first, none = np.zeros((1, max(ROWS) // 16), np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32)
    found = []
    for n in ROWS:
        ids, first_row = np.arange(n, dtype=np.int32), np.array([0, n], np.int32)
        seconds = []
        for _ in range(8 if n > 64 else 40):
            begin = time.process_time()
            program.run(ids, first_row, first, [table], none)
            seconds.append((time.process_time() - begin) / threads)
        found.append(2.0 * WEIGHTS * OUT * IN * n / min(seconds) / 1e9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="avx2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", default="Q4_0,Q4_1,Q8_0,F32,F16,BF16")
    args = parser.parse_args()
    limit = limits(args.threads)
    for (name, n), rate in limit.items():
        print(f"{name:10} {n or '':>4} {rate:8.1f}")
    for name in args.types.split(","):
        kind = WeightType[name]
        plain = "float" if kind in FLOATS else "int8" if name in ("Q8_0", "INT8", "U8") else "int4"
        for n, rate in zip(ROWS, rates(kind, args.isa, args.threads), strict=True):
            print(f"{name:10} {n:4} {rate:8.1f}  {rate / limit[plain, n]:5.2f} of {plain}")


if __name__ == "__main__":
    main()
