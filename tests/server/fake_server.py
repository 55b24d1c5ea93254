"""`python -m tests.server.fake_server PORT STEP_SECONDS [MODEL] [FLAGS]`: `octavo serve` over the fake engine.

FLAGS are those of `octavo serve` about HTTP, its --override-generation-config and --served-model-name, and --canary
TEXT: whatever this process opens or connects to, if TEXT is in its name, is told on standard error.
"""

from __future__ import annotations

import sys

from octavo.cli.main import exit_code
from octavo.cli.parser import Parser
from octavo.cli.serve import serve
from octavo.cli.server_options import add_server_flags, server_settings
from octavo.cli.values import json_object
from octavo.core.config import EngineConfig
from tests.server.fake_engine import text_side
from tests.server.harness import fake_engine_command

WATCHED = ("open", "os.listdir", "os.scandir", "socket.getaddrinfo", "socket.connect", "subprocess.Popen")


def watch_for(canary: str) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in WATCHED and any(canary in str(argument) for argument in arguments):
            sys.stderr.write(f"CANARY in {event}\n")

    sys.addaudithook(hook)


def main() -> int:
    parser = Parser(prog="fake_server")
    parser.add_argument("tcp_port", type=int)
    parser.add_argument("step_seconds", type=float)
    parser.add_argument("model", nargs="?", default="echo")
    parser.add_argument("--override-generation-config", type=json_object, default={})
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--canary")
    add_server_flags(parser)
    args = parser.parse_args()
    args.port = args.tcp_port
    if args.canary:
        watch_for(args.canary)
    command = fake_engine_command(args.step_seconds)
    config = EngineConfig(
        args.model, args.served_model_name, override_generation_config=args.override_generation_config
    )
    return exit_code(lambda: serve(config, server_settings(args), command, text_side))


if __name__ == "__main__":
    sys.exit(main())
