"""What each token id means: its visible bytes, whether it is special, and which ids end a reply.

This half of the tokenizer is all that the engine process needs; it does not know how text is cut into tokens.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from octavo.core.errors import InvalidRequestError, ModelFileError

_PREFIX = "tokenizer.ggml."


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`, as llama.cpp numbers it."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)

# Control tokens that end a turn whatever the metadata says: many files name only one of the two that a model uses.
END_OF_GENERATION_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "</s>",
    }
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's encoding).

    Printable Latin-1 bytes stand for themselves, the others, in order, for the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


# Characters outside of the alphabet must not pass for bytes: they become one that Latin-1 cannot encode.
_TO_LATIN1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for byte, char in enumerate(byte_alphabet())}


class Vocabulary:
    """The token table of a byte-level BPE model.

    texts, types: each token as the file spells it, and its TokenType.
    token_bytes: the visible bytes of each id; a special token's are its text, an unused token has none.
    is_special: for each id, whether it is a control (or the unknown) token, left out of replies by default.
    bos_token_id, eos_token_id: None if the model has none. eos_token_ids: every id that ends a reply.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = metadata.get(_PREFIX + "model")
        if model != "gpt2":
            raise ModelFileError(
                f"{_PREFIX}model is {model!r}; only 'gpt2' (byte-level BPE) is supported: use a model of the Llama 3,"
                " Qwen2, SmolLM or GPT-2 family"
            )
        self.texts = metadata_list(metadata, "tokens", str)
        if not self.texts:
            raise ModelFileError(f"{_PREFIX}tokens is missing or empty: the file has no vocabulary, convert it again")
        self.types: Sequence[int] = metadata_list(metadata, "token_type", int) or [TokenType.NORMAL] * len(self.texts)
        if len(self.types) != len(self.texts):
            raise ModelFileError(
                f"{_PREFIX}token_type has {len(self.types)} entries, {_PREFIX}tokens has {len(self.texts)}: they must"
                " be equal, convert the model again"
            )
        self.token_bytes = [_visible(text, kind) for text, kind in zip(self.texts, self.types, strict=True)]
        self.is_special = [kind in SPECIAL_TYPES for kind in self.types]
        self.bos_token_id = self._id(metadata, "bos_token_id")
        self.eos_token_id = self._id(metadata, "eos_token_id")
        ends = {self.eos_token_id, self._id(metadata, "eot_token_id"), self._id(metadata, "eom_token_id")}
        controls = (i for i, kind in enumerate(self.types) if kind == TokenType.CONTROL)
        ends.update(i for i in controls if self.texts[i] in END_OF_GENERATION_TEXTS)
        self.eos_token_ids = frozenset(i for i in ends if i is not None)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Raises ModelFileError if the metadata is incomplete, contradictory, or of an unsupported tokenizer."""
        return cls(metadata)

    @property
    def vocab_size(self) -> int:
        return len(self.texts)

    @property
    def bos_token(self) -> str:
        """The text of the BOS token, "" if there is none; chat templates write it."""
        return "" if self.bos_token_id is None else self.texts[self.bos_token_id]

    @property
    def eos_token(self) -> str:
        return "" if self.eos_token_id is None else self.texts[self.eos_token_id]

    def visible_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What a reader sees of one token; a character may be split over several. Raises InvalidRequestError."""
        if not 0 <= token_id < len(self.token_bytes):
            raise InvalidRequestError(
                f"token id {token_id} is not in the vocabulary: ids are 0 to {len(self.token_bytes) - 1}"
            )
        return b"" if skip_special_tokens and self.is_special[token_id] else self.token_bytes[token_id]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD. Raises InvalidRequestError on an unknown id."""
        return b"".join(self.visible_bytes(i, skip_special_tokens) for i in token_ids).decode("utf-8", "replace")

    def _id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        token_id = metadata.get(_PREFIX + name)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
            raise ModelFileError(
                f"{_PREFIX}{name} is {token_id!r}; the vocabulary has the ids 0 to {self.vocab_size - 1}:"
                " convert the model again"
            )
        return token_id


def metadata_list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """The array `tokenizer.ggml.<name>`, [] if absent. Raises ModelFileError if its elements are not all of `kind`."""
    value = metadata.get(_PREFIX + name, [])
    if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
        raise ModelFileError(f"{_PREFIX}{name} must be an array of {kind.__name__}: convert the model again")
    return value


def _visible(text: str, kind: int) -> bytes:
    if kind == TokenType.UNUSED:
        return b""
    if kind == TokenType.BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        return bytes.fromhex(text[3:5])
    if kind not in SPECIAL_TYPES and kind != TokenType.USER_DEFINED:
        try:
            return text.translate(_TO_LATIN1).encode("latin-1")
        except UnicodeEncodeError:  # not spelled in the byte alphabet: the text is meant as it stands
            pass
    return text.encode("utf-8", "surrogateescape")
