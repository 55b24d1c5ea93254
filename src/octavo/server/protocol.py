"""Request bodies of the OpenAI API, with vLLM's extra fields, and what they ask of the engine.

Knows which fields go together; how JSON becomes a body is `reading`'s, and replies are in `replies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from octavo.core.errors import InvalidRequestError, short_repr, shorten
from octavo.core.records import MAX_STOP_STRINGS, RepetitionDetection, SamplingParams
from octavo.engine.frontend import DEFAULT_MAX_TOKENS
from octavo.server.reading import unsupported_field
from octavo.server.structured import StructuredFields

SERVICE_TIERS = ("auto", "default")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_NAME_CHARACTERS = 256  # of request_id and cache_salt, and of names that a client has for itself
MAX_METADATA = (16, 64, 512)  # pairs, characters of a key, characters of a value: OpenAI's
NAMES = {"cache_salt": 1, "request_id": 1, "user": 0, "safety_identifier": 0, "prompt_cache_key": 0}  # fewest
MAX_PROMPTS = 1024  # in one completions request
MAX_TOKEN_IDS = {"stop_token_ids": 1024, "allowed_token_ids": 1 << 18}  # of the latter: the largest vocabularies


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationBody(StructuredFields, Struct, kw_only=True):
    """The fields that chat and completions share.

    user, safety_identifier, metadata: the client's own bookkeeping, which only --enable-log-requests shows.
    prompt_cache_key: would tell one of many engines that has the prompt cached; there is one.
    """

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # fast tokenizers, as all of ours are, never put any
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_seed: bool = False  # ours: each choice says the seed that repeats it

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=self.logit_bias or None,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            repetition_detection=self.repetition_detection,
            thinking_token_budget=self.thinking_token_budget,
            skip_special_tokens=self.skip_special_tokens,
        )

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        return self.usage_at_end and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check(self) -> None:
        """Raises InvalidRequestError for fields that are wrong together."""
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequestError("stream_options needs stream=true: set it, or leave it out", "stream_options")
            if self.stream_options.include_obfuscation:
                raise unsupported_field("stream_options.include_obfuscation", True)
        for name, least in NAMES.items():
            value = getattr(self, name)
            if value is not None and not least <= len(value) <= MAX_NAME_CHARACTERS:
                raise InvalidRequestError(
                    f"{name} has {len(value)} characters; it must have {least} to {MAX_NAME_CHARACTERS}, or be left "
                    "out",
                    name,
                )
        _check_metadata(self.metadata)
        if self.service_tier is not None and self.service_tier not in SERVICE_TIERS:
            raise InvalidRequestError(
                f"service_tier is {short_repr(self.service_tier)}; there is one here: send "
                f"{' or '.join(SERVICE_TIERS)}, or leave it out",
                "service_tier",
            )
        for name, limit in MAX_TOKEN_IDS.items():
            if (count := len(getattr(self, name) or ())) > limit:
                raise InvalidRequestError(
                    f"{name} has {count:,} ids, the limit is {limit:,}: send fewer", name, "array_above_max_length"
                )
        if not isinstance(self.stop, str) and len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop):,} strings, the limit is {MAX_STOP_STRINGS}: send fewer",
                "stop",
                "array_above_max_length",
            )

    def own_name(self, param: str | None) -> str | None:
        """The field of this body that a field of SamplingParams came from."""
        return param

    def in_own_words(self, error: InvalidRequestError) -> InvalidRequestError:
        """A refusal of this body's SamplingParams, in terms of the body."""
        name = self.own_name(error.param)
        if name == error.param:
            return error
        return InvalidRequestError(str(error).replace(str(error.param), str(name), 1), name, error.code)

    @property
    def labels(self) -> dict[str, Any]:
        """What the client calls the request, for the log that has its prompt too."""
        named = {"user": self.user, "safety_identifier": self.safety_identifier, "metadata": self.metadata}
        return {name: value for name, value in named.items() if value}


