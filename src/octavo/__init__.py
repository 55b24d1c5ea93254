"""octavo: serves large language models to many users at once. `LLM` works offline, `octavo serve` over HTTP.

The names below are loaded when they are first used: the command line must start in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.cli.engine_args import EngineArgs
    from octavo.core.records import RepetitionDetection, SamplingParams, StructuredOutputs
    from octavo.core.records import StructuredOutputs as StructuredOutputsParams
    from octavo.llm import LLM

    __version__: str

__all__ = [
    "LLM",
    "EngineArgs",
    "RepetitionDetection",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    match name:
        case "EngineArgs":
            from octavo.cli.engine_args import EngineArgs

            return EngineArgs
        case "LLM":
            from octavo.llm import LLM

            return LLM
        case "RepetitionDetection" | "SamplingParams" | "StructuredOutputs":
            from octavo.core import records

            return getattr(records, name)
        case "StructuredOutputsParams":  # vLLM's name of it
            from octavo.core.records import StructuredOutputs

            return StructuredOutputs
        case "__version__":
            from octavo.core.version import version

            return version()
        case _:
            raise AttributeError(f"module 'octavo' has no attribute {name!r}")
