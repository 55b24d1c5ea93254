"""`octavo quantize`: write a model file in another weight format, with a line that shows how far it is."""

from __future__ import annotations

import argparse
import sys


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="a GGUF file, of a split model any part")
    parser.add_argument("target", metavar="OUT", help="the GGUF file to write")
    parser.add_argument(
        "--type",
        required=True,
        metavar="TYPE",
        help="such as q8_0, q6_k, q5_k_m, q4_k_m, q4_0, f16; a wrong one lists all",
    )
    parser.add_argument("--force", action="store_true", help="write over OUT if it is there")


def run(args: argparse.Namespace) -> int:
    from octavo.engine.quantize import quantize_model  # brings numpy

    shown = sys.stderr.isatty()

    def wrote(name: str, kind: str, share: float) -> None:
        if shown:
            print(f"\r{share:4.0%}  {name} {kind}\033[K", end="", file=sys.stderr, flush=True)

    try:
        result = quantize_model(args.source, args.target, args.type, force=args.force, wrote=wrote)
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr)
    if result.again:
        print(
            f"octavo: warning: some weights of {args.source} were packed already ({', '.join(result.again)}), and "
            "rounding them once more costs quality: a file of f16 or bf16 gives a better one",
            file=sys.stderr,
        )
    print(f"{args.target}: {result.num_bytes / (1 << 20):,.1f} MiB, {result.bits_per_weight:.2f} bits a weight")
    return 0
