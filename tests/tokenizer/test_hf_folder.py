"""Hugging Face folders: tokenizer.json, its companions, and what stands in for it.

Oracles: the `tokenizers` library on the same tokenizer.json for ids, transformers on the same folder for ids, text and
added tokens. The vocabularies are small; real ones are in test_pieces.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo.core.errors import ModelFileError
from octavo.tokenizer.added_tokens import AddedToken as OurToken
from octavo.tokenizer.added_tokens import AddedTokenFinder
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.texts import SENTENCES, difficult_texts

Trained = tuple[list[str], list[tuple[str, str]]]
WriteFolder = Callable[..., Path]

ADDED = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
    AddedToken("<think>", normalized=False),
    AddedToken("zqw", normalized=False, single_word=True),
    AddedToken("  ", normalized=False),
    AddedToken("ﬁ", normalized=True),
]
FLAGGED = [
    "a <|end|> \n b",
    "<|end|>\t<s>x",
    "x \n<mask> y<mask>",
    "azqw zqw zqws zqw",
    "a  b   c",
    "ﬁx <think>y",
    "<s>",
]
CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}


def byte_level(trained: Trained) -> tokenizers.Tokenizer:
    tokens, merges = trained
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(ADDED)
    return backend


def piece_like(model_type: str) -> tokenizers.Tokenizer:
    """As transformers writes Llama 2's (BPE) and T5's (unigram)."""
    if model_type == "BPE":
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=1500, special_tokens=["<unk>", *byte_tokens], limit_alphabet=100, show_progress=False
        )
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
        backend.decoder = decoders.Metaspace()
    backend.train_from_iterator([word for text in SENTENCES for word in (text, *text.split())], trainer)
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    backend.add_tokens(ADDED[:6])
    return backend


@pytest.fixture(scope="module")
def backends(trained: Trained) -> dict[str, tokenizers.Tokenizer]:
    return {"byte-level": byte_level(trained), "BPE": piece_like("BPE"), "Unigram": piece_like("Unigram")}


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """Puts files into a folder: a text as it is, anything else as JSON; a double underscore stands for the dot."""

    def write(**files: Any) -> Path:
        for name, content in files.items():
            if isinstance(content, tokenizers.Tokenizer):
                content = content.to_str()
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name.replace("__", ".")).write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize("kind", ["byte-level", "BPE", "Unigram"])
def test_ids_and_text_equal_transformers_on_the_same_folder(
    kind: str, backends: dict[str, tokenizers.Tokenizer], write_folder: WriteFolder
) -> None:
    config = {**CONFIG, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    folder = write_folder(tokenizer__json=backends[kind], tokenizer_config__json=config)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours, vocabulary = Tokenizer.from_hf(folder), Vocabulary.from_hf(folder)
    assert ours.vocab_size == len(oracle)
    assert ours.token_bytes == vocabulary.token_bytes
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>") == (vocabulary.bos_token, vocabulary.eos_token)
    assert ours.eos_token_ids == vocabulary.eos_token_ids == {oracle.eos_token_id}
    for text in [*difficult_texts(2200, seed=13), *FLAGGED]:
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids, repr(text)
        literal = oracle(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text, add_special_tokens=False, parse_special=False) == literal, repr(text)
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip)
            if "\ufffd" not in expected:  # broken bytes are counted in another way
                assert ours.decode(ids, skip) == vocabulary.decode(ids, skip) == expected, repr(text)


@pytest.mark.parametrize(
    ("template", "config", "around"),
    [
        (None, {}, ([], [])),
        ("<s> $A", {}, (["<s>"], [])),
        ("<s> $A </s>", {}, (["<s>"], ["</s>"])),
        ("$A </s> <|end|>", {}, ([], ["</s>", "<|end|>"])),
        ("<s> $A", {"add_bos_token": False, "add_eos_token": True}, (["<s>"], [])),
        (None, {"add_bos_token": True, "add_eos_token": True}, (["<s>"], ["</s>"])),
        (None, {"add_bos_token": True, "bos_token": None}, ([], [])),
    ],
)
def test_prompts_begin_and_end_as_the_files_say(
    template: str | None,
    config: dict[str, Any],
    around: tuple[list[str], list[str]],
    trained: Trained,
    write_folder: WriteFolder,
) -> None:
    backend = byte_level(trained)
    if template is not None:
        ids = [(text, backend.token_to_id(text)) for text in ("<s>", "</s>", "<|end|>")]
        backend.post_processor = processors.Sequence(
            [processors.ByteLevel(), processors.TemplateProcessing(single=template, special_tokens=ids)]
        )
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    files = {**CONFIG, "tokenizer_class": "PreTrainedTokenizerFast", **config}
    folder = write_folder(tokenizer__json=backend, tokenizer_config__json=files)
    ours = Tokenizer.from_hf(folder)
    first, last = ([backend.token_to_id(text) for text in texts] for texts in around)
    plain = ours.encode("hello there, world", add_special_tokens=False)
    assert len(plain) > 4  # truncation and padding of the file do not count
    assert ours.encode("hello there, world") == [*first, *plain, *last]
    assert ours.encode("".join(around[0]) + "hello there, world" + "".join(around[1])) == [*first, *plain, *last]
    assert (ours.add_bos, ours.add_eos) == (bool(first), bool(last))
    if not config.get("add_bos_token"):  # transformers 5 does not read it beside a tokenizer.json, transformers 4 did
        oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
        assert oracle("hello", padding=False, truncation=False)["input_ids"] == ours.encode("hello")


def test_end_ids_come_from_all_the_files(trained: Trained, write_folder: WriteFolder) -> None:
    folder = write_folder(
        tokenizer__json=byte_level(trained),
        tokenizer_config__json=CONFIG,
        generation_config__json={"eos_token_id": [7, 8]},
        config__json={"eos_token_id": 9, "text_config": {"eos_token_id": [10]}},
    )
    ours = Tokenizer.from_hf(folder)
    assert ours.eos_token_ids == {7, 8, 9, 10, ours.eos_token_id} == Vocabulary.from_hf(folder).eos_token_ids


@pytest.mark.parametrize("value", ["</s>", -1, [2, True], 1.5, {"id": 2}, 1 << 40])
@pytest.mark.parametrize("name", ["generation_config", "config", "text_config"])
def test_an_end_id_that_is_none_is_refused(name: str, value: Any, trained: Trained, write_folder: WriteFolder) -> None:
    settings = {"eos_token_id": value}
    files = {"config__json": {name: settings}} if name == "text_config" else {f"{name}__json": settings}
    folder = write_folder(tokenizer__json=byte_level(trained), **files)
    for load in (Tokenizer.from_hf, Vocabulary.from_hf):
        with pytest.raises(ModelFileError, match=r"config.json has the eos_token_id .*; it must be"):
            load(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_link_to_nothing_or_a_pipe_is_not_taken_for_a_missing_file(
    name: str, trained: Trained, write_folder: WriteFolder
) -> None:
    folder = write_folder(tokenizer__json=byte_level(trained))
    makers: list[Callable[[Path], None]] = [lambda path: path.symlink_to("nowhere"), os.mkfifo, os.mkdir]
    for make in makers:
        make(folder / name)
        with pytest.raises(ModelFileError, match=rf"{name} is no regular file, or a link to nothing"):
            ChatTemplate.from_hf(folder, Tokenizer.from_hf(folder))
        (folder / name).rename(folder / f"not-{make.__name__}")


def test_special_tokens_may_be_named_outside_of_tokenizer_json(trained: Trained, write_folder: WriteFolder) -> None:
    new_id = byte_level(trained).get_vocab_size()
    folder = write_folder(
        tokenizer__json=byte_level(trained),
        special_tokens_map__json={"eos_token": "</s>", "additional_special_tokens": ["<think>"]},
        tokenizer_config__json={"added_tokens_decoder": {str(new_id): {"content": "<|new|>", "special": True}}},
    )
    ours = Tokenizer.from_hf(folder)
    assert (ours.eos_token, ours.bos_token) == ("</s>", "")
    assert ours.is_special[ours.texts.index("<think>")]
    assert ours.encode("<|new|>") == [new_id]
    assert ours.decode([new_id]) == "" != ours.decode([new_id], skip_special_tokens=False)
    assert new_id not in ours.encode("<|new|>", parse_special=False)


def test_holes_between_ids_are_unused(trained: Trained, write_folder: WriteFolder) -> None:
    data = json.loads(byte_level(trained).to_str())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 5000, "content": "<|far|>"})
    ours = Vocabulary.from_hf(write_folder(tokenizer__json=data))
    assert ours.vocab_size == 5001
    assert ours.token_bytes[4999] == b""
    assert ours.token_bytes[5000] == b"<|far|>"


@pytest.mark.parametrize(("name", "oracle_class"), [("GPT2Tokenizer", "GPT2Tokenizer"), ("Qwen2Tokenizer",) * 2])
def test_vocab_and_merges_are_enough(name: str, oracle_class: str, trained: Trained, write_folder: WriteFolder) -> None:
    tokens, merges = trained
    end = len(tokens)
    config = {
        "tokenizer_class": name,
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(end): {"content": "<|endoftext|>", "special": True},
            str(end + 1): {"content": "<mask>", "special": True, "lstrip": True},
            str(end + 2): {"content": "<think>"},
        },
    }
    folder = write_folder(
        vocab__json={text: i for i, text in enumerate(tokens)},
        merges__txt="#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n",
        tokenizer_config__json=config,
    )
    ours = Tokenizer.from_hf(folder)
    backend = getattr(transformers, oracle_class)(
        vocab={**{text: i for i, text in enumerate(tokens)}, "<|endoftext|>": end}, merges=merges
    ).backend_tokenizer
    assert ours.eos_token_ids == {end}
    for text in difficult_texts(2200, seed=14):
        if "<" not in text:
            assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids, repr(text)
    assert ours.encode("a \n<mask><think><|endoftext|>") == [*ours.encode("a"), end + 1, end + 2, end]
    assert ours.encode("<think>", parse_special=False) == [end + 2]


@pytest.mark.parametrize("file", ["tokenizer_config__json", "special_tokens_map__json"])
def test_words_of_the_vocabulary_that_are_named_special_are_never_cut(
    file: str, trained: Trained, write_folder: WriteFolder
) -> None:
    tokens, merges = trained
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<unk>"]
    named = {
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "rstrip": True},
        "unk_token": "<unk>",
        "additional_special_tokens": ["<image>"],
    }
    if file == "special_tokens_map__json":
        del named["eos_token"]["__type"]  # type: ignore[attr-defined]
    folder = write_folder(
        vocab__json={text: i for i, text in enumerate([*special, *tokens])},
        merges__txt="#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n",
        **{"tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer"}, file: named},
    )
    oracle = transformers.GPT2Tokenizer.from_pretrained(str(folder))
    ours, vocabulary = Tokenizer.from_hf(folder), Vocabulary.from_hf(folder)
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, {2}) == (oracle.bos_token_id, {oracle.eos_token_id})
    chat = "<|im_start|>user\nhi <image><|im_end|> \n<|im_start|>assistant\n<unk>"
    ids = oracle(chat, add_special_tokens=False)["input_ids"]
    assert ours.encode(chat) == ids
    assert {1, 2, 3, 4} <= set(ids)
    assert vocabulary.is_special == ours.is_special
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert not {1, 2, 3, 4} & set(ours.encode(chat, parse_special=False))


def test_gpt_2_ends_with_endoftext_though_no_file_says_so(trained: Trained, write_folder: WriteFolder) -> None:
    tokens, merges = trained
    folder = write_folder(
        vocab__json={text: i for i, text in enumerate([*tokens, "<|endoftext|>"])},
        merges__txt="#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n",
    )
    for name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        write_folder(tokenizer_config__json={"tokenizer_class": name})
        oracle = getattr(transformers, name).from_pretrained(str(folder))
        ours = Tokenizer.from_hf(folder)
        assert (ours.bos_token_id, ours.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id)
        assert ours.encode("a<|endoftext|>b") == oracle("a<|endoftext|>b")["input_ids"]


def test_added_tokens_of_a_byte_level_folder_may_be_in_a_file_of_their_own(
    trained: Trained, write_folder: WriteFolder
) -> None:
    tokens, _ = trained
    folder = write_folder(
        vocab__json={text: i for i, text in enumerate(tokens)},
        merges__txt="#version: 0.2\r\n",
        added_tokens__json={"<|end|>": len(tokens)},
        special_tokens_map__json={"eos_token": {"content": "<|end|>"}},
    )
    ours = Tokenizer.from_hf(folder)
    assert ours.encode("ab<|end|>") == [tokens.index("a"), tokens.index("b"), len(tokens)]
    assert ours.eos_token_ids == {len(tokens)}


def test_lone_surrogates_and_threads_do_no_harm(
    backends: dict[str, tokenizers.Tokenizer], write_folder: WriteFolder
) -> None:
    ours = Tokenizer.from_hf(write_folder(tokenizer__json=backends["BPE"]))
    assert ours.encode("a\ud800b") == ours.encode("a\ufffdb")
    texts = difficult_texts(300, seed=15)
    alone = [ours.encode(text, parse_special=i % 2 == 0) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: ours.encode(texts[i], parse_special=i % 2 == 0), range(300))) == alone


def test_a_folder_without_a_tokenizer_says_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    for load in (Tokenizer.from_hf, Vocabulary.from_hf):
        with pytest.raises(ModelFileError, match=r"needs tokenizer.json, or tokenizer.model, or vocab.json and"):
            load(tmp_path)


def test_damaged_files_are_refused_by_name(trained: Trained, write_folder: WriteFolder) -> None:
    good = json.loads(byte_level(trained).to_str())
    word_piece = {**good, "model": {"type": "WordPiece", "vocab": {"a": 0}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer__json": "{"}, "tokenizer.json is damaged"),
        ({"tokenizer__json": "[" * 100_000}, "tokenizer.json is damaged"),
        ({"tokenizer__json": {**good, "model": {"vocab": {"a": "x"}}}}, "tokenizer.json is damaged"),
        ({"tokenizer__json": word_piece}, "model of type 'WordPiece'.*supported are BPE and Unigram"),
        ({"tokenizer__json": {**good, "model": {"vocab": {"a": -1}}}}, "ids from -1"),
        ({"tokenizer__json": {**good, "model": {"vocab": {"a": 1 << 40}}}}, "must be from 0 to 4,194,303"),
        ({"tokenizer__json": {**good, "decoder": {"type": "CTC"}}}, "decoder .'CTC'.; supported are ByteLevel"),
        ({"tokenizer__json": {**good, "pre_tokenizer": {"type": "Nosuch"}}}, "cannot be read.*newer 'tokenizers'"),
        ({"tokenizer__json": good, "config__json": "[]"}, "config.json is damaged"),
        ({"tokenizer__json": good, "config__json": "{}", "tokenizer_config__json": "\0"}, "tokenizer_config.json is"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "added_tokens_decoder.'x'."),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"1": {}}}}, "added_tokens_decoder.'1'."),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"-4": {"content": "a"}}}}, "has the id -4"),
    ]
    for files, message in cases:
        with pytest.raises(ModelFileError, match=message):
            Tokenizer.from_hf(write_folder(**files))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)  # takes no space on the disk
    with pytest.raises(ModelFileError, match="1,073,741,824 bytes, the limit is"):
        Vocabulary.from_hf(tmp_path)


def test_added_tokens_are_found_as_the_library_finds_them(trained: Trained) -> None:
    backend = byte_level(trained)
    added = [token for token in ADDED if not token.normalized]
    ours = AddedTokenFinder(
        [
            OurToken(t.content, backend.token_to_id(t.content), t.special, t.lstrip, t.rstrip, t.single_word)
            for t in added
        ]
    )
    ids = {backend.token_to_id(token.content) for token in added}
    for text in [
        *FLAGGED,
        *difficult_texts(1500, seed=16),
        "zqw",
        "<|end|>zqw",
        "zqw<think>",
        "é zqw",
        "<",
        "<|en",
    ]:
        text = text.replace("<s>", "<s>zqw ")
        encoding = tokenizers.normalizers.NFC().normalize_str(text) == text and backend.encode(text)
        if encoding:
            pairs = zip(encoding.ids, encoding.offsets, strict=True)
            assert list(ours.find(text)) == [(i, *span) for i, span in pairs if i in ids], repr(text)
