"""The tool parsers by the names that --tool-call-parser takes; all but smollm are vLLM's."""

from __future__ import annotations

from octavo.server.tools.harmony import Harmony
from octavo.server.tools.llama import LlamaJson
from octavo.server.tools.marked_json import Granite, Hermes, Jamba, Phi4Mini
from octavo.server.tools.mistral import Mistral
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.pythonic import Olmo3, Pythonic
from octavo.server.tools.sectioned import DeepSeek, DeepSeekV31, KimiK2
from octavo.server.tools.smollm import SmolLM
from octavo.server.tools.xml_calls import DeepSeekXml, Glm, MiniMaxM2, QwenXml, SeedOss

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeekV31,
    "deepseek_v32": DeepSeekXml,
    "glm45": Glm,
    "glm47": Glm,
    "granite": Granite,
    "hermes": Hermes,
    "jamba": Jamba,
    "kimi_k2": KimiK2,
    "llama3_json": LlamaJson,
    "llama4_json": LlamaJson,
    "llama4_pythonic": Pythonic,
    "minimax_m2": MiniMaxM2,
    "mistral": Mistral,
    "olmo3": Olmo3,
    "openai": Harmony,
    "phi4_mini_json": Phi4Mini,
    "pythonic": Pythonic,
    "qwen3_coder": QwenXml,
    "qwen3_xml": QwenXml,
    "seed_oss": SeedOss,
    "smollm": SmolLM,
}
