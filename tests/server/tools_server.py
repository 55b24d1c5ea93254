"""`python -m tests.server.tools_server [FLAGS]`: `octavo serve` over the fake engine, with a Qwen3's chat template.

In front of it is what it does not have of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.cli.main import exit_code
from octavo.cli.parser import Parser
from octavo.cli.serve import serve
from octavo.cli.server_options import add_server_flags, server_settings
from octavo.core.config import EngineConfig
from octavo.engine.generation_config import GenerationDefaults
from octavo.engine.text_side import TextSide
from octavo.tokenizer.chat_template import ChatTemplate
from tests.server.fake_engine import ByteTokenizer
from tests.server.harness import fake_engine_command

TEMPLATES = Path(__file__).parents[1] / "tokenizer" / "templates"
EXTRAS = """\
{%- if documents %}{{ 'documents: ' + documents | tojson + '\n' }}{% endif %}
{%- if reasoning_effort is defined %}{{ 'effort: ' + reasoning_effort + '\n' }}{% endif %}
{%- if mood is defined %}{{ 'mood: ' + mood + '\n' }}{% endif %}
"""


def text_side(_: EngineConfig) -> TextSide:
    template = EXTRAS + (TEMPLATES / "qwen3.jinja").read_text()
    return TextSide(ByteTokenizer(), ChatTemplate(template, "", "<eos>"), GenerationDefaults({}))


if __name__ == "__main__":
    parser = Parser(prog="tools_server")
    add_server_flags(parser)
    settings = server_settings(parser.parse_args(["--port=0", *sys.argv[1:]]))
    config = EngineConfig("echo", max_model_len=4096)
    sys.exit(exit_code(lambda: serve(config, settings, fake_engine_command(), text_side)))
