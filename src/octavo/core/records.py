"""The records that layers exchange: a request on its way in, a plan and a result each step, outputs on their way out.

Life of a `Request`: the door builds it (validated, tokenized) -> `Engine.submit` -> the scheduler wraps it in a
`Sequence` -> each step a `StepPlan` names (sequence, first, count) -> the runner answers with a `StepResult` -> the
engine adds stops -> `scheduler.update` -> `RequestOutput`s for the client, the last one with a `FinishReason`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, NoReturn

import msgspec

from octavo.core.errors import InvalidRequestError, shorten

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # the automaton that finds a stop string takes some 300 bytes a character
MAX_LOGIT_BIAS = 1024  # entries; each costs every token of the answer
BIAS_LIMIT = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_PATTERN_SIZE = 256
GREEDY_TEMPERATURE = 1e-5  # below this, sampling is argmax
MAX_SEED = 2**63 - 1


STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class FinishReason(enum.StrEnum):
    """Why a request ended. Every accepted request ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client went away or asked to stop
    ERROR = "error"  # the engine failed
    REPETITION = "repetition"  # the end of the output repeats itself, as repetition_detection says


# Fields of vLLM's SamplingParams that are not here -> the values that ask for nothing, and what to do instead.
_ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "give the prompt that many times, each with a seed of its own or none"),
    "best_of": ((1,), "give the prompt that many times and keep the best"),
    "priority": ((0,), "requests are served in the order of arrival: leave it out"),
    "use_beam_search": ((False,), "leave it out"),
    "length_penalty": ((1,), "it is about beam search: leave it out"),
    "early_stopping": ((False,), "it is about beam search: leave it out"),
    "detokenize": ((True,), "text is always made: leave it out"),
    "spaces_between_special_tokens": ((True,), "leave it out"),
    "logits_processors": (([],), "no code is loaded: use logit_bias, bad_words or structured_outputs"),
    "guided_decoding": ((), "use structured_outputs"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "output_kind": ((0, 2), "LLM.generate gives whole results and LLM.stream gives pieces: leave it out"),
    "extra_args": (({},), "leave it out"),
    "flat_logprobs": ((False,), "leave it out"),
}


