"""The door: text, token ids or messages become validated `Request`s, and the engine's bytes become text again.

The one place where limits are checked and defaults resolved; behind it only the engine checks once more that a prompt
can be computed. Knows the tokenizer, the chat template and what the engine said of itself, but nothing of HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import msgspec

from octavo.core.errors import InvalidRequestError, shorten
from octavo.core.reasoning import END_OF_PROMPT, Tags
from octavo.core.records import ReasoningTags, Request, RequestOutput, SamplingParams
from octavo.engine.limits import check_token_limits
from octavo.engine.messages import EngineInfo
from octavo.structured.checker import Setup
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.text_stream import TextStream

MAX_DRAWN_SEED = 2**53 - 1  # so that one that is returned survives JSON readers whose numbers are float64
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API
MAX_TRUNCATED_CHARACTERS = 2_000_000  # of a text of which only the end is kept; about a second of one core
MAX_GIVEN_TEMPLATES = 32  # that are kept compiled
MAX_GIVEN_TEMPLATE_CHARACTERS = 1 << 16  # the largest that models bring have 30,000
RESERVED_TEMPLATE_NAMES = (
    *("messages", "add_generation_prompt", "continue_final_message", "tools", "documents"),
    *("chat_template", "content_format"),
)


class TextCodec(Protocol):
    """What the door asks of a tokenizer. `token_bytes[id]`: what a token adds to the text, special tokens included."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...
    @property
    def bos_token(self) -> str: ...
    @property
    def eos_token(self) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]: ...
    def visible_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes: ...


class Detokenizer:
    """Text of one request, made piece by piece from its outputs; never a broken character in between."""

    def __init__(self) -> None:
        self._stream = TextStream()

    def feed(self, output: RequestOutput) -> str:
        text = self._stream.feed(output.text)
        return text if output.finish_reason is None else text + self._stream.finish()


