"""Which parsers a server uses, as the command line chooses them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """Names in the registries of `tools` and `reasoning`. tools: None if models may not choose to call tools."""

    tools: str | None = None
    reasoning: str | None = None
