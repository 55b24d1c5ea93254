"""Reads SentencePiece's tokenizer.model: a protocol buffer (sentencepiece_model.proto), of which few fields matter.

It reads bytes; what the pieces mean for text is said elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.core.errors import ModelFileError
from octavo.tokenizer.token_table import TokenType

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType


@dataclass(slots=True)
class SentencePieceModel:
    """texts, scores, types: the pieces by id. The ids are None where the model has no such piece."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = UNIGRAM
    unknown_id: int | None = 0
    bos_id: int | None = 1
    eos_id: int | None = 2
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @classmethod
    def parse(cls, data: bytes, name: str) -> SentencePieceModel:
        """Raises ModelFileError, which calls the file `name`."""
        model = cls()
        try:
            for number, value in _fields(data):
                if number == 1:
                    model._add_piece(_bytes(value))
                elif number == 2:
                    model._read_trainer(_bytes(value))
                elif number == 3:
                    model._read_normalizer(_bytes(value))
        except (ValueError, struct.error) as error:
            raise ModelFileError(
                f"{name} is no SentencePiece model ({error}): download it again, or use a folder with tokenizer.json"
            ) from error
        if not model.texts or model.model_type not in (UNIGRAM, BPE):
            raise ModelFileError(
                f"{name} has {len(model.texts)} pieces and model type {model.model_type}; supported are the types"
                f" {UNIGRAM} (unigram) and {BPE} (BPE): use a folder with tokenizer.json"
            )
        return model

    def _add_piece(self, data: bytes) -> None:
        text, score, kind = "", 0.0, int(TokenType.NORMAL)
        for number, value in _fields(data):
            if number == 1:
                text = _bytes(value).decode()
            elif number == 2:
                score = struct.unpack("<f", _bytes(value))[0]
            elif number == 3:
                kind = _int(value)
        self.texts.append(text)
        self.scores.append(score)
        self.types.append(kind)

    def _read_trainer(self, data: bytes) -> None:
        for number, value in _fields(data):
            if number == 3:
                self.model_type = _int(value)
            elif number == 40:
                self.unknown_id = _id(value)
            elif number == 41:
                self.bos_id = _id(value)
            elif number == 42:
                self.eos_id = _id(value)

    def _read_normalizer(self, data: bytes) -> None:
        for number, value in _fields(data):
            if number == 2:
                self.charsmap = _bytes(value)
            elif number == 3:
                self.add_dummy_prefix = bool(_int(value))
            elif number == 4:
                self.remove_extra_whitespaces = bool(_int(value))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message: an int for a varint, the bytes of everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == 2:
            size, at = _varint(data, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes ends after the file")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number of more than 10 bytes before byte {at}")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes are due")
    return value


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number is due")
    return value


def _id(value: int | bytes) -> int | None:
    number = _int(value) & 0xFFFFFFFF  # int32; -1 switches the piece off
    return number if number < 1 << 31 else None