def _check_metadata(metadata: Mapping[str, str]) -> None:
    pairs, of_key, of_value = MAX_METADATA
    if len(metadata) > pairs:
        raise InvalidRequestError(f"metadata has {len(metadata):,} pairs, the limit is {pairs}: send fewer", "metadata")
    for key, value in metadata.items():
        if len(key) > of_key or len(value) > of_value:
            raise InvalidRequestError(
                f"metadata has a key of {len(key):,} and a value of {len(value):,} characters, the limits are {of_key} "
                f"and {of_value}: shorten {shorten(key)!r}",
                "metadata",
            )


class ChatBody(GenerationBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None  # None: unless continue_final_message
    continue_final_message: bool = False
    add_special_tokens: bool = False  # a chat template writes its own
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] = []
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True

    def check(self) -> None:
        GenerationBody.check(self)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true: set it, or leave it out", "top_logprobs")
        if not self.messages:
            raise InvalidRequestError("messages is empty: send at least one", "messages")
        if self.reasoning_effort is not None and self.reasoning_effort not in REASONING_EFFORTS:
            raise InvalidRequestError(
                f"reasoning_effort is {short_repr(self.reasoning_effort)}; it must be one of "
                f"{', '.join(REASONING_EFFORTS)}",
                "reasoning_effort",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message goes on with the last message and add_generation_prompt begins a new one: "
                "send one of them",
                "continue_final_message",
            )
        self._check_tool_choice()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}: send one",
                "max_completion_tokens",
            )

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        match choice:
            case None | "none" | "auto":
                return
            case "required" | {"type": "function", "function": {"name": str()}}:
                if not self.tools:
                    raise InvalidRequestError(
                        f"tool_choice is {short_repr(choice)} without tools: send some, or leave it out",
                        "tool_choice",
                    )
            case _:
                raise InvalidRequestError(
                    f"tool_choice is {short_repr(choice)}; it must be 'auto', 'none', 'required' or "
                    '{"type": "function", "function": {"name": ...}}',
                    "tool_choice",
                )

    @property
    def begins_message(self) -> bool:
        """Whether the model begins a message, rather than going on with what the messages are."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def may_call_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call_tools(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def called_function(self) -> str | None:
        """The name of the one function that tool_choice says."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the request sets for the chat template. chat_template_kwargs has the last word."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            # As vLLM does: most templates know a switch only.
            variables = {
                "reasoning_effort": self.reasoning_effort,
                "enable_thinking": self.reasoning_effort != "none",
            }
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables | self.chat_template_kwargs

    def params(self, default_max_tokens: int | None = None) -> SamplingParams:
        max_tokens = default_max_tokens if self.chosen_max_tokens is None else self.chosen_max_tokens
        return self.sampling_params(
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )

    @property
    def chosen_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def own_name(self, param: str | None) -> str | None:
        if param == "logprobs":
            return "top_logprobs"
        if param == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens"
        return param


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        GenerationBody.check(self)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens is 0, which says nothing without echo=true: ask for at least 1", "max_tokens"
            )

    def own_name(self, param: str | None) -> str | None:
        return "logprobs" if param == "prompt_logprobs" and self.prompt_logprobs is None else param

    @property
    def only_echoes(self) -> bool:
        return self.max_tokens == 0

    def params(self, default_max_tokens: int | None = None) -> SamplingParams:
        default = DEFAULT_MAX_TOKENS if default_max_tokens is None else default_max_tokens
        max_tokens = default if self.max_tokens is None else self.max_tokens
        if self.only_echoes:
            max_tokens = 1  # the engine makes one at least, which nobody sees
        if self.max_tokens is None and self.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than the default of max_tokens ({max_tokens}): set max_tokens",
                "min_tokens",
            )
        of_prompt = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        return self.sampling_params(
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=-1 if -1 in of_prompt else max(of_prompt, default=None),
        )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids. Raises InvalidRequestError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if _is_token_list(prompt):
            return [prompt]
        if not prompt or not all(isinstance(p, str) or (_is_token_list(p) and p) for p in prompt):
            raise InvalidRequestError("prompt must be text, a list of token ids, or a list of either", "prompt")
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} prompts, the limit is {MAX_PROMPTS}: send several requests", "prompt"
            )
        return prompt


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(t) is int for t in value)