class Frontend:
    """Builds requests for one loaded engine. `seed` starts the generator of seeds for requests that bring none.

    content_format: how chat templates get a message's content, see ChatTemplate.render.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        template: ChatTemplate | None,
        info: EngineInfo,
        seed: int,
        content_format: str = "auto",
    ) -> None:
        self.info = info
        self._tokenizer = tokenizer
        self._template = template
        self._content_format = content_format
        self._given_template = lru_cache(MAX_GIVEN_TEMPLATES)(self._read_template)
        self._seeds = random.Random(seed)
        self._longest_token = max(map(len, tokenizer.token_bytes))
        self._prompt_limit = min(info.max_prompt_tokens, info.max_model_len - 1)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", keep: int | None = None
    ) -> list[int]:
        """Token ids of a prompt; with `keep`, the last so many of them.

        Raises InvalidRequestError if it is longer than any prompt may be. Takes long for a long text: call it in a
        thread.
        """
        num_bytes = len(text.encode("utf-8", "replace"))
        at_least = num_bytes // self._longest_token
        if keep is None and at_least > self._prompt_limit:
            # Spares the work of tokenizing what can only be refused.
            self._refuse_length(f"at least {at_least:,}", param)
        if keep is not None and len(text) > MAX_TRUNCATED_CHARACTERS:
            raise InvalidRequestError(
                f"{param} has {len(text):,} characters, the limit with truncate_prompt_tokens is "
                f"{MAX_TRUNCATED_CHARACTERS:,}: send its end only",
                param,
                "context_length_exceeded",
            )
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=True)
        return token_ids if keep is None else token_ids[-keep:]

    def num_kept(self, truncate_prompt_tokens: int | None, max_tokens: int | None) -> int | None:
        """How many tokens of a prompt to keep, at most; -1 is what the model has room for beside `max_tokens`.

        Raises InvalidRequestError.
        """
        keep = truncate_prompt_tokens
        if keep == -1:
            return max(1, min(self._prompt_limit, self.info.max_model_len - (max_tokens or 1)))
        if keep is not None and not 1 <= keep <= self.info.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {keep:,}; it must be between 1 and {self.info.max_model_len:,}, the "
                "model's length, or -1 for as many as fit",
                "truncate_prompt_tokens",
            )
        return keep

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that is no prompt, so of any length. Takes long for a long one: call it in a thread."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=True)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises InvalidRequestError for an id beyond the model's."""
        vocab_size = self.info.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"tokens has id {token_id}; ids of this model go from 0 to {vocab_size - 1}", param="tokens"
                )
        pieces = (self.visible_bytes(token_id, skip_special_tokens) for token_id in token_ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def reasoning_behind(self, token_ids: Sequence[int], tags: Tags) -> ReasoningTags:
        """How the answer to a prompt will mark its reasoning, for `build_request`."""
        known = [t for t in token_ids[-END_OF_PROMPT:] if 0 <= t < self.info.vocab_size]
        return tags.behind(self.detokenize(known))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The prompt text of a conversation, by the model's template or the one given as `chat_template`.

        Somebody's own template may take seconds: call it in a thread. Raises InvalidRequestError if the template
        refuses the conversation or there is none.
        """
        template = self._template if chat_template is None else self._given_template(chat_template)
        if template is None:
            raise InvalidRequestError(
                f"model {self.info.served_model_name!r} has no chat template: use completions with a plain prompt",
                param="messages",
            )
        variables = template_kwargs or {}
        for name in RESERVED_TEMPLATE_NAMES:
            if name in variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs sets {name!r}, which the request itself sets: remove it",
                    param="chat_template_kwargs",
                )
        try:
            return template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                content_format=self._content_format,
                tools=tools,
                documents=documents,
                **variables,
            )
        except InvalidRequestError as error:
            if chat_template is not None and error.param == "messages":
                raise InvalidRequestError(str(error), "chat_template", error.code) from error
            raise

    def build_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival_time: float,
        param: str = "prompt",
        cache_salt: str | None = None,
        clamp_max_tokens: bool = False,
        reasoning: ReasoningTags | None = None,
        grammar: str | None = None,
    ) -> Request:
        """A request whose limits hold and whose seed and max_tokens are set.

        `param` is the field that a refusal of the prompt names. max_tokens None means all that fits; one that does not
        fit is refused, or made to fit with `clamp_max_tokens` (for a default that the user did not choose).
        `reasoning`: how the answer will mark it, if that is known; without its end_token_ids. `grammar`: what
        `params.structured_outputs` was made into. Raises InvalidRequestError.
        """
        assert grammar is not None or params.structured_outputs is None, "the caller makes the grammar"
        self._check_prompt(token_ids, param)
        if params.bad_words:
            params = msgspec.structs.replace(params, bad_words_token_ids=self._ways_to_write(params.bad_words))
        room = self.info.max_model_len - len(token_ids)
        max_tokens = params.max_tokens
        if max_tokens is None or (clamp_max_tokens and max_tokens > room):
            max_tokens = room
        elif max_tokens > room:
            raise InvalidRequestError(
                f"max_tokens is {max_tokens:,} and the prompt has {len(token_ids):,} tokens, together more than the "
                f"limit of {self.info.max_model_len:,}: "
                f"{self.info.ways_out_of_length(f'ask for at most {room:,}, or shorten the prompt')}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens:,}, but only {max_tokens:,} can follow this prompt: lower it",
                param="min_tokens",
            )
        params = msgspec.structs.replace(params, max_tokens=max_tokens)
        check_token_limits(params, len(token_ids), self.info.vocab_size, self.info.max_logprobs)
        if reasoning is not None:
            end_token_ids = tuple(self._tokenizer.encode(reasoning.ends[0], add_special_tokens=False))
            reasoning = msgspec.structs.replace(reasoning, end_token_ids=end_token_ids)
        elif params.thinking_token_budget is not None:
            raise InvalidRequestError(
                "thinking_token_budget needs to know how the model marks its reasoning: start with --reasoning-parser "
                "(LLM: reasoning_parser), or leave it out",
                param="thinking_token_budget",
            )
        seed = self._seeds.randint(0, MAX_DRAWN_SEED) if params.seed is None else params.seed
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=msgspec.structs.replace(params, seed=seed, structured_outputs=None),
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            reasoning=reasoning,
            grammar=grammar,
        )

    def _ways_to_write(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the beginning of a text and behind a space, as vLLM does."""
        ways: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for text in (bare, f" {bare}"):
                way = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if not way:
                    raise InvalidRequestError(
                        f"bad_words has {shorten(repr(word))}, which is no token of this model: remove it", "bad_words"
                    )
                ways[way] = None
        return tuple(ways)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, of a special one too; none for an id that only pads the model's vocabulary."""
        table = self._tokenizer.token_bytes
        return table[token_id] if token_id < len(table) else b""

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What a reader sees of a token."""
        if token_id >= len(self._tokenizer.token_bytes):
            return b""
        return self._tokenizer.visible_bytes(token_id, skip_special_tokens)

    def _read_template(self, source: str) -> ChatTemplate:
        if len(source) > MAX_GIVEN_TEMPLATE_CHARACTERS:
            raise InvalidRequestError(
                f"chat_template has {len(source):,} characters, the limit is {MAX_GIVEN_TEMPLATE_CHARACTERS:,}: "
                "shorten it, or start the server with --chat-template",
                "chat_template",
            )
        return ChatTemplate(source, self._tokenizer.bos_token, self._tokenizer.eos_token)

    def grammar_setup(self) -> Setup:
        """What it takes to compile grammars over this vocabulary. Takes some milliseconds."""
        return Setup(list(self._tokenizer.token_bytes), sorted(self._special_tokens.values()), [], self.info.vocab_size)

    def special_token(self, text: str) -> int | None:
        """The id of the special token with this text."""
        return self._special_tokens.get(text.encode())

    @cached_property
    def _special_tokens(self) -> dict[bytes, int]:
        tokens = enumerate(self._tokenizer.token_bytes)
        return {token: i for i, token in tokens if token and not self._tokenizer.visible_bytes(i, True)}

    def _check_prompt(self, token_ids: list[int], param: str) -> None:
        if not token_ids:
            raise InvalidRequestError(f"{param} has no tokens: send at least one", param=param)
        if len(token_ids) > self._prompt_limit:
            self._refuse_length(f"{len(token_ids):,}", param)
        vocab_size = self.info.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            worst = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise InvalidRequestError(
                f"{param} has token id {worst}; ids of this model go from 0 to {vocab_size - 1}", param=param
            )

    def _refuse_length(self, length: str, param: str) -> None:
        raise InvalidRequestError(
            f"{param} has {length} tokens, the limit is {self._prompt_limit:,} (a model length of "
            f"{self.info.max_model_len:,} leaves room for one token of output): "
            f"{self.info.ways_out_of_length('shorten it')}",
            param=param,
            code="context_length_exceeded",
        )
