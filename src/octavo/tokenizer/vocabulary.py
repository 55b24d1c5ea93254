"""The half of a tokenizer that turns ids into text; it is all that the engine process needs.

It does not know how text is cut into tokens, nor from which kind of file the table came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from octavo.core.errors import InvalidRequestError
from octavo.tokenizer.token_table import SPECIAL_TYPES, TokenTable


class Vocabulary:
    """token_bytes: the bytes that each id adds to a text; a special token's are its text, an unused token has none.

    is_special: for each id, whether it is a control (or the unknown) token, left out of replies by default.
    texts: each token as the file spells it.
    bos_token_id, eos_token_id: None if the model has none. eos_token_ids: every id that ends a reply.
    """

    def __init__(self, table: TokenTable) -> None:
        self.texts: Sequence[str] = table.texts
        self.token_bytes = table.all_bytes()
        self.is_special = [kind in SPECIAL_TYPES for kind in table.types]
        self.bos_token_id = table.bos_token_id
        self.eos_token_id = table.eos_token_id
        self.eos_token_ids = table.eos_token_ids
        self._strips_leading_space = table.strips_leading_space

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Raises ModelFileError if the metadata is incomplete, contradictory, or of an unsupported tokenizer."""
        from octavo.tokenizer.gguf_metadata import read_table

        return cls(read_table(metadata))

    @classmethod
    def from_hf(cls, folder: Path) -> Self:
        """Raises ModelFileError if the folder's tokenizer files are missing, damaged or of an unsupported kind."""
        from octavo.tokenizer.hf_folder import HFFolder

        return cls(HFFolder(folder).read_table())

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
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        The one space that a SentencePiece encoder put before the text is taken away; a reply that continues a prompt
        keeps its first space, so it is read token by token with `visible_bytes`. Raises InvalidRequestError on an
        unknown id.
        """
        data = b"".join(self.visible_bytes(i, skip_special_tokens) for i in token_ids)
        if self._strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")
