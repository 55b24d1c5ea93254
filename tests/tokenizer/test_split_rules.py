"""How each family cuts words: a small vocabulary under every rule, against two independent oracles.

- llama.cpp on a model file with the same vocabulary (checksums of ids in data/llama_cpp_ids.json.gz, made once by
  make_llama_cpp_ids.py): 2,500 texts for each value of tokenizer.ggml.pre, but the seven that it lists.
- transformers: the patterns of its GGUF reader, which include those seven, and its tokenizer classes for the
  normalization that a GGUF file does not name (GPT-NeoX, Cohere, Qwen2, Qwen3.5).
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import pytest
import tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.cohere.tokenization_cohere import CohereTokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.gpt_neox.tokenization_gpt_neox import GPTNeoXTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from octavo.tokenizer.split_rules import SPLIT_RULES
from octavo.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.make_llama_cpp_ids import DATA, NOT_COMPARABLE, checksum, texts_for
from tests.tokenizer.texts import difficult_texts

Content = dict[str, Any]
CLASSES = {
    "gpt-2": GPT2Tokenizer,
    "default": GPT2Tokenizer,
    "olmo": GPTNeoXTokenizer,
    "command-r": CohereTokenizer,
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
}


@pytest.fixture(scope="module")
def content() -> Content:
    found: Content = json.loads(gzip.decompress(DATA.read_bytes()))
    return found


def tokenizer_with(pre: str, content: Content) -> Tokenizer:
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": content["tokens"],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in content["merges"]],
            "tokenizer.ggml.add_bos_token": False,
        }
    )


@pytest.mark.parametrize("pre", [pre for pre in SPLIT_RULES if pre not in NOT_COMPARABLE])
def test_ids_equal_llama_cpp(pre: str, content: Content) -> None:
    expected = base64.b64decode(content["checksums"][pre])
    rule = SPLIT_RULES[pre]
    same = next(name for name in SPLIT_RULES if SPLIT_RULES[name] == rule and name not in NOT_COMPARABLE)
    if same != pre:  # the same rule by another name need not be run again
        assert content["checksums"][pre] == content["checksums"][same]
        return
    ours = tokenizer_with(pre, content)
    texts = texts_for(pre)
    assert len(expected) == 2 * len(texts)
    assert len(texts) > 2100
    different = [t for i, t in enumerate(texts) if checksum(ours.encode(t)) != expected[2 * i : 2 * i + 2]]
    assert different == []


@pytest.mark.parametrize("pre", [pre for pre in GGUF_PRE_TOKENIZER_SPLITS if pre in SPLIT_RULES])
def test_splits_equal_transformers_gguf_reader(pre: str, content: Content) -> None:
    ours = SPLIT_RULES[pre].pre_tokenizer()
    theirs = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in difficult_texts(2200 if pre in NOT_COMPARABLE[:3] else 300, seed=11):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), repr(text)


@pytest.mark.parametrize("pre", CLASSES)
def test_ids_equal_the_family_s_class_in_transformers(pre: str, content: Content) -> None:
    vocab = {text: i for i, text in enumerate(content["tokens"])}
    merges = [(left, right) for left, right in content["merges"]]
    oracle = CLASSES[pre](vocab=vocab, merges=merges, add_prefix_space=False).backend_tokenizer
    ours = tokenizer_with(pre, content)
    for text in difficult_texts(2200, seed=12):
        if "<" not in text:  # the classes add special tokens of their own
            assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids, repr(text)


def test_every_family_has_its_rule() -> None:
    families = "gpt-2 llama-bpe qwen2 qwen35 tekken gpt-4o smollm starcoder refact olmo stablelm2 dbrx phi-2 falcon"
    families += " falcon3 deepseek-llm deepseek-coder deepseek-v3 deepseek-r1-qwen command-r glm4 mpt bloom default"
    assert set(families.split()) <= set(SPLIT_RULES)
