"""The tokenizer files of a Hugging Face folder: which there are, what they say, and the encoder that they describe.

tokenizer.json is read by the `tokenizers` library; tokenizer.model, or vocab.json with merges.txt, stand in for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.errors import ModelFileError, shorten
from octavo.tokenizer.added_tokens import AddedToken
from octavo.tokenizer.encoders import (
    Encoder,
    LibraryEncoder,
    PieceRules,
    SpacePrefix,
    byte_level_encoder,
    merges_by_rank,
    piece_bpe_encoder,
    unigram_encoder,
)
from octavo.tokenizer.sentencepiece_model import BPE, SentencePieceModel
from octavo.tokenizer.split_rules import SPLIT_RULES
from octavo.tokenizer.token_table import Spelling, TokenTable, TokenType
from octavo.tokenizer.tokenizer_json import MAX_VOCAB_SIZE, AddedTokenEntry, TokenizerJson

if TYPE_CHECKING:
    import tokenizers

MAX_FILE_BYTES = 1 << 28

# The rule of a folder with vocab.json and merges.txt, by its tokenizer_class; all others are cut as GPT-2's.
_RULE_OF_CLASS = {"Qwen2Tokenizer": "qwen2", "GPTNeoXTokenizer": "olmo"}

# What the classes of byte-level vocabularies take for a token that no file names. Qwen2's has no BOS token.
_END_OF_TEXT = "<|endoftext|>"

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")


class HFFolder:
    """One folder. Each file is read when it is first needed, and the large ones not more than once."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)

    def read_table(self) -> TokenTable:
        """Raises ModelFileError if the files are missing, damaged or of an unsupported kind."""
        if self._has("tokenizer.json"):
            file = self._tokenizer_json
            return self._make_table(file.texts, file.types, file.spelling, strips=file.strips_leading_space)
        if self._has("tokenizer.model"):
            model = self._pieces
            return self._make_table(
                model.texts,
                model.types,
                Spelling.SENTENCEPIECE,
                strips=model.add_dummy_prefix,
                bos_id=model.bos_id,
                eos_id=model.eos_id,
            )
        if self._has("vocab.json") and self._has("merges.txt"):
            texts, types = list(self._byte_level_vocab[0]), list(self._byte_level_vocab[1])
            end_id = texts.index(_END_OF_TEXT) if _END_OF_TEXT in texts else None
            bos_id = None if self._config.get("tokenizer_class") == "Qwen2Tokenizer" else end_id
            return self._make_table(texts, types, Spelling.BYTE_LEVEL, strips=False, bos_id=bos_id, eos_id=end_id)
        raise ModelFileError(
            f"{self._folder} has no tokenizer: it needs tokenizer.json, or tokenizer.model, or vocab.json and"
            " merges.txt; download them too, or convert the model to a GGUF file"
        )

    def read_encoder(self) -> tuple[TokenTable, Encoder, list[int], list[int]]:
        """The table, the encoder, and the ids before and after a prompt. Raises ModelFileError."""
        table = self.read_table()
        if self._has("tokenizer.json"):
            encoder = LibraryEncoder(self._load_tokenizer_json)
            return table, encoder, *self._around(table, *_template_of(encoder.backend))
        if self._has("tokenizer.model"):
            bos = [] if table.bos_token_id is None else [table.bos_token_id]
            return table, self._piece_encoder(table), *self._around(table, bos, [])
        rule = SPLIT_RULES[_RULE_OF_CLASS.get(str(self._config.get("tokenizer_class")), "gpt-2")]
        encoder_of_bytes = byte_level_encoder(table, self._merges(), rule, list(self._added.values()))
        return table, encoder_of_bytes, *self._around(table, [], [])

    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name. Files of their own go before tokenizer_config.json, as in transformers."""
        found: dict[str, str] = {}
        if self._has("chat_template.jinja"):
            found["default"] = self._text("chat_template.jinja")
        more = self._folder / "additional_chat_templates"
        for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
            found[path.stem] = self._text(f"{more.name}/{path.name}")
        if found:
            return found
        value = self._config.get("chat_template")
        if value is None:
            value = self._json("chat_template.json").get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        for entry in value if isinstance(value, list) else ():
            if isinstance(entry, Mapping):
                name, template = entry.get("name"), entry.get("template")
                if isinstance(name, str) and isinstance(template, str):
                    found[name] = template
        return found

    def _has(self, name: str) -> bool:
        """Links to nothing count, for `_read` to refuse: a model is not understood without its file."""
        path = self._folder / name
        return path.is_symlink() or path.exists()

    def _read(self, name: str) -> bytes:
        path = self._folder / name
        try:
            if not path.is_file():  # a pipe would be read for ever
                raise ModelFileError(
                    f"{path} is no regular file, or a link to nothing: download it again, or take it away"
                )
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                raise ModelFileError(
                    f"{path} has {size:,} bytes, the limit is {MAX_FILE_BYTES:,}: it cannot be a tokenizer's file"
                )
            return path.read_bytes()
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read ({error.strerror}): check it") from error

    def _text(self, name: str) -> str:
        try:
            return self._read(name).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._folder / name} is no UTF-8 text ({error}): download it again") from error

    def _json(self, name: str) -> dict[str, Any]:
        """A JSON object, {} if there is no such file."""
        if not self._has(name):
            return {}
        try:
            return msgspec.json.decode(self._read(name), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ModelFileError(f"{self._folder / name} is damaged ({error}): download it again") from error

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return {**self._json("special_tokens_map.json"), **self._json("tokenizer_config.json")}

    @cached_property
    def _tokenizer_json(self) -> TokenizerJson:
        return TokenizerJson(self._read("tokenizer.json"), str(self._folder / "tokenizer.json"))

    @cached_property
    def _pieces(self) -> SentencePieceModel:
        return SentencePieceModel.parse(self._read("tokenizer.model"), str(self._folder / "tokenizer.model"))

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        """Added tokens by id: those of tokenizer.json or added_tokens.json, and of tokenizer_config.json."""
        if self._has("tokenizer.json"):
            found = {token.id: token for token in self._tokenizer_json.added_tokens}
        else:
            listed = self._json("added_tokens.json").items()
            found = {i: AddedTokenEntry(text, i) for text, i in listed if type(i) is int}
            if self._has("tokenizer.model"):
                kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
                for i, (text, kind) in enumerate(zip(self._pieces.texts, self._pieces.types, strict=True)):
                    if kind in kinds:
                        found[i] = AddedTokenEntry(text, i, special=kind != TokenType.USER_DEFINED)
        decoder = self._config.get("added_tokens_decoder")
        for key, value in decoder.items() if isinstance(decoder, Mapping) else ():
            try:
                entry = msgspec.convert(value, AddedTokenEntry)
                # tokenizer.json is the younger file; a placeholder piece of tokenizer.model takes its name from here.
                if not self._has("tokenizer.json") or int(key) not in found:
                    found[int(key)] = entry
            except (ValueError, msgspec.ValidationError) as error:
                raise ModelFileError(
                    f"{self._folder / 'tokenizer_config.json'}: added_tokens_decoder[{shorten(repr(key))}] is damaged"
                    f" ({error}): download it again"
                ) from error
        special = self._special_entries()
        if not self._has("tokenizer.json"):
            # Named special tokens are often nothing but words of the vocabulary, which no file calls added.
            by_text = {text: i for i, text in enumerate(self._own_texts())}
            listed_texts = {entry.content for entry in found.values()}
            for text, entry in special.items():
                if text in by_text and text not in listed_texts:
                    found.setdefault(by_text[text], entry)
        for token_id, entry in found.items():
            if not 0 <= token_id < MAX_VOCAB_SIZE:
                raise ModelFileError(
                    f"{self._folder}: the added token {shorten(repr(entry.content))} has the id {token_id}; ids go from"
                    f" 0 to {MAX_VOCAB_SIZE - 1:,}"
                )
        return {
            i: AddedToken(e.content, i, e.special or e.content in special, e.lstrip, e.rstrip, e.single_word)
            for i, e in found.items()
        }

    def _own_texts(self) -> Sequence[str]:
        """The vocabulary of a folder without tokenizer.json, before tokens are added to it."""
        if self._has("tokenizer.model"):
            return self._pieces.texts
        return self._byte_level_vocab[0] if self._has("vocab.json") else ()

    def _special_entries(self) -> dict[str, AddedTokenEntry]:
        """By text: the tokens that the configuration names as special, wherever they are."""
        named = [self._config.get(name) for name in _SPECIAL_NAMES]
        for name in _SPECIAL_LISTS:
            value = self._config.get(name)
            named += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        if not self._has("tokenizer.json") and not self._has("tokenizer.model"):
            named.append(_END_OF_TEXT)
        found: dict[str, AddedTokenEntry] = {}
        for value in named:
            if text := _content(value):
                flags = value if isinstance(value, Mapping) else {}
                sides = {side: flags.get(side) is True for side in ("lstrip", "rstrip", "single_word")}
                found.setdefault(text, AddedTokenEntry(text, special=True, **sides))
        return found

    def _token_text(self, name: str) -> str | None:
        return _content(self._config.get(name))

    def _make_table(
        self,
        texts: list[str],
        types: list[int],
        spelling: Spelling,
        *,
        strips: bool,
        bos_id: int | None = None,
        eos_id: int | None = None,
    ) -> TokenTable:
        """The table with the added tokens put in; `bos_id` and `eos_id` are for a configuration that names none."""
        for token_id, token in self._added.items():
            missing = token_id + 1 - len(texts)
            texts.extend([""] * missing)
            types.extend([TokenType.UNUSED] * missing)
            texts[token_id] = token.text
            types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        bos_id = self._id_of("bos_token", texts, bos_id)
        eos_id = self._id_of("eos_token", texts, eos_id)
        return TokenTable(
            texts=texts,
            types=types,
            spelling=spelling,
            bos_token_id=bos_id,
            eos_token_id=eos_id,
            eos_token_ids=self._end_ids(eos_id),
            strips_leading_space=strips,
        )

    def _id_of(self, name: str, texts: Sequence[str], default: int | None) -> int | None:
        if name not in self._config:
            return default
        text = self._token_text(name)
        if text is None:
            return None
        by_text = {token.text: token.token_id for token in self._added.values()}
        return by_text[text] if text in by_text else texts.index(text) if text in texts else None

    def _end_ids(self, eos_token_id: int | None) -> frozenset[int]:
        """The ids that end a reply: the tokenizer's, and those of generation_config.json and config.json."""
        found = set() if eos_token_id is None else {eos_token_id}
        config = self._json("config.json")
        text_config = config.get("text_config")
        for name, settings in (
            ("generation_config.json", self._json("generation_config.json")),
            ("config.json", config),
            ("config.json", text_config if isinstance(text_config, Mapping) else {}),
        ):
            value = settings.get("eos_token_id")
            ids = [] if value is None else value if isinstance(value, list) else [value]
            for i in ids:
                if type(i) is not int or not 0 <= i < 1 << 31:
                    raise ModelFileError(
                        f"{self._folder / name} has the eos_token_id {shorten(repr(i))}; it must be one or several"
                        " token ids, from 0: mend it, or replies do not end where they should"
                    )
            found.update(ids)
        return frozenset(found)

    def _around(self, table: TokenTable, first: list[int], last: list[int]) -> tuple[list[int], list[int]]:
        """The ids before and after a prompt, `first` and `last` if there is nothing in the configuration.

        tokenizer.json takes precedence, as in transformers 5. Where it adds nothing the configuration counts, as in
        transformers 4: DeepSeek's files rely on that.
        """
        if self._has("tokenizer.json") and (first or last):
            return first, last
        if "add_bos_token" in self._config or "add_eos_token" in self._config:
            bos = table.bos_token_id if self._config.get("add_bos_token") else None
            eos = table.eos_token_id if self._config.get("add_eos_token") else None
            return [] if bos is None else [bos], [] if eos is None else [eos]
        return first, last

    def _load_tokenizer_json(self) -> tokenizers.Tokenizer:
        import tokenizers

        path = self._folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelFileError(
                f"{path} cannot be read ({shorten(str(error), 200)}): download it again, or install a newer"
                " 'tokenizers'"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        # Tokens that only tokenizer_config.json knows; the library numbers them itself, in order after the others.
        next_id = backend.get_vocab_size()
        for token_id, token in sorted(self._added.items()):
            if token_id == next_id and backend.token_to_id(token.text) is None:
                next_id += 1
                flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
                new = tokenizers.AddedToken(token.text, **flags, normalized=False, special=token.special)
                backend.add_tokens([new])
        return backend

    def _piece_encoder(self, table: TokenTable) -> Encoder:
        model = self._pieces
        prefix = SpacePrefix.NEVER
        if model.add_dummy_prefix:
            # Without "legacy", transformers puts no space after a special token.
            prefix = SpacePrefix.FIRST if self._config.get("legacy") is False else SpacePrefix.EACH
        rules = PieceRules(prefix, model.remove_extra_whitespaces, model.charsmap)
        added = list(self._added.values())
        scores = [*model.scores, *[0.0] * (len(table.texts) - len(model.scores))]
        if model.model_type == BPE:
            return piece_bpe_encoder(table, merges_by_rank(table, scores), model.unknown_id, rules, added)
        return unigram_encoder(table, scores, model.unknown_id, rules, added)

    @cached_property
    def _byte_level_vocab(self) -> tuple[list[str], list[int]]:
        vocab = self._json("vocab.json")
        if not all(type(i) is int and 0 <= i < MAX_VOCAB_SIZE for i in vocab.values()):
            raise ModelFileError(
                f"{self._folder / 'vocab.json'} must map texts to ids from 0 to {MAX_VOCAB_SIZE - 1:,}: download it"
                " again"
            )
        size = 1 + max(vocab.values(), default=-1)
        texts, types = [""] * size, [int(TokenType.UNUSED)] * size
        for text, token_id in vocab.items():
            texts[token_id], types[token_id] = text, TokenType.NORMAL
        return texts, types

    def _merges(self) -> list[tuple[str, str]]:
        lines = self._text("merges.txt").split("\n")
        if lines[0].startswith("#version"):
            del lines[0]
        return [(left, right) for left, _, right in (line.rstrip("\r").partition(" ") for line in lines if line)]


def _content(token: Any) -> str | None:
    """A special token of the configuration may be a text, or an object with its content."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _template_of(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the library puts before and after a text, seen on an example."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return [], []
