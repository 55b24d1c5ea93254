"""A vocabulary small enough to see through: the bytes, a few longer tokens, and an end of text."""

from __future__ import annotations

import random

import numpy as np

from octavo.core.records import StructuredOutputs
from octavo.structured.checker import Setup
from octavo.structured.compiler import GrammarCompiler
from octavo.structured.grammar import grammar_text

WORDS = [b'{"', b'":', b'", "', b'"}', b"true", b"  ", b"hello", b"</think>", b"think"]
TOKENS = [*(bytes([i]) for i in range(256)), *WORDS, b"<|call|>", b"<eos>"]
CALL, EOS = len(TOKENS) - 2, len(TOKENS) - 1
SETUP = Setup(TOKENS, [CALL, EOS], [EOS], len(TOKENS))


def special_token(text: str) -> int | None:
    return {"<|call|>": CALL, "<eos>": EOS}.get(text)


def compiler() -> GrammarCompiler:
    return GrammarCompiler(SETUP.token_bytes, SETUP.special, SETUP.eos, SETUP.vocab_size)


def allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


class Form:
    """A compiled form of output. `fits(text)`: may the text be all of an output, cut into tokens at random?"""

    shared: GrammarCompiler | None = None

    def __init__(self, around: str = "", **outputs: object) -> None:
        Form.shared = Form.shared or compiler()
        self.matcher = Form.shared.compile(grammar_text(StructuredOutputs(**outputs), around))  # type: ignore[arg-type]

    def fits(self, text: str | list[int], seed: int = 0) -> bool:
        matcher = self.matcher.deep_copy()
        for token in cut(text.encode(), seed) if isinstance(text, str) else text:
            if token not in allowed(matcher.compute_bitmask()):
                return False
            assert matcher.consume_token(token)
        return EOS in allowed(matcher.compute_bitmask())


def cut(text: bytes, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    ids = []
    while text:
        choices = [i for i, token in enumerate(TOKENS[:CALL]) if text.startswith(token)]
        ids.append(rng.choice(choices))
        text = text[len(TOKENS[ids[-1]]) :]
    return ids
