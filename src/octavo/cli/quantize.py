"""`octavo quantize`: write a model file in another weight format, with a line that shows how far it is.

A signal that ends it leaves no unfinished file.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Not taken from where they are used, which would bring numpy at every start; a test holds the two together.
TYPES = (
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "q2_k", "q3_k", "q3_k_m", "q4_k", "q4_k_m",
    "q5_k", "q5_k_m", "q6_k",
)  # fmt: skip
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Ended(BaseException):
    """A signal came that ends the program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="a GGUF file, of a split model any part")
    parser.add_argument("target", metavar="OUT", help="the GGUF file to write")
    parser.add_argument(
        "--type",
        required=True,
        metavar="TYPE",
        help=f"one of {', '.join(TYPES)}",
    )
    parser.add_argument("--force", action="store_true", help="write over OUT if it is there")


def run(args: argparse.Namespace) -> int:
    from octavo.engine.quantize import quantize_model  # brings numpy

    shown = sys.stderr.isatty()

    def wrote(name: str, kind: str, share: float) -> None:
        if shown:
            print(f"\r{share:4.0%}  {name} {kind}\033[K", end="", file=sys.stderr, flush=True)

    try:
        with _signals_raised():
            try:
                result = quantize_model(args.source, args.target, args.type, force=args.force, wrote=wrote)
            finally:
                if shown:
                    print("\r\033[K", end="", file=sys.stderr)
    except _Ended as ended:
        name = signal.Signals(ended.number).name
        print(f"octavo: ended by {name}: {args.target} was not written", file=sys.stderr)
        return 128 + ended.number  # as shells report it
    if result.again:
        print(
            f"octavo: warning: some weights of {args.source} were packed already ({', '.join(result.again)}), and "
            "rounding them once more costs quality: a file of f16 or bf16 gives a better one",
            file=sys.stderr,
        )
    print(f"{args.target}: {result.num_bytes / (1 << 20):,.1f} MiB, {result.bits_per_weight:.2f} bits a weight")
    return 0


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Signals that would end the program at once raise _Ended instead; one that is ignored (nohup) stays so."""

    def end(number: int, _: FrameType | None) -> None:
        raise _Ended(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
