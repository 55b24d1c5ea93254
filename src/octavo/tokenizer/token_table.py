"""What each token id means: its text, its kind, its bytes, and which ids end a reply.

One table for every source (GGUF metadata, a Hugging Face folder); it does not know how text is cut into tokens.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import ModelFileError

WORD_BORDER = "▁"  # U+2581, how SentencePiece spells a space


class TokenType(enum.IntEnum):
    """The kinds of tokens, numbered as in SentencePiece's model files and in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)


class Spelling(enum.Enum):
    """How a vocabulary writes bytes as text: GPT-2's alphabet of 256 characters, or SentencePiece's ▁ and <0x0A>."""

    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """texts, types: each token as its file spells it, and its TokenType; the index is the id.

    bos_token_id, eos_token_id: None if the model has none. eos_token_ids: every id that ends a reply.
    strips_leading_space: the encoder puts a space before a text, so decoding takes one away.
    """

    texts: Sequence[str]
    types: Sequence[int]
    spelling: Spelling
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: frozenset[int]
    strips_leading_space: bool = False

    def __post_init__(self) -> None:
        if not self.texts:
            raise ModelFileError("the vocabulary is missing or empty: convert the model again")
        if len(self.types) != len(self.texts):
            raise ModelFileError(
                f"the vocabulary has {len(self.types):,} token types for {len(self.texts):,} tokens: they must be"
                " equal, convert the model again"
            )

    def all_bytes(self) -> list[bytes]:
        """The bytes that each token adds to a text; a special token's are its text, an unused token has none."""
        spell = _byte_level if self.spelling is Spelling.BYTE_LEVEL else _sentencepiece
        return [spell(text, kind) for text, kind in zip(self.texts, self.types, strict=True)]


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's encoding).

    Printable Latin-1 bytes stand for themselves, the others, in order, for the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


# Characters outside of the alphabet must not pass for bytes: they become one that Latin-1 cannot encode.
_TO_LATIN1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for byte, char in enumerate(byte_alphabet())}
_AS_WRITTEN = (*SPECIAL_TYPES, TokenType.USER_DEFINED)
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_of(text: str) -> bytes | None:
    """The byte that a text like <0x0A> stands for, None for any other text."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes.fromhex(match[1]) if match else None


def _byte_level(text: str, kind: int) -> bytes:
    if kind == TokenType.UNUSED:
        return b""
    if kind == TokenType.BYTE and (byte := byte_of(text)) is not None:
        return byte
    if kind not in _AS_WRITTEN:
        try:
            return text.translate(_TO_LATIN1).encode("latin-1")
        except UnicodeEncodeError:  # not spelled in the byte alphabet: the text is meant as it stands
            pass
    return text.encode("utf-8", "surrogateescape")


def _sentencepiece(text: str, kind: int) -> bytes:
    if kind == TokenType.UNUSED:
        return b""
    if kind == TokenType.BYTE and (byte := byte_of(text)) is not None:
        return byte
    if kind not in SPECIAL_TYPES:
        text = text.replace(WORD_BORDER, " ")
    return text.encode("utf-8", "surrogateescape")
