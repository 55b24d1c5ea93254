"""Grammars compiled by llguidance over a model's vocabulary, within limits of work and memory.

llguidance is imported when the first grammar comes: most servers never see one. Its limits bound a mask, but not every
compilation; `checker` bounds those, in a process that may be killed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from octavo.core.errors import InvalidRequestError, shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._tokenizer import TokenizerWrapper

# Work of one mask: llguidance's default, some 15 ms at worst. States cost some 2 KiB each.
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_ITEMS_IN_ROW = 10_000  # some seven for each of the functions that may be called
MAX_LEXER_STATES = 50_000
TOO_COMPLEX = (
    "it takes more work or memory than the limit allows; make it simpler: fewer patterns and alternatives that may "
    "stand in one place, and shorter repetitions"
)
# How llguidance says that one of its limits is reached. It names settings which users do not have.
_BEYOND_LIMITS = re.compile(
    r"fuel exhausted|(lex|check|total) fuel|increase limits\.|limit for this grammar|[Cc]urrent row has"
    r"|[Tt]oo many (items|states|expressions)|(schema|class|DNF) too large"
)


class GrammarCompiler:
    """token_bytes: what each id adds to a text. special: ids that no text may contain. eos: ids that end an output.

    vocab_size: of the model, whose masks have that many bits; it may have more or fewer ids than the tokenizer.
    Takes a tenth of a second for 50,000 tokens.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], special: Iterable[int], eos: Collection[int], vocab_size: int
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self.vocab_size = vocab_size
        ends = end_token_ids(eos, vocab_size)
        tokens = [*token_bytes[:vocab_size], *[b""] * (vocab_size - len(token_bytes))]
        self._tokenizer = LLTokenizer(
            cast("TokenizerWrapper", _Vocabulary(tokens, [i for i in special if i < vocab_size], ends[0])),
            n_vocab=vocab_size,
            eos_token=ends,
        )
        self._limits = LLParserLimits(
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_items_in_row=MAX_ITEMS_IN_ROW,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, grammar: str) -> LLMatcher:
        """Releases the interpreter lock. Raises InvalidRequestError if it is no grammar, too large, or has no text."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(
                f"the output cannot be held to this form: {plain(matcher.get_error())}", param="structured_outputs"
            )
        return matcher


def end_token_ids(eos: Collection[int], vocab_size: int) -> list[int]:
    """What a grammar ends with: a model without an end token says its last id."""
    return sorted(i for i in eos if i < vocab_size) or [vocab_size - 1]


class _Vocabulary:
    """What llguidance asks of a tokenizer. Only grammars that force tokens, as a user's may, call it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos
        self.bos_token_id = None
        no_text = frozenset(special)
        self._by_bytes = {token: i for i, token in enumerate(tokens) if token and i not in no_text}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest token first; a byte that is no token is left out."""
        text = text.encode() if isinstance(text, str) else text
        ids = []
        at = 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self._by_bytes), 0)
            if size:
                ids.append(self._by_bytes[text[at : at + size]])
            at += size or 1
        return ids


def plain(error: str) -> str:
    """llguidance's message without its quotation of the grammar, and without traces of its insides."""
    if error.startswith("panic"):
        return "it makes no sense together"
    if _BEYOND_LIMITS.search(error):
        return TOO_COMPLEX
    text = error.replace("<non-verbose/>", "").strip()
    text = re.sub(r"^(at )?\d+\(\d+\): ", "", text).removeprefix("failed to compile JSON schema: ")
    text = re.split(r"\n *\d* *\|", text)[0].strip()
    if keys := re.match(r"Unimplemented keys: \[(.*)\]", text):
        return f"the schema uses {keys[1]}, which is not supported: leave it out"
    if resource := re.match(r"Resource '([^']*)' is not present", text):
        return f"the schema refers to {shorten(resource[1], 100)}, and nothing is fetched: put it into $defs"
    if text.startswith("NoExtension"):
        return "no text fits it"
    if "<backtrace>" in text:
        text = text.split("<backtrace>")[0].strip()
    return shorten(" ".join(text.split()), 400)
