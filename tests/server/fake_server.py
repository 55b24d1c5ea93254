"""`python -m tests.server.fake_server PORT STEP_SECONDS [MODEL]`: `octavo serve` as it is, over the fake engine."""

from __future__ import annotations

import sys

from octavo.cli.main import exit_code
from octavo.cli.serve import serve
from octavo.core.config import EngineConfig
from tests.server.fake_engine import text_side
from tests.server.harness import fake_engine_command

if __name__ == "__main__":
    port, step_seconds, model = int(sys.argv[1]), float(sys.argv[2]), (sys.argv[3:] or ["echo"])[0]
    command = fake_engine_command(step_seconds)
    sys.exit(exit_code(lambda: serve(EngineConfig(model), "127.0.0.1", port, command, text_side)))
