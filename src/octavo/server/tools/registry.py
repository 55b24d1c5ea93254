"""The tool parsers by the names that --tool-call-parser takes; all but smollm are vLLM's."""

from __future__ import annotations

from octavo.server.tools.llama import LlamaJson
from octavo.server.tools.marked_json import Granite, Hermes, Jamba, Phi4Mini
from octavo.server.tools.mistral import Mistral
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.pythonic import Olmo3, Pythonic
from octavo.server.tools.smollm import SmolLM

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "granite": Granite,
    "hermes": Hermes,
    "jamba": Jamba,
    "llama3_json": LlamaJson,
    "llama4_json": LlamaJson,
    "llama4_pythonic": Pythonic,
    "mistral": Mistral,
    "olmo3": Olmo3,
    "phi4_mini_json": Phi4Mini,
    "pythonic": Pythonic,
    "smollm": SmolLM,
}
