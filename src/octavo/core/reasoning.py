"""How models mark the reasoning before their answer, by the names that --reasoning-parser takes, which are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.records import ReasoningTags

END_OF_PROMPT = 256  # characters that may show whether it has opened or closed the reasoning


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks its reasoning.

    starts, ends: the ways to write a tag. always: text that begins with no tag is reasoning too, until an end tag.
    special: the tags are special tokens, which must be shown to be found.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    always: bool = False
    special: bool = False

    def behind(self, prompt: str) -> ReasoningTags:
        """Of the answer to a prompt: many templates write the first tag, or both if there is to be no reasoning."""
        end = prompt[-END_OF_PROMPT:].rstrip()
        if end.endswith(self.ends):
            return ReasoningTags(starts=(), ends=self.ends, is_open=False)
        return ReasoningTags(starts=self.starts, ends=self.ends, is_open=self.always or end.endswith(self.starts))


_THINK = Tags()
_THINK_ALWAYS = Tags(always=True)  # of models that leave the start tag out even if the template did not write it

HARMONY = "openai_gptoss"
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
    # What follows its end is the answer; calls, which are other messages, are the server's to find.
    HARMONY: Tags(
        ("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant<|channel|>final<|message|>",), special=True
    ),
    "qwen3": _THINK,
    "seed_oss": Tags(("<seed:think>",), ("</seed:think>",)),
    "step3": _THINK_ALWAYS,
}
