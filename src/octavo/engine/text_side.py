"""What the door needs of a model's files: the tokenizer, the chat template, and the defaults of sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelFileError
from octavo.engine.frontend import TextCodec
from octavo.engine.generation_config import GenerationDefaults, load_generation_defaults
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from octavo.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TextSide:
    """template: None if the model has none. warnings: what a user should know of these files, one sentence each."""

    tokenizer: TextCodec
    template: ChatTemplate | None
    defaults: GenerationDefaults
    warnings: tuple[str, ...] = ()


def load_text_side(config: EngineConfig) -> TextSide:
    """`config.model` has been located. Raises ConfigError, ModelFileError."""
    folder = _tokenizer_path(config)
    with _unreadable_files_named():
        metadata = _gguf_metadata(folder)
        if metadata is None:
            tokenizer = Tokenizer.from_hf(folder)
            template = ChatTemplate.from_hf(folder, tokenizer)
        else:
            tokenizer = Tokenizer.from_gguf(metadata)
            template = ChatTemplate.from_gguf(metadata, tokenizer)
        warnings = () if template is None else tuple(template.warnings())
        return TextSide(tokenizer, template, load_generation_defaults(config), warnings)


def with_template(side: TextSide, source: str) -> TextSide:
    """`side` with the chat template `source` instead of the model's own. Raises ConfigError if it is broken."""
    template = ChatTemplate(source, side.tokenizer.bos_token, side.tokenizer.eos_token)
    for words in template.faults().values():
        raise ConfigError(f"--chat-template is broken: {words}")
    return replace(side, template=template)


def load_vocabulary(config: EngineConfig, model: Checkpoint) -> Vocabulary:
    """The part of the tokenizer that the engine needs; `model` is what lies at `config.model`, open already."""
    path = _tokenizer_path(config)
    with _unreadable_files_named():
        metadata = _gguf_metadata(path, model if config.tokenizer is None else None)
        return Vocabulary.from_hf(path) if metadata is None else Vocabulary.from_gguf(metadata)


def vocabulary_warnings(vocabulary: Vocabulary, eos_token_ids: Set[int], model_vocab_size: int) -> list[str]:
    """What a user should know if tokenizer and model do not go together. (A model may have more ids, for padding.)"""
    warnings = []
    if vocabulary.vocab_size > model_vocab_size:
        warnings.append(
            f"the tokenizer has {vocabulary.vocab_size:,} tokens, but the model knows {model_vocab_size:,}: prompts "
            "with others are refused; is this the model's own tokenizer?"
        )
    beyond = sorted(i for i in eos_token_ids if i >= model_vocab_size)
    if beyond:
        warnings.append(f"the model cannot end a reply with token {beyond[0]}: its ids go to {model_vocab_size - 1}")
    return warnings


@contextmanager
def _unreadable_files_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"cannot read {error.filename}: {error.strerror}: check who may read it") from error


def _tokenizer_path(config: EngineConfig) -> Path:
    path = config.tokenizer or config.model
    assert path is not None, "the model has been located"
    return Path(path)


def _gguf_metadata(path: Path, opened: Checkpoint | None = None) -> Mapping[str, Any] | None:
    """None if the tokenizer's files are Hugging Face's. opened: what lies at `path`, if somebody has opened it."""
    if path.is_dir() and any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from octavo.weights.open_checkpoint import open_checkpoint  # numpy, which the command line need not wait for

    checkpoint = opened or open_checkpoint(path)
    try:
        return checkpoint.config if checkpoint.kind == "gguf" else None
    finally:
        if opened is None:
            checkpoint.close()