class _Refusing(type(msgspec.Struct)):  # type: ignore[misc]
    """Makes of an unknown keyword an error that names it, which a msgspec Struct has no other place for."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        name, known = cls.__name__, cls.__struct_fields__
        if args:
            raise InvalidRequestError(f"fields of {name} have names: write {name}({known[0]}=...)")
        for field_name in sorted(fields.keys() - known):
            value = fields.pop(field_name)
            if cls is not SamplingParams or field_name not in _ELSEWHERE:
                raise _unknown_field(name, field_name, known)
            _refuse_unless_harmless(field_name, value)
        return super().__call__(**fields)


def _refuse_unless_harmless(name: str, value: Any) -> None:
    harmless, remedy = _ELSEWHERE[name]
    if value is not None and not any(value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless):
        raise InvalidRequestError(f"{name}={shorten(repr(value))} is not supported: {remedy}", param=name)


def _unknown_field(owner: str, name: str, known: Seq[str]) -> InvalidRequestError:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return InvalidRequestError(f"{owner} has no field {shorten(name)!r}: {hint}", param=name)


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Refusing):
    """Ends an output whose last tokens are one pattern, `min_count` times in a row.

    max_pattern_size: tokens of the longest pattern, at most 256; 0 is off. min_pattern_size: of the shortest; 0 means
    1. min_count: at least 2. Raises InvalidRequestError.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise InvalidRequestError(
                    f"repetition_detection.{name} is {shorten(repr(getattr(self, name)))}; it must be {want}",
                    param="repetition_detection",
                )

        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            check(_is_number(getattr(self, name), int), name, "a whole number")
        longest = self.max_pattern_size
        check(0 <= longest <= MAX_PATTERN_SIZE, "max_pattern_size", f"from 1 to {MAX_PATTERN_SIZE}, or 0 for off")
        check(0 <= self.min_pattern_size <= longest, "min_pattern_size", f"from 1 to max_pattern_size ({longest})")
        check(longest == 0 or 2 <= self.min_count < 2**31, "min_count", "at least 2")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_Refusing):
    """What the output must look like: exactly one of the first six fields.

    json: a JSON schema, as an object or as its text. grammar: Lark, or GBNF. structural_tag: free text in which some
    words are followed by JSON, as an object or its text. The others say how JSON is written.
    Raises InvalidRequestError.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None  # a regular expression
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise InvalidRequestError(f"structured_outputs{text}", param="structured_outputs")

        given = self._given
        check(
            len(given) == 1,
            f" sets {' and '.join(given) or 'nothing'}; it must set exactly one of {', '.join(STRUCTURED_KINDS)}",
        )
        for name, kind, called in (
            ("json", str | dict | bool | None, "an object, a JSON schema"),
            ("regex", str | None, "text"),
            ("choice", list | tuple | None, "a list of texts"),
            ("grammar", str | None, "text"),
            ("json_object", bool | None, "true or false"),
            ("structural_tag", str | dict | None, "an object"),
            ("whitespace_pattern", str | None, "text"),
            ("disable_any_whitespace", bool, "true or false"),
            ("disable_additional_properties", bool, "true or false"),
        ):
            check(isinstance(getattr(self, name), kind), f".{name} must be {called}")
        if self.choice is not None:
            check(bool(self.choice), ".choice is empty: offer at least one text, or leave it out")
            check(all(isinstance(c, str) for c in self.choice), ".choice must be a list of texts")
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        check(
            not (self.disable_any_whitespace and self.whitespace_pattern is not None),
            " sets disable_any_whitespace and whitespace_pattern: leave one out",
        )
        for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            check(
                not getattr(self, name) or given[0] in ("json", "json_object", "structural_tag"),
                f".{name} is about JSON, not about {given[0]}: leave it out",
            )

    @property
    def kind(self) -> str:
        """The one field that is set."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        return [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False) or self._is_false(name)]

    def _is_false(self, name: str) -> bool:
        return name == "json" and self.json is False  # a schema, if one that nothing fits


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_Refusing):
    """How to choose tokens and when to stop; names and meanings are vLLM's.

    temperature: [0, 2]; 0 (or below 1e-5) is greedy. top_k: 0 or -1 is off. top_p: (0, 1]. min_p: [0, 1].
    seed: None or -1 draws one at the door. logprobs, prompt_logprobs: None, or the number of best alternatives besides
    the chosen token, at most --max-logprobs; -1: the whole vocabulary. max_tokens: None = up to the model's limit.
    bad_words_token_ids: how bad_words may be written, which the door fills in.
    thinking_token_budget: tokens of reasoning after which its end is forced. Only for models whose reasoning the door
    can tell. Raises InvalidRequestError naming the field on a bad value and for a field that is not here; those of
    vLLM are accepted where they ask for nothing, as n=1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # [-2, 2], over output tokens
    frequency_penalty: float = 0.0  # [-2, 2], over output tokens
    repetition_penalty: float = 1.0  # [0.01, 100], over prompt and output tokens
    seed: int | None = None
    stop: tuple[str, ...] = ()  # one text or a list of texts will do
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None  # token id -> what is added to its logit, clamped to [-100, 100]
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else comes
    bad_words: tuple[str, ...] = ()  # words that do not come, at the beginning of the output or behind a space
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                value = getattr(self, name)
                shown = list(value) if isinstance(value, tuple) else value  # as JSON has it
                raise InvalidRequestError(f"{name} is {shorten(repr(shown))}; it must be {want}", param=name)

        stop = () if self.stop is None else self.stop
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        check(isinstance(stop, str | list | tuple), "stop", "text or a list of texts")
        check(isinstance(ids, list | tuple), "stop_token_ids", "a list of token ids")
        msgspec.structs.force_setattr(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(ids))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            check(_is_number(getattr(self, name), int | float), name, "a number")
        for name in ("top_k", "min_tokens"):
            check(_is_number(getattr(self, name), int), name, "a whole number")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget"):
            check(_is_number(getattr(self, name), int | None), name, "a whole number or None")
        check(all(isinstance(s, str) for s in self.stop), "stop", "text or a list of texts")
        check(all(_is_number(t, int) for t in self.stop_token_ids), "stop_token_ids", "a list of token ids")
        check(0 <= self.temperature <= 2, "temperature", "between 0 and 2")
        check(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1")
        check(-1 <= self.top_k <= 2**31 - 1, "top_k", "-1 or 0 (off) or a positive number")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        check(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100")
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        check(self.seed is None or -MAX_SEED - 1 <= self.seed <= MAX_SEED, "seed", "a 64-bit integer")
        check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        check(all(self.stop), "stop", "texts that are not empty")
        check(
            max(map(len, self.stop), default=0) <= MAX_STOP_CHARACTERS,
            "stop",
            f"at most {MAX_STOP_CHARACTERS} characters each",
        )
        check(all(0 <= t < 2**31 for t in self.stop_token_ids), "stop_token_ids", "token ids (0 or more)")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        check(self.min_tokens >= 0, "min_tokens", "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or -1 <= value < 2**31, name, "0 or more, or -1 (the whole vocabulary)")
        budget = self.thinking_token_budget
        check(budget is None or 0 <= budget < 2**63, "thinking_token_budget", "0 or more")
        detection = self.repetition_detection
        check(
            isinstance(detection, RepetitionDetection | None), "repetition_detection", "a RepetitionDetection or None"
        )
        check(
            isinstance(self.structured_outputs, StructuredOutputs | None),
            "structured_outputs",
            "StructuredOutputs or None",
        )
        self._check_token_lists()

    def _check_token_lists(self) -> None:
        def refuse(name: str, text: str) -> NoReturn:
            raise InvalidRequestError(f"{name} {text}", param=name)

        bias = self.logit_bias
        if bias is not None:
            if not isinstance(bias, dict):
                refuse("logit_bias", f"is {shorten(repr(bias))}; it must be an object of token ids and numbers")
            if len(bias) > MAX_LOGIT_BIAS:
                refuse("logit_bias", f"has {len(bias):,} entries, the limit is {MAX_LOGIT_BIAS:,}: send fewer")
            for token_id, value in bias.items():
                if not _are_token_ids((token_id,)):
                    refuse("logit_bias", f"has the key {shorten(repr(token_id))}; keys must be token ids (0 or more)")
                if not _is_number(value, int | float) or value != value:
                    refuse("logit_bias", f"gives {token_id} {shorten(repr(value))}; it must be from -100 to 100")
            clamped = {t: float(max(-BIAS_LIMIT, min(BIAS_LIMIT, value))) for t, value in bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", clamped)
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not isinstance(allowed, list | tuple) or not _are_token_ids(allowed):
                refuse("allowed_token_ids", f"is {shorten(repr(allowed))}; it must be a list of token ids")
            if not allowed:
                refuse("allowed_token_ids", "is empty, so nothing could be said: name some ids, or leave it out")
            msgspec.structs.force_setattr(self, "allowed_token_ids", tuple(allowed))
        words = () if self.bad_words is None else self.bad_words
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            refuse("bad_words", f"is {shorten(repr(words))}; it must be a list of texts")
        if len(words) > MAX_BAD_WORDS:
            refuse("bad_words", f"has {len(words):,} words, the limit is {MAX_BAD_WORDS}: send fewer")
        for word in words:
            if not word.strip(" ") or len(word) > MAX_BAD_WORD_CHARACTERS:
                refuse(
                    "bad_words",
                    f"has {shorten(repr(word))}; a word must have 1 to {MAX_BAD_WORD_CHARACTERS} characters that are "
                    "not all spaces",
                )
        msgspec.structs.force_setattr(self, "bad_words", tuple(words))
        ways = self.bad_words_token_ids
        if not all(way and _are_token_ids(way) for way in ways):
            refuse(
                "bad_words_token_ids", f"is {shorten(repr(ways))}; it must be lists of token ids, none of them empty"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _are_token_ids(values: Seq[object]) -> bool:
    """Quick, for there may be as many as the vocabulary has."""
    return set(map(type, values)) <= {int} and 0 <= min(values, default=0) <= max(values, default=0) < 2**31  # type: ignore[type-var, operator]


def _is_number(value: object, kind: UnionType | type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class ReasoningTags(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer marks its reasoning, for whoever must know where it ends before the answer is text.

    starts, ends: the ways to write a tag. White space and one of `starts` begin it, if anything does; the first of
    `ends` ends it. is_open: the answer begins inside. end_token_ids: how to write an end, which the door fills in.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool
    end_token_ids: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One validated prompt on its way to the engine. `params.seed` and `params.max_tokens` are resolved (not None)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float  # Clock.now() at the door, seconds
    cache_salt: str | None = None  # prefixes are shared only between requests with the same salt
    reasoning: ReasoningTags | None = None  # None: nobody knows how the model marks it, or it has none
    grammar: str | None = None  # llguidance's, of the output; the door makes it of params.structured_outputs


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of a model that keep the same tokens and so share block tables; a block of the cache belongs to one group.

    kind: which tokens it keeps; "full": all of them; "sliding": the last `window` ones.
    All groups of a model have their blocks in one pool, so heads are alike in all, and a block has room for as many
    layers as the largest group has.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kind: Literal["full", "sliding"] = "full"
    window: int = 0  # positions that a token attends to, its own included


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # never ran, or preempted and waiting to run again
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's state of one request: counts. `token_ids` is kept for the prefix index and the client only."""

    seq_id: int  # dense, unique in an engine's life; arrival order
    request: Request
    token_ids: list[int]  # prompt + sampled tokens
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache
    num_cached_tokens: int = 0  # of the first admission's prompt, how many came from the prefix cache
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)


