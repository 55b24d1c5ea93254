"""Text to token ids and back, for every kind of file that describes a tokenizer.

It puts together what the files say and what the encoders do; it does not know chat templates or models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from octavo.tokenizer.encoders import Encoder
from octavo.tokenizer.token_table import TokenTable
from octavo.tokenizer.vocabulary import Vocabulary

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer(Vocabulary):
    """A vocabulary that can also encode. Encoding is thread-safe and releases the interpreter lock.

    add_bos, add_eos: whether something (the BOS token as a rule) is put before and after a prompt, as the files say.
    """

    def __init__(self, table: TokenTable, encoder: Encoder, first: Sequence[int], last: Sequence[int]) -> None:
        super().__init__(table)
        self._encoder = encoder
        self._first = list(first)
        self._last = list(last)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Raises ModelFileError if the metadata is incomplete, contradictory, or of an unsupported tokenizer."""
        from octavo.tokenizer.gguf_encoder import read_encoder

        return cls(*read_encoder(metadata))

    @classmethod
    def from_hf(cls, folder: Path) -> Self:
        """From tokenizer.json, tokenizer.model, or vocab.json with merges.txt, in this order of preference.

        Raises ModelFileError if the files are missing, damaged or of an unsupported kind.
        """
        from octavo.tokenizer.hf_folder import HFFolder

        return cls(*HFFolder(folder).read_encoder())

    @property
    def add_bos(self) -> bool:
        return bool(self._first)

    @property
    def add_eos(self) -> bool:
        return bool(self._last)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text. Lone surrogates count as U+FFFD; a byte that the vocabulary lacks is left out.

        add_special_tokens: put BOS first if the model wants it and the text does not begin with it; so with EOS.
        parse_special: special tokens written in the text become those tokens; else they are ordinary characters.
        """
        ids = self._encoder.encode(_LONE_SURROGATE.sub("\ufffd", text), parse_special)
        if add_special_tokens:
            if ids[: len(self._first)] != self._first:
                ids = self._first + ids
            if self._last and ids[-len(self._last) :] != self._last:
                ids = ids + self._last
        return ids
