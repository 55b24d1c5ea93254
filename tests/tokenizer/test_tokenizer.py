"""Token ids against transformers: SmolLM2's own vocabulary, and a tiny one under each family's rules."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.conftest import CONTROL, ESSAY, USER_DEFINED
from tests.tokenizer.texts import difficult_texts

Encode = Callable[[str], list[int]]
Trained = tuple[list[str], list[tuple[str, str]]]
TinyMetadata = Callable[..., dict[str, Any]]

DIGITS_THEN_BYTES = tokenizers.pre_tokenizers.Sequence(
    [
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)


@pytest.fixture(scope="module")
def smollm(builtin_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(builtin_metadata)


@pytest.fixture(scope="module")
def transformers_smollm(builtin_path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(builtin_path.parent), gguf_file=builtin_path.name)


def test_smollm_ids_equal_transformers(smollm: Tokenizer, transformers_smollm: Any) -> None:
    # transformers reads no pre-tokenizer for "smollm" from GGUF and takes GPT-2's, so texts with digits have their own
    # test below.
    texts = [t for t in difficult_texts(900) if not any(c.isnumeric() for c in t)]
    assert len(texts) > 300
    for text in texts:
        assert smollm.encode(text) == transformers_smollm(text)["input_ids"], repr(text)


def test_smollm_ids_equal_the_original_pre_tokenizers(smollm: Tokenizer, transformers_smollm: Any) -> None:
    # SmolLM2's tokenizer.json: Digits(individual_digits=true), then ByteLevel with its own regular expression.
    oracle = tokenizers.Tokenizer.from_str(transformers_smollm.backend_tokenizer.to_str())
    oracle.pre_tokenizer = DIGITS_THEN_BYTES
    for text in [*difficult_texts(1200, seed=1), ESSAY.read_text()]:
        assert smollm.encode(text) == oracle.encode(text, add_special_tokens=False).ids, repr(text)


def test_smollm_known_ids(smollm: Tokenizer) -> None:
    assert smollm.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smollm.encode("<|im_start|>user\nhi<|im_end|>")[:3] == [1, 4093, 198]
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_id) == (49152, 1, 2)
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm.eos_token_ids == {0, 2}


def test_smollm_text_comes_back(smollm: Tokenizer) -> None:
    text = ESSAY.read_text()
    ids = smollm.encode(text)
    assert len(ids) > 2300
    assert smollm.decode(ids) == text
    chat = "<|im_start|>user\nhi<|im_end|>"
    assert smollm.decode(smollm.encode(chat)) == "user\nhi"
    assert smollm.decode(smollm.encode(chat), skip_special_tokens=False) == chat


def test_smollm_token_bytes_equal_transformers_decoder(smollm: Tokenizer, transformers_smollm: Any) -> None:
    backend = transformers_smollm.backend_tokenizer
    for token_id in range(0, smollm.vocab_size, 7):
        assert smollm.decode([token_id], False) == backend.decode([token_id], skip_special_tokens=False)


def added_tokens(oracle: tokenizers.Tokenizer) -> Encode:
    oracle.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in CONTROL])
    oracle.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in USER_DEFINED])
    return lambda text: oracle.encode(text, add_special_tokens=False).ids


def oracle_gpt2(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    return GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer


def oracle_smollm(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    oracle = oracle_gpt2(vocab, merges)
    oracle.pre_tokenizer = DIGITS_THEN_BYTES
    return oracle


def oracle_qwen2(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    return Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer


def oracle_llama3(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    # transformers makes Llama 3's tokenizer with its TikTokenConverter, whose default pattern is the model's.
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    oracle = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=True))
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return oracle


@pytest.mark.parametrize(
    ("pre", "oracle"),
    [
        ("gpt-2", oracle_gpt2),
        ("smollm", oracle_smollm),
        ("qwen2", oracle_qwen2),
        ("llama-bpe", oracle_llama3),
    ],
)
def test_each_family_cuts_words_like_its_original(
    pre: str,
    oracle: Callable[[dict[str, int], list[tuple[str, str]]], tokenizers.Tokenizer],
    trained: Trained,
    tiny_metadata: TinyMetadata,
) -> None:
    tokens, merges = trained
    metadata = tiny_metadata(pre)
    ours = Tokenizer.from_gguf(metadata)
    encode = added_tokens(oracle({t: i for i, t in enumerate(tokens)}, merges))
    assert encode("".join(CONTROL + USER_DEFINED)) == list(range(len(tokens), ours.vocab_size))
    special = ["a<|im_end|>b", " <|x|> ", "<think>x", "1    2", "<|im_end", "<|im_end|<|x|>"]
    for text in [*difficult_texts(600, seed=2), *special]:
        assert ours.encode(text) == encode(text), repr(text)


def test_llama3_takes_a_word_that_is_a_token_whole_but_never_a_control_token(
    tiny_metadata: TinyMetadata, trained: Trained
) -> None:
    size = len(trained[0]) + len(CONTROL) + len(USER_DEFINED)
    base = tiny_metadata()
    metadata = tiny_metadata(
        "llama-bpe",
        tokens=[*base["tokenizer.ggml.tokens"], "Ġqzqz", "qqctl"],
        token_type=[*base["tokenizer.ggml.token_type"], 1, 3],
    )
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode(" qzqz") == [size]
    assert ours.encode("qqctl") == [size + 1]
    assert size + 1 not in ours.encode("qqctl", parse_special=False)
    gpt2 = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"})
    assert size not in gpt2.encode(" qzqz")


def test_special_text_is_ordinary_when_not_parsed(tiny_metadata: TinyMetadata) -> None:
    ours = Tokenizer.from_gguf(tiny_metadata())
    text = "<|im_end|> and <think>"
    ids = ours.encode(text, parse_special=False)
    assert not any(ours.is_special[i] for i in ids)
    assert ours.decode(ids) == text
    think = ours.texts.index("<think>")
    assert think in ids  # a user-defined token is text of the model, not an instruction to it
    assert not ours.is_special[think]


def test_bos_is_added_by_the_files_rule_and_never_twice(tiny_metadata: TinyMetadata) -> None:
    plain = Tokenizer.from_gguf(tiny_metadata("llama-bpe")).encode("hi")
    for metadata in (tiny_metadata("gpt-2", add_bos_token=True), tiny_metadata("llama-bpe", add_bos_token=None)):
        ours = Tokenizer.from_gguf(metadata)
        assert ours.encode("hi") == [ours.bos_token_id, *plain]
        assert ours.encode("<|begin|>hi") == [ours.bos_token_id, *plain]
        assert ours.encode("") == [ours.bos_token_id]
        assert ours.encode("hi", add_special_tokens=False) == plain
    assert Tokenizer.from_gguf(tiny_metadata("gpt-2", add_bos_token=None)).encode("hi") == plain


def test_eos_is_added_by_the_files_rule_and_never_twice(tiny_metadata: TinyMetadata) -> None:
    plain = Tokenizer.from_gguf(tiny_metadata()).encode("hi")
    ours = Tokenizer.from_gguf(tiny_metadata(add_eos_token=True))
    assert ours.encode("hi") == ours.encode(f"hi{ours.eos_token}") == [*plain, ours.eos_token_id]
    assert ours.encode("hi", add_special_tokens=False) == plain


def test_surrogates_and_odd_text_never_crash(smollm: Tokenizer) -> None:
    assert smollm.encode("a\ud800b\udfff") == smollm.encode("a\ufffdb\ufffd")
    for text in ["\udcff" * 5, "<|im_end|>\ud83d", "".join(map(chr, range(0x300))), "\U0010ffff" * 3]:
        assert isinstance(smollm.encode(text), list)


def test_doubled_and_undecodable_tokens_do_no_harm(tiny_metadata: TinyMetadata) -> None:
    base = tiny_metadata()
    metadata = {
        **base,
        "tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"], "a", "\udcff\udcfe"],
        "tokenizer.ggml.token_type": [*base["tokenizer.ggml.token_type"], 1, 1],
    }
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode("a") == [ours.texts.index("a")]  # the first of two equal tokens
    assert ours.token_bytes[-1] == b"\xff\xfe"


def test_threads_get_the_same_ids(smollm: Tokenizer) -> None:
    texts = difficult_texts(400, seed=3)
    alone = [smollm.encode(t) for t in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(smollm.encode, texts * 3)) == alone * 3


def test_a_long_text_does_not_stall_other_threads(smollm: Tokenizer) -> None:
    long = ESSAY.read_text() * 60
    beats = 0
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(smollm.encode, long)
        while not done.done():
            time.sleep(0.001)
            beats += 1
    assert beats > 5  # an encoder that kept the interpreter lock would allow one or two


def test_end_of_generation_ids_come_from_keys_and_from_control_texts(tiny_metadata: TinyMetadata) -> None:
    vocabulary = Vocabulary.from_gguf(tiny_metadata(eos_token_id=3, eot_token_id=5, eom_token_id=6))
    ends = {vocabulary.texts.index(text) for text in ("<|im_end|>", "<|endoftext|>")}
    assert vocabulary.eos_token_ids == {3, 5, 6} | ends
    types = [1] * vocabulary.vocab_size  # with no control tokens, the text "<|im_end|>" ends nothing
    assert Vocabulary.from_gguf(tiny_metadata(eos_token_id=None, token_type=types)).eos_token_ids == frozenset()


def test_visible_bytes_follow_the_token_types() -> None:
    tokens = ["Ġa", "<unk>", "<|c|>", "Ġ é", "[PAD]", "<0xE2>", "日本", "\udcff", "é"]
    vocabulary = Vocabulary.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 2, 3, 4, 5, 6, 1, 1, 1],
        }
    )
    assert vocabulary.token_bytes == [
        b" a",
        b"<unk>",
        b"<|c|>",
        "Ġ é".encode(),  # user-defined: as it is written
        b"",  # unused
        b"\xe2",
        "日本".encode(),  # not in the byte alphabet: as it is written
        b"\xff",
        b"\xe9",
    ]
    assert vocabulary.is_special == [False, True, True, False, False, False, False, False, False]
    assert vocabulary.visible_bytes(2) == b""
    assert vocabulary.visible_bytes(2, skip_special_tokens=False) == b"<|c|>"
    assert vocabulary.decode([0, 2, 7]) == " a\ufffd"
    assert (vocabulary.bos_token_id, vocabulary.bos_token, vocabulary.eos_token) == (None, "", "")
    for token_id in (-1, 9):
        with pytest.raises(InvalidRequestError, match="ids are 0 to 8"):
            vocabulary.decode([token_id])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; supported are gpt2, llama"),
        ({"model": None}, "model is None"),
        ({"pre": "nosuch"}, "'nosuch'; supported are default, gpt-2"),
        ({"pre": ["qwen2"]}, "supported are"),
        ({"tokens": None}, "missing or empty"),
        ({"tokens": "abc"}, "array of str"),
        ({"tokens": [1, 2]}, "array of str"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000; the vocabulary has the ids 0 to"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": "x"}, "eot_token_id is 'x'"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"add_bos_token": True, "bos_token_id": None}, "without a bos_token_id"),
        ({"add_eos_token": "no"}, "add_eos_token is 'no'"),
        ({"add_eos_token": True, "eos_token_id": None}, "without a eos_token_id"),
        ({"merges": ["nosuch token"]}, "merges do not fit the vocabulary"),
        ({"merges": ["nospace"]}, "merges do not fit the vocabulary"),
        ({"merges": [["a", "b"]]}, "array of str"),
    ],
)
def test_unusable_metadata_is_refused_by_name(
    changes: dict[str, Any], message: str, tiny_metadata: TinyMetadata
) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(tiny_metadata(**changes))