@dataclass(slots=True, frozen=True)
class ScheduledSequence:
    """Compute tokens [first, first + count) of a sequence in this step.

    `block_tables` are the sequence's whole tables (logical -> physical block ids), one for each KV group, owned by the
    cache and valid until the next `schedule()`; `num_known_blocks` of each were in the plan before and have not changed
    since. In a sliding group the entries of blocks that have left the window stay what they were (or are 0, if the
    sequence never held them): valid ids of blocks that nothing reads for this sequence.
    `samples`: the last token computed is the sequence's last known one, so the runner samples the next.
    """

    seq_id: int
    first: int
    count: int
    block_tables: tuple[Seq[int], ...]
    num_known_blocks: tuple[int, ...]
    samples: bool


@dataclass(slots=True, frozen=True)
class StepPlan:
    """What the runner shall do in one step, in this order: forget, learn, copy blocks, compute, sample."""

    step: int
    finished: tuple[int, ...] = ()  # seq_ids the runner can forget
    new: tuple[Sequence, ...] = ()  # sequences the runner has not seen (it copies prompt tokens and params)
    block_copies: tuple[tuple[int, int], ...] = ()  # (source, destination) physical blocks, copy-on-write
    scheduled: tuple[ScheduledSequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.count for s in self.scheduled)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the raw logits) at one position of an output or a prompt."""

    logprob: float  # of the chosen token
    rank: int  # of the chosen token among all, from 1
    top_ids: list[int]  # the k most likely token ids, best first, ties by lower id
    top_logprobs: list[float]


@dataclass(slots=True)
class SampledToken:
    """One sampled token of one sequence. The runner fills token and logprobs, the engine's stop check the rest."""

    seq_id: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True, frozen=True)
