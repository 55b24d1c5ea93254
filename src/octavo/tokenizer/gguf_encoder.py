"""The encoder that a GGUF file's metadata describes, and what it puts before and after a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.core.errors import ModelFileError, shorten
from octavo.tokenizer.added_tokens import AddedToken
from octavo.tokenizer.encoders import (
    Encoder,
    PieceRules,
    SpacePrefix,
    added_tokens_of,
    byte_level_encoder,
    merges_by_rank,
    piece_bpe_encoder,
    unigram_encoder,
)
from octavo.tokenizer.gguf_metadata import (
    added,
    adds_space_prefix,
    flag,
    metadata_list,
    model_name,
    read_table,
    token_id,
)
from octavo.tokenizer.split_rules import SPLIT_RULES, SplitRule
from octavo.tokenizer.token_table import TokenTable

# Whether a prompt gets BOS and EOS if the file does not say; for byte-level BPE the family's rule has it.
_ADDED = {"llama": (True, False), "gemma4": (True, False), "t5": (False, True)}


def read_encoder(metadata: Mapping[str, Any]) -> tuple[TokenTable, Encoder, list[int], list[int]]:
    """The table, the encoder, and the ids before and after a prompt. Raises ModelFileError."""
    table = read_table(metadata)
    model = model_name(metadata)
    if model == "gpt2":
        rule = _split_rule(metadata)
        add_bos, add_eos = rule.add_bos, False
        encoder = byte_level_encoder(table, _merges(metadata), rule, added_tokens_of(table))
    else:
        add_bos, add_eos = _ADDED[model]
        encoder = _piece_encoder(metadata, model, table)
    first = [table.bos_token_id] if added(metadata, "bos", table.bos_token_id, add_bos) else []
    last = [table.eos_token_id] if added(metadata, "eos", table.eos_token_id, add_eos) else []
    return table, encoder, [i for i in first if i is not None], [i for i in last if i is not None]


def _split_rule(metadata: Mapping[str, Any]) -> SplitRule:
    name = metadata.get("tokenizer.ggml.pre", "default")
    rule = SPLIT_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ModelFileError(
            f"the pre-tokenizer (tokenizer.ggml.pre) is {shorten(repr(name))}; supported are"
            f" {', '.join(SPLIT_RULES)}: use a model of one of these families"
        )
    return rule


def _piece_encoder(metadata: Mapping[str, Any], model: str, table: TokenTable) -> Encoder:
    unknown_id = token_id(metadata, "unknown", len(table.texts))
    charsmap = metadata_list(metadata, "precompiled_charsmap", int)
    rules = PieceRules(
        prefix=SpacePrefix.EACH if adds_space_prefix(metadata) else SpacePrefix.NEVER,
        removes_extra_spaces=flag(metadata, "remove_extra_whitespaces", False),
        charsmap=bytes(byte & 0xFF for byte in charsmap),
    )
    added_tokens = added_tokens_of(table)
    if model == "llama" and metadata.get("general.architecture") == "phi3":
        added_tokens = [replace(token, rstrip=_takes_spaces_in_phi3(token)) for token in added_tokens]
    if model == "t5":
        return unigram_encoder(table, _scores(metadata, table), unknown_id, rules, added_tokens)
    merges = _merges(metadata) or merges_by_rank(table, _scores(metadata, table))
    return piece_bpe_encoder(table, merges, unknown_id, rules, added_tokens)


def _takes_spaces_in_phi3(token: AddedToken) -> bool:
    """In Phi-3's tokenizer.json the chat format's tokens take the white space after them; a GGUF cannot say that."""
    return token.text == "</s>" or (token.special and token.text not in ("<unk>", "<s>", "<|endoftext|>"))


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    # A half may itself begin with a space.
    pairs = []
    for merge in metadata_list(metadata, "merges", str):
        at = merge.find(" ", 1)
        pairs.append((merge[:at], merge[at + 1 :]) if at > 0 else (merge, ""))
    return pairs


def _scores(metadata: Mapping[str, Any], table: TokenTable) -> list[float]:
    scores = metadata_list(metadata, "scores", float)
    if len(scores) != len(table.texts):
        raise ModelFileError(
            f"tokenizer.ggml.scores has {len(scores):,} entries, tokenizer.ggml.tokens has {len(table.texts):,}: they"
            " must be equal, convert the model again"
        )
    return scores
