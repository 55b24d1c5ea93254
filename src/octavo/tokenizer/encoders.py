"""Text to ids with the `tokenizers` library: a pipeline for each kind of vocabulary, behind a search for added tokens.

It knows neither files nor prompts; what a model puts before and after a text is the tokenizer's business.
"""

from __future__ import annotations

import enum
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.core.errors import ModelFileError
from octavo.tokenizer.added_tokens import AddedToken, AddedTokenFinder
from octavo.tokenizer.split_rules import SplitRule
from octavo.tokenizer.token_table import SPECIAL_TYPES, WORD_BORDER, Spelling, TokenTable, TokenType

if TYPE_CHECKING:
    import tokenizers

# A piece longer than this is never built by merging: finding its halves takes time that is quadratic in its length.
MAX_MERGED_CHARS = 512

_BORDER_INSIDE = re.compile(f"[^{WORD_BORDER}]{WORD_BORDER}")
_NEVER_FROM_TEXT = (*SPECIAL_TYPES, TokenType.UNUSED)


class Encoder(Protocol):
    """Thread-safe; releases the interpreter lock while it works."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of a text without lone surrogates. Special tokens in it count as such only with `parse_special`."""


class SpacePrefix(enum.Enum):
    """Where SentencePiece's dummy space goes: before each plain stretch, before the first only, or nowhere."""

    EACH = "each"
    FIRST = "first"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class PieceRules:
    """What SentencePiece does to a text before it is cut. charsmap: its compiled normalization table, b"" for none."""

    prefix: SpacePrefix = SpacePrefix.EACH
    removes_extra_spaces: bool = False
    charsmap: bytes = b""


def byte_level_encoder(
    table: TokenTable, merges: Sequence[tuple[str, str]], rule: SplitRule, added: Sequence[AddedToken]
) -> Encoder:
    """GPT-2's scheme: words by the family's rule, their bytes merged. Raises ModelFileError."""
    from tokenizers.models import BPE

    # With ignore_merges a word that spells a control token would become it, so those are left out.
    vocab = _vocabulary(table, lambda kind: kind not in _NEVER_FROM_TEXT)
    bpe = _build(lambda: BPE(vocab, list(merges), ignore_merges=rule.ignore_merges))
    if (normalizer := rule.normalizer()) is not None:
        bpe.normalizer = normalizer
    bpe.pre_tokenizer = rule.pre_tokenizer()
    return _StretchEncoder(bpe, added, lambda text, is_first: text)


def piece_bpe_encoder(
    table: TokenTable,
    merges: Sequence[tuple[str, str]],
    unknown_id: int | None,
    rules: PieceRules,
    added: Sequence[AddedToken],
) -> Encoder:
    """SentencePiece's BPE: characters merged over the whole text, unknown ones as bytes. Raises ModelFileError."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers.models import BPE

    vocab = _vocabulary(table, lambda kind: kind not in _NEVER_FROM_TEXT)
    unknown = None
    if unknown_id is not None:
        unknown = table.texts[unknown_id]
        vocab[unknown] = unknown_id
    has_bytes = TokenType.BYTE in table.types
    backend = _build(lambda: BPE(vocab, list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    _normalize(backend, rules)
    if has_bytes and not any(_BORDER_INSIDE.search(text) for text in vocab):
        # No piece reaches over the beginning of a word, so words can be merged one by one and remembered. Without
        # bytes, unknown characters of two words would be one token.
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{WORD_BORDER}*[^{WORD_BORDER}]+"), "isolated")
    return _StretchEncoder(backend, added, _prefixer(rules))


def unigram_encoder(
    table: TokenTable, scores: Sequence[float], unknown_id: int | None, rules: PieceRules, added: Sequence[AddedToken]
) -> Encoder:
    """SentencePiece's unigram model: the likeliest pieces. Raises ModelFileError."""
    from tokenizers.models import Unigram

    has_bytes = TokenType.BYTE in table.types
    # The model's ids are places in its list, so a token that must not come from text gets a spelling no text has.
    pieces = [
        (f"{text}\0{i}" if kind in _NEVER_FROM_TEXT else text, score)
        for i, (text, kind, score) in enumerate(zip(table.texts, table.types, scores, strict=True))
    ]
    backend = _build(lambda: Unigram(pieces, unk_id=unknown_id, byte_fallback=has_bytes))
    _normalize(backend, rules)
    return _StretchEncoder(backend, added, _prefixer(rules))


