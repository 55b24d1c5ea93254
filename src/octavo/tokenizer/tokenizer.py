"""Text to token ids: byte-level BPE as described by a GGUF file's metadata.

Special tokens are found here; the plain text between them is cut into words by a regular expression of the model's
family and merged by the `tokenizers` library. It does not know chat templates or models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ModelFileError
from octavo.tokenizer.vocabulary import SPECIAL_TYPES, TokenType, Vocabulary, metadata_list

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a model family cuts text into the words within which BPE merges.

    split: the word pattern. single_digits: every digit is a word of its own, before the split. nfc: text is composed
    first. ignore_merges: a word that is a token is taken whole. add_bos: the default if the file does not say.
    """

    split: str
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _cl100k(digits: str) -> str:
    """The pattern of OpenAI's cl100k with another limit on the digits of a word."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # contractions
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # letters with one leading space or sign
        rf"|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # signs with the line end that follows
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = PreTokenizer(_GPT2_SPLIT)
_SMOLLM = PreTokenizer(_GPT2_SPLIT, single_digits=True)
_LLAMA3 = PreTokenizer(_cl100k(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(_cl100k(r"\p{N}"), nfc=True)

# The values of `tokenizer.ggml.pre` (llama.cpp's names).
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer(Vocabulary):
    """A vocabulary that can also encode. Encoding is thread-safe and releases the interpreter lock.

    add_bos, add_eos: whether a prompt begins with the BOS token and ends with EOS, as the file or else the family says.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        name = metadata.get("tokenizer.ggml.pre", "default")
        pre_tokenizer = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre_tokenizer is None:
            raise ModelFileError(
                f"the pre-tokenizer (tokenizer.ggml.pre) is {name!r}; supported are {', '.join(PRE_TOKENIZERS)}:"
                " use a model of one of these families"
            )
        self.add_bos = _added(metadata, "bos", self.bos_token_id, pre_tokenizer.add_bos)
        self.add_eos = _added(metadata, "eos", self.eos_token_id, False)
        self._ids: dict[str, int] = {}
        for token_id, text in enumerate(self.texts):
            self._ids.setdefault(text, token_id)
        matched = [t for t, kind in zip(self.texts, self.types, strict=True) if kind in SPECIAL_TYPES]
        always_matched = [t for t, kind in zip(self.texts, self.types, strict=True) if kind == TokenType.USER_DEFINED]
        self._always_matched = _any_of(always_matched)
        self._matched = _any_of(matched + always_matched)
        self._bpe = self._build_bpe(pre_tokenizer, metadata_list(metadata, "merges", str))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text. Lone surrogates count as U+FFFD; a byte that the vocabulary lacks is left out.

        add_special_tokens: put BOS first if the model wants it and the text does not begin with it.
        parse_special: special tokens written in the text become those tokens; else they are ordinary characters.
        """
        text = _LONE_SURROGATE.sub("\ufffd", text)
        plain: list[str] = []
        special: list[int] = []
        at = 0
        for match in (self._matched if parse_special else self._always_matched).finditer(text):
            plain.append(text[at : match.start()])
            special.append(self._ids[match.group()])
            at = match.end()
        plain.append(text[at:])
        ids: list[int] = []
        # The batch call, unlike `encode`, releases the interpreter lock: a long prompt must not stall other streams.
        encodings = self._bpe.encode_batch_fast(plain, add_special_tokens=False)
        for encoding, next_id in itertools.zip_longest(encodings, special):
            ids += encoding.ids
            if next_id is not None:
                ids.append(next_id)
        if add_special_tokens and self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        if add_special_tokens and self.add_eos and self.eos_token_id is not None and ids[-1:] != [self.eos_token_id]:
            ids.append(self.eos_token_id)
        return ids

    def _build_bpe(self, kind: PreTokenizer, merges: list[str]) -> tokenizers.Tokenizer:
        # Imported here: the engine process needs only the byte table.
        from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        # With ignore_merges a word that spells a control token would become it, so those are left out.
        never_from_text = (*SPECIAL_TYPES, TokenType.UNUSED)
        vocab = {
            text: token_id
            for text, token_id in self._ids.items()
            if self.types[token_id] not in never_from_text and not _LONE_SURROGATE.search(text)
        }
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        try:
            bpe = Tokenizer(BPE(vocab, pairs, ignore_merges=kind.ignore_merges))
        except Exception as error:
            raise ModelFileError(
                f"tokenizer.ggml.merges does not fit the vocabulary ({error}): convert the model again"
            ) from error
        if kind.nfc:
            bpe.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(kind.split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        if kind.single_digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return bpe


def _added(metadata: Mapping[str, Any], which: str, token_id: int | None, default: bool) -> bool:
    """Whether `tokenizer.ggml.add_bos_token` or `..._eos_token` is set."""
    value = metadata.get(f"tokenizer.ggml.add_{which}_token", default)
    if not isinstance(value, bool):
        raise ModelFileError(f"tokenizer.ggml.add_{which}_token is {value!r}; it must be true or false")
    if value and token_id is None:
        raise ModelFileError(
            f"tokenizer.ggml.add_{which}_token is set without a {which}_token_id: convert the model again"
        )
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first where several begin at one place; nothing if there are none."""
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else "(?!)")
