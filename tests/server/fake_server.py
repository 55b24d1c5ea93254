"""`python -m tests.server.fake_server PORT STEP_SECONDS [MODEL [DEFAULTS]]`: `octavo serve` over the fake engine.

DEFAULTS: --override-generation-config.
"""

from __future__ import annotations

import json
import sys

from octavo.cli.main import exit_code
from octavo.cli.serve import serve
from octavo.core.config import EngineConfig
from tests.server.fake_engine import text_side
from tests.server.harness import fake_engine_command

if __name__ == "__main__":
    port, step_seconds, model, defaults = [*sys.argv[1:], *["0", "0", "echo", "{}"][len(sys.argv) - 1 :]]
    config = EngineConfig(model, override_generation_config=json.loads(defaults))
    command = fake_engine_command(float(step_seconds))
    sys.exit(exit_code(lambda: serve(config, "127.0.0.1", int(port), command, text_side)))
