"""The tokenizer keys of a GGUF file (`tokenizer.ggml.*`), checked; what they mean for text is said elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.errors import ModelFileError, shorten
from octavo.tokenizer.token_table import Spelling, TokenTable, TokenType

_PREFIX = "tokenizer.ggml."

# The values of `tokenizer.ggml.model`. gemma4 is SentencePiece's spelling with the merges listed.
MODELS = {
    "gpt2": Spelling.BYTE_LEVEL,
    "llama": Spelling.SENTENCEPIECE,
    "gemma4": Spelling.SENTENCEPIECE,
    "t5": Spelling.SENTENCEPIECE,
}

# What llama.cpp assumes where a SentencePiece file names no ids.
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "t5": {"eos": 1, "unknown": 2}}

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
        "<turn|>",
        "<end_of_utterance>",
        "<|endofturn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
        "<EOT>",
        "[EOT]",
        "</s>",
    }
)


def read_table(metadata: Mapping[str, Any]) -> TokenTable:
    """Raises ModelFileError if the metadata is incomplete, contradictory, or of an unsupported tokenizer."""
    model = model_name(metadata)
    spelling = MODELS[model]
    texts = metadata_list(metadata, "tokens", str)
    if not texts:
        raise ModelFileError(f"{_PREFIX}tokens is missing or empty: the file has no vocabulary, convert it again")
    types = metadata_list(metadata, "token_type", int) or [TokenType.NORMAL] * len(texts)
    if len(types) != len(texts):
        raise ModelFileError(
            f"{_PREFIX}token_type has {len(types)} entries, {_PREFIX}tokens has {len(texts)}: they must"
            " be equal, convert the model again"
        )
    eos_token_id = token_id(metadata, "eos", len(texts))
    ends = {eos_token_id, token_id(metadata, "eot", len(texts)), token_id(metadata, "eom", len(texts))}
    ends.update(i for i, kind in enumerate(types) if kind == TokenType.CONTROL and texts[i] in END_OF_GENERATION_TEXTS)
    return TokenTable(
        texts=texts,
        types=types,
        spelling=spelling,
        bos_token_id=token_id(metadata, "bos", len(texts)),
        eos_token_id=eos_token_id,
        eos_token_ids=frozenset(i for i in ends if i is not None),
        strips_leading_space=spelling is Spelling.SENTENCEPIECE and adds_space_prefix(metadata),
    )


def model_name(metadata: Mapping[str, Any]) -> str:
    model = metadata.get(_PREFIX + "model")
    if not isinstance(model, str) or model not in MODELS:
        raise ModelFileError(
            f"{_PREFIX}model is {shorten(repr(model))}; supported are {', '.join(MODELS)}: use a model with one of"
            " these tokenizers"
        )
    return model


def token_id(metadata: Mapping[str, Any], which: str, vocab_size: int) -> int | None:
    """The id `tokenizer.ggml.<which>_token_id`, or what llama.cpp assumes without it."""
    name = f"{_PREFIX}{which}_token_id"
    found = metadata.get(name)
    if found is None:
        default = _DEFAULT_IDS.get(metadata[_PREFIX + "model"], {}).get(which)
        return default if default is not None and default < vocab_size else None
    if not isinstance(found, int) or not 0 <= found < vocab_size:
        raise ModelFileError(
            f"{name} is {shorten(repr(found))}; the vocabulary has the ids 0 to {vocab_size - 1}:"
            " convert the model again"
        )
    return found


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{_PREFIX}{name} is {shorten(repr(value))}; it must be true or false")
    return value


def adds_space_prefix(metadata: Mapping[str, Any]) -> bool:
    return flag(metadata, "add_space_prefix", model_name(metadata) != "gemma4")


def added(metadata: Mapping[str, Any], which: str, token: int | None, default: bool) -> bool:
    """Whether `tokenizer.ggml.add_bos_token` or `..._eos_token` is set."""
    value = flag(metadata, f"add_{which}_token", default and token is not None)
    if value and token is None:
        raise ModelFileError(f"{_PREFIX}add_{which}_token is set without a {which}_token_id: convert the model again")
    return value


def metadata_list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """The array `tokenizer.ggml.<name>`, [] if absent. Raises ModelFileError if its elements are not all of `kind`."""
    value = metadata.get(_PREFIX + name, [])
    if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
        raise ModelFileError(f"{_PREFIX}{name} must be an array of {kind.__name__}: convert the model again")
    return value
