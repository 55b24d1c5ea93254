"""The ways of reasoning by the names that --reasoning-parser takes, which are vLLM's."""

from __future__ import annotations

from octavo.server.reasoning.tagged import Tags

_THINK = Tags()
_THINK_ALWAYS = Tags(always=True)  # of models that leave the start tag out even if the template did not write it

REASONING_PARSERS: dict[str, Tags] = {
    "deepseek_r1": _THINK_ALWAYS,
    "deepseek_v3": _THINK,
    "ernie45": _THINK,
    "glm45": _THINK,
    "granite": Tags(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "holo2": _THINK,
    "minimax_m2": _THINK_ALWAYS,
    "mistral": Tags(("[THINK]",), ("[/THINK]",), special=True),
    "nemotron_v3": _THINK,
    "olmo3": _THINK_ALWAYS,
    "qwen3": _THINK,
    "seed_oss": Tags(("<seed:think>",), ("</seed:think>",)),
    "step3": _THINK_ALWAYS,
}
