"""What the door needs of a model's files: the tokenizer, the chat template, and the defaults of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.config import EngineConfig
from octavo.engine.frontend import TextCodec
from octavo.engine.generation_config import GenerationDefaults, load_generation_defaults
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TextSide:
    """template: None if the model has none."""

    tokenizer: TextCodec
    template: ChatTemplate | None
    defaults: GenerationDefaults


def load_text_side(config: EngineConfig) -> TextSide:
    """`config.model` has been located. Raises ConfigError, ModelFileError."""
    metadata = _gguf_metadata(config)
    if metadata is None:
        folder = _tokenizer_path(config)
        tokenizer = Tokenizer.from_hf(folder)
        template = ChatTemplate.from_hf(folder, tokenizer)
    else:
        tokenizer = Tokenizer.from_gguf(metadata)
        template = ChatTemplate.from_gguf(metadata, tokenizer)
    return TextSide(tokenizer, template, load_generation_defaults(config))


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """The part of the tokenizer that the engine needs."""
    metadata = _gguf_metadata(config)
    return Vocabulary.from_hf(_tokenizer_path(config)) if metadata is None else Vocabulary.from_gguf(metadata)


def _tokenizer_path(config: EngineConfig) -> Path:
    path = config.tokenizer or config.model
    assert path is not None, "the model has been located"
    return Path(path)


def _gguf_metadata(config: EngineConfig) -> Mapping[str, Any] | None:
    """None if the tokenizer's files are Hugging Face's."""
    path = _tokenizer_path(config)
    if path.is_dir() and any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from octavo.weights.open_checkpoint import open_checkpoint  # numpy, which the command line need not wait for

    checkpoint = open_checkpoint(path)
    try:
        return checkpoint.config if checkpoint.kind == "gguf" else None
    finally:
        checkpoint.close()