class ScoredPrompt:
    """Log-probabilities of some tokens of a prompt, each once, in order from the second token on."""

    seq_id: int
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class StepResult:
    step: int
    sampled: list[SampledToken] = field(default_factory=list)
    scored: list[ScoredPrompt] = field(default_factory=list)


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """News of one request for its client: zero or more new tokens, the visible bytes they add, and perhaps the end.

    With prompt_logprobs there is news of the prompt before, or with, the first token: for its tokens from the second
    on, in order and in pieces, as they are computed.

    `text` is raw bytes (a character may be cut at its end; the next output brings the rest). Bytes that may turn out to
    be the beginning of a stop string are held back until that is decided.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # if asked for: of the prompt's next tokens, from its second on
    text: bytes = b""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS
    num_cached_tokens: int | None = None  # set once, with the first token: prompt tokens found in the prefix cache
    queued_time: float = 0.0  # Clock.now() of the engine; both are set once, with the first token
    scheduled_time: float = 0.0  # when the request was first in a plan
    error: str | None = None  # with FinishReason.ERROR
    is_alone: bool = False  # with FinishReason.ERROR: this request only, the engine goes on


class BlockTimes(msgspec.Struct):
    """What a sample of the KV blocks went through, in seconds."""

    lifetimes: list[float] = []  # of evicted blocks: from the allocation
    idle_times: list[float] = []  # of evicted blocks: since the last use
    reuse_gaps: list[float] = []  # between one use of a cached block and the next


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges, totals since the engine started, and what happened since the snapshot before this one."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_blocks: int = 0  # whole pool
    num_blocks_in_use: int = 0  # held by a live sequence; cached-but-idle blocks count as free
    num_blocks_cached: int = 0  # idle blocks that keep a cached prefix
    prefix_cache_queries: int = 0  # totals: prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0  # news: tokens that were computed
    block_times: BlockTimes | None = None  # with kv_cache_metrics, if there are any

    def with_totals_of(self, other: EngineStats) -> EngineStats:
        """This snapshot with the totals of another engine added."""
        return msgspec.structs.replace(
            self,
            prefix_cache_queries=self.prefix_cache_queries + other.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits + other.prefix_cache_hits,
            num_preemptions=self.num_preemptions + other.num_preemptions,
            num_steps=self.num_steps + other.num_steps,
        )
