"""What a tokenizer.json says about ids: texts, kinds, and how its decoder spells text.

How it encodes is the `tokenizers` library's knowledge; this is for the process that only makes text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from octavo.core.errors import ModelFileError, shorten
from octavo.tokenizer.token_table import WORD_BORDER, Spelling, TokenType

MAX_VOCAB_SIZE = 1 << 22


class AddedTokenEntry(msgspec.Struct):
    """A token of tokenizer.json's added_tokens, or of tokenizer_config.json's added_tokens_decoder."""

    content: str
    id: int = -1
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str | None = None
    byte_fallback: bool = False
    end_of_word_suffix: str | None = None
    continuing_subword_prefix: str | None = None


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedTokenEntry] = []
    decoder: Any = None


class TokenizerJson:
    """texts, types: of the model's own tokens by id, without the added ones. added_tokens: as the file lists them."""

    def __init__(self, data: bytes, name: str) -> None:
        """Raises ModelFileError, which calls the file `name`."""
        try:
            file = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ModelFileError(f"{name} is damaged ({error}): download it again") from error
        model = file.model
        if model.type not in ("BPE", "Unigram", None) or model.end_of_word_suffix or model.continuing_subword_prefix:
            raise ModelFileError(
                f"{name} has a model of type {shorten(repr(model.type))}, end_of_word_suffix"
                f" {model.end_of_word_suffix!r} and continuing_subword_prefix {model.continuing_subword_prefix!r};"
                " supported are BPE and Unigram without either: use another model"
            )
        self.added_tokens = file.added_tokens
        ids = _ids(model)
        size = 1 + max(ids.values(), default=-1)
        lowest = min(ids.values(), default=0)
        if lowest < 0 or size > MAX_VOCAB_SIZE:
            raise ModelFileError(
                f"{name} has ids from {lowest} to {size - 1:,}; they must be from 0 to {MAX_VOCAB_SIZE - 1:,}: download"
                " it again"
            )
        self.texts = [""] * size
        self.types: list[int] = [TokenType.UNUSED] * size
        for text, token_id in ids.items():
            self.texts[token_id] = text
            self.types[token_id] = TokenType.NORMAL
        steps = list(_flat_steps(file.decoder))
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" in kinds:
            self.spelling = Spelling.BYTE_LEVEL
        elif "Metaspace" in kinds or any(_replaces_word_border(step) for step in steps):
            self.spelling = Spelling.SENTENCEPIECE
        else:
            raise ModelFileError(
                f"{name} has the decoder {shorten(repr(kinds))}; supported are ByteLevel, Metaspace and Replace of"
                f" {WORD_BORDER!r}: use another model"
            )
        if "ByteFallback" in kinds:
            for byte in range(256):
                if (byte_id := ids.get(f"<0x{byte:02X}>")) is not None:
                    self.types[byte_id] = TokenType.BYTE
        self.strips_leading_space = any(_strips_space(step) for step in steps)


def _ids(model: _Model) -> dict[str, int]:
    if isinstance(model.vocab, dict):
        return model.vocab
    return {text: i for i, (text, _) in enumerate(model.vocab)}


def _flat_steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The decoder's steps, one after the other; a sequence may hold sequences."""
    pending = [decoder]
    while pending:
        step = pending.pop()
        if isinstance(step, dict):
            yield step
            inner = step.get("decoders")
            pending.extend(reversed(inner if isinstance(inner, list) else []))


def _replaces_word_border(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": WORD_BORDER}


def _strips_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) == 1
