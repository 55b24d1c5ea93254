"""`python -m tests.simulation --seeds N --start S`: soak the engine, or replay one seed. Stops at the first failure."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.simulation import ENOUGH_SEEDS, SimulationError, missing_events, run_seeds

PROGRESS_SECONDS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=ENOUGH_SEEDS, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    begin = last = time.monotonic()

    def progress(seed: int, events: Counter[str]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS:
            last = now
            done = seed - args.start + 1
            shown = ", ".join(f"{events[name]} {name}" for name in ("preemption", "prefix hit", "abort while running"))
            print(f"{done}/{args.seeds} seeds, {done / (now - begin):.1f} a second: {shown}", flush=True)

    try:
        events = run_seeds(range(args.start, args.start + args.seeds), progress)
    except SimulationError as error:
        print(f"FAILED {error}", flush=True)
        return 1
    for name, count in sorted(events.items()):
        print(f"{count:8}  {name}")
    missing = missing_events(events) if args.seeds >= ENOUGH_SEEDS else []
    if missing:
        print(f"FAILED: never happened in {args.seeds} seeds: {', '.join(missing)}")
        return 1
    print(f"{args.seeds} seeds from {args.start}: every request as if alone, {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
