"""The built-in model's tokenizer metadata, and a small byte-level vocabulary trained on the difficult texts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.weights.builtin import INSTALL_HINT, find_builtin_model
from octavo.weights.gguf import GGUFFile
from tests.tokenizer.make_llama_cpp_ids import DATA

ESSAY = Path(__file__).parents[1] / "data" / "essay.txt"
# transformers' GPT-2 and Qwen2 classes put <|endoftext|> first if a vocabulary lacks it.
CONTROL = ["<|endoftext|>", "<|begin|>", "<|im_end|>", "<|im_end", "<|x|>"]
USER_DEFINED = ["<think>", "    "]


@pytest.fixture(scope="session")
def builtin_path() -> Path:
    path = find_builtin_model()
    assert path is not None, f"the tests need the built-in model: {INSTALL_HINT}"
    return path


@pytest.fixture(scope="session")
def builtin_metadata(builtin_path: Path) -> dict[str, Any]:
    with GGUFFile.open(builtin_path) as file:
        return dict(file.metadata)


@pytest.fixture(scope="session")
def trained() -> tuple[list[str], list[tuple[str, str]]]:
    """A vocabulary in order of ids, and its merges, which reach over every border that a pre-tokenizer might draw."""
    content = json.loads(gzip.decompress(DATA.read_bytes()))
    return content["tokens"], [(left, right) for left, right in content["merges"]]


@pytest.fixture
def tiny_metadata(trained: tuple[list[str], list[tuple[str, str]]]) -> Callable[..., dict[str, Any]]:
    """Builds GGUF metadata of the trained vocabulary, special tokens last; keyword arguments set or remove keys."""

    def build(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
        tokens, merges = trained
        metadata: dict[str, Any] = {
            "model": "gpt2",
            "pre": pre,
            "tokens": [*tokens, *CONTROL, *USER_DEFINED],
            "token_type": [1] * len(tokens) + [3] * len(CONTROL) + [4] * len(USER_DEFINED),
            "merges": [f"{left} {right}" for left, right in merges],
            "bos_token_id": len(tokens) + 1,
            "eos_token_id": len(tokens) + 2,
            "add_bos_token": False,
        }
        metadata.update(changes)
        return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}

    return build
