"""Bytes that arrive in pieces to text that is never wrong: a character is shown when it is whole."""

from __future__ import annotations

import codecs


class TextStream:
    """Incremental UTF-8. All that `feed` and `finish` gave, joined, is `all_bytes.decode("utf-8", "replace")`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that is certain by now; a character cut at the end waits for its rest."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The end of the stream: U+FFFD if it stopped inside a character, else ""."""
        return self._decoder.decode(b"", final=True)