def merges_by_rank(table: TokenTable, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies, best first.

    It merges the neighbours whose joint piece has the highest score. As a list of merges: each piece's halves that are
    pieces too, by the score of the whole, then by its id (runs of spaces often share one score), then by the halves'.
    """
    pieces = _vocabulary(table, lambda kind: kind in (TokenType.NORMAL, TokenType.USER_DEFINED))
    found: list[tuple[float, int, int, int, str, str]] = []
    for text, token_id in pieces.items():
        if len(text) > MAX_MERGED_CHARS:
            continue
        score = -scores[token_id]
        for at in range(1, len(text)):
            left = pieces.get(text[:at])
            if left is not None and (right := pieces.get(text[at:])) is not None:
                found.append((score, token_id, left, right, text[:at], text[at:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def added_tokens_of(table: TokenTable) -> list[AddedToken]:
    """The control, unknown and user-defined tokens of a table."""
    spaced = table.spelling is Spelling.SENTENCEPIECE
    return [
        AddedToken(
            text.replace(WORD_BORDER, " ") if spaced and kind == TokenType.USER_DEFINED else text,
            token_id,
            special=kind in SPECIAL_TYPES,
        )
        for token_id, (text, kind) in enumerate(zip(table.texts, table.types, strict=True))
        if kind in SPECIAL_TYPES or kind == TokenType.USER_DEFINED
    ]


class LibraryEncoder:
    """A tokenizer.json as the library reads it. `load` is called again for texts whose special tokens do not count."""

    def __init__(self, load: Callable[[], tokenizers.Tokenizer]) -> None:
        self._load = load
        self.backend = load()
        self._literal: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        backend = self.backend if parse_special else self._without_special_tokens()
        # The batch call, unlike `encode`, releases the interpreter lock: a long prompt must not stall other streams.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _without_special_tokens(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._literal is None:
                self._literal = self._load()
                self._literal.encode_special_tokens = True
            return self._literal


class _StretchEncoder:
    """Finds added tokens, and encodes the plain stretches between them."""

    def __init__(
        self, backend: tokenizers.Tokenizer, added: Sequence[AddedToken], prepare: Callable[[str, bool], str]
    ) -> None:
        self._backend = backend
        self._prepare = prepare
        self._finder = AddedTokenFinder(added)
        self._literal_finder = AddedTokenFinder([token for token in added if not token.special])

    def encode(self, text: str, parse_special: bool) -> list[int]:
        finder = self._finder if parse_special else self._literal_finder
        plain: list[str] = []
        found: list[int] = []
        at = 0
        for token_id, start, end in finder.find(text):
            plain.append(self._prepare(text[at:start], at == 0) if start > at else "")
            found.append(token_id)
            at = end
        plain.append(self._prepare(text[at:], at == 0) if at < len(text) else "")
        ids: list[int] = []
        encodings = self._backend.encode_batch_fast(plain, add_special_tokens=False)
        for encoding, next_id in itertools.zip_longest(encodings, found):
            ids += encoding.ids
            if next_id is not None:
                ids.append(next_id)
        return ids


def _build(make_model: Callable[[], tokenizers.models.Model]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer(make_model())
    except Exception as error:  # the library raises bare Exceptions
        raise ModelFileError(f"the merges do not fit the vocabulary ({error}): convert the model again") from error


def _vocabulary(table: TokenTable, wanted: Callable[[int], bool]) -> dict[str, int]:
    """Ids by text, of two equal texts the first; without texts that the library cannot hold."""
    vocab: dict[str, int] = {}
    for token_id, (text, kind) in enumerate(zip(table.texts, table.types, strict=True)):
        if wanted(kind) and _is_text(text):
            vocab.setdefault(text, token_id)
    return vocab


def _is_text(text: str) -> bool:
    """Whether a text can be UTF-8. A GGUF file may hold any bytes; its reader turns odd ones into lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _normalize(backend: tokenizers.Tokenizer, rules: PieceRules) -> None:
    from tokenizers import Regex, normalizers

    steps: list[normalizers.Normalizer] = []
    if rules.charsmap:
        steps.append(normalizers.Precompiled(rules.charsmap))
    if rules.removes_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", WORD_BORDER))
    if rules.removes_extra_spaces:
        steps.append(normalizers.Replace(Regex(rf"{WORD_BORDER}+\z"), ""))
        if rules.prefix is not SpacePrefix.NEVER:
            steps.append(normalizers.Prepend(WORD_BORDER))  # unless nothing is left
    backend.normalizer = normalizers.Sequence(steps)


def _prefixer(rules: PieceRules) -> Callable[[str, bool], str]:
    """Puts the dummy space before a stretch, where `_normalize` does not."""
    prefix = SpacePrefix.NEVER if rules.removes_extra_spaces else rules.prefix

    def prepare(text: str, is_first: bool) -> str:
        if prefix is SpacePrefix.EACH or (prefix is SpacePrefix.FIRST and is_first):
            return WORD_BORDER + text
        return text

    return prepare
