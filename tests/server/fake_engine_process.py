"""`python -m tests.server.fake_engine_process [STEP_SECONDS] FD`: an engine process whose engine is the fake."""

from __future__ import annotations

import sys
from functools import partial

from octavo.engine.process import engine_main
from tests.server.fake_engine import FakeEngine

if __name__ == "__main__":
    step_seconds = float(sys.argv[1]) if len(sys.argv) > 2 else 0.0
    sys.exit(engine_main(partial(FakeEngine, step_seconds=step_seconds), int(sys.argv[-1])))
