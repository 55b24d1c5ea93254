"""Text generation without a server: the same engine, in the caller's own process. Knows nothing of HTTP."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any, Self

from octavo.core.clock import Clock, SystemClock
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError, shorten
from octavo.core.reasoning import REASONING_PARSERS
from octavo.core.records import FinishReason, ReasoningTags, Request, RequestOutput, SamplingParams, TokenLogprobs
from octavo.core.vllm_flags import checked_options
from octavo.engine.frontend import Detokenizer, Frontend
from octavo.engine.messages import EngineInfo
from octavo.engine.model_location import locate_model
from octavo.engine.process import EngineLike
from octavo.engine.text_side import load_text_side
from octavo.structured.compiler import GrammarCompiler
from octavo.structured.grammar import answer_within, grammar_text

logger = logging.getLogger(__name__)

MAX_KNOWN_GRAMMARS = 32  # that need not be tried again

# Text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | list[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Progress = bool | Callable[..., Any]  # a function like tqdm makes the bar


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank among all tokens (from 1), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclasses.dataclass(slots=True)
class Completion:
    """What was generated. `logprobs` has, for each token, the chosen one and the best alternatives by token id."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None  # of the chosen tokens, if logprobs were asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int | None = None  # repeats it: the one given, or the one drawn for it


@dataclasses.dataclass(slots=True)
class PromptResult:
    """A prompt (None if it came as token ids) and its completion, the one element of `outputs`.

    `prompt_logprobs` has, for each token of the prompt, itself and the best alternatives by token id; None for the
    first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # if they were asked for


class LLMTokenizer:
    """The tokenizer of a loaded model, as Hugging Face's are called. Ids are those of the model."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Of any length. add_special_tokens: what the model wants around a prompt, such as BOS."""
        return self._frontend.tokenize(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Bytes that are not UTF-8 become U+FFFD. Raises InvalidRequestError for an id that the model does not have."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._frontend.detokenize(ids, skip_special_tokens=skip_special_tokens)


class LLM:
    """A loaded model. Options are the fields of EngineConfig, which are vLLM's where it has them; no model means the
    built-in one. Other options of vLLM are accepted where they ask for nothing, with a warning where they mean nothing.

    reasoning_parser: how the model marks its reasoning (a name of core.reasoning), for thinking_token_budget.
    Threads may call it at the same time: their requests run in one batch, and whoever waits moves all of them on.
    Raises ConfigError, ModelFileError. Close it, or use it in a `with`, to give the memory back.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, reasoning_parser: str | None = None, **options: Any
    ) -> None:
        if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
            known = ", ".join(REASONING_PARSERS)
            raise ConfigError(f"reasoning_parser is {shorten(repr(reasoning_parser))}; it must be one of {known}")
        given, notes = checked_options("LLM", options)
        config = locate_model(EngineConfig(model=str(model) if isinstance(model, os.PathLike) else model, **given))
        from octavo.engine.engine import Engine  # only here are the kernels loaded

        clock = SystemClock()
        text = load_text_side(config)
        engine = Engine(config)
        for warning in (*notes, *text.warnings, *engine.info.warnings):
            logger.warning("octavo: %s", warning)
        frontend = Frontend(text.tokenizer, text.template, engine.info, config.seed)
        self._attach(engine, frontend, clock, text.defaults.params(), reasoning_parser)

    @classmethod
    def over(cls, engine: EngineLike, frontend: Frontend, clock: Clock, *, reasoning_parser: str | None = None) -> Self:
        """An LLM over parts that exist already."""
        llm = cls.__new__(cls)
        llm._attach(engine, frontend, clock, SamplingParams(), reasoning_parser)
        return llm

    def _attach(
        self,
        engine: EngineLike,
        frontend: Frontend,
        clock: Clock,
        defaults: SamplingParams,
        reasoning_parser: str | None,
    ) -> None:
        self._defaults = defaults
        self._reasoning = None if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]
        self._engine = engine
        self._frontend = frontend
        self._clock = clock
        self._closed = False
        self._lock = threading.Lock()  # held for each step and each change of the engine's requests
        self._ids = itertools.count()
        self._compiler: GrammarCompiler | None = None  # tries grammars before the engine does, whose caller is far away
        self._grammars: deque[str] = deque(maxlen=MAX_KNOWN_GRAMMARS)  # the last ones that compiled
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # request id -> where its outputs wait to be yielded

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._engine.info

    def get_default_sampling_params(self) -> SamplingParams:
        """What calls without sampling_params use: the model's generation_config.json on top of octavo's defaults."""
        return self._defaults

    def get_tokenizer(self) -> LLMTokenizer:
        return LLMTokenizer(self._frontend)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[PromptResult]:
        """Continue one or many prompts, all in one batch; results in the order of the prompts.

        Output ends at the model's length even if max_tokens is larger. use_tqdm: show a progress bar if standard error
        is a terminal. Raises InvalidRequestError.
        """
        many = [self._encoded(prompt) for prompt in _prompt_list(prompts)]
        params = self._one_each(sampling_params, len(many))
        return self._results([text for text, _ in many], [ids for _, ids in many], params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: Progress = True,
    ) -> list[PromptResult]:
        """Answer one or many conversations, each a list of {"role", "content"}.

        With continue_final_message the answer goes on with the last message; otherwise it begins a new one, unless
        add_generation_prompt is False. chat_template: instead of the model's own. use_tqdm: as in `generate`.
        Raises InvalidRequestError.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message goes on with the last message and add_generation_prompt begins a new one: "
                "give one of them",
                param="continue_final_message",
            )
        if isinstance(messages, str):
            raise InvalidRequestError('messages is text; it must be a list of {"role", "content"}', param="messages")
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        texts: list[str | None] = []
        token_ids = []
        for conversation in conversations:
            text = self._frontend.render_chat(
                conversation,
                add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                template_kwargs=chat_template_kwargs,
            )
            texts.append(text)
            token_ids.append(self._frontend.encode(text, add_special_tokens=False, param="messages"))
        return self._results(texts, token_ids, self._one_each(sampling_params, len(texts)), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str]:
        """The continuation of one prompt, piece by piece. Closing the iterator stops the generation."""
        return self._stream(self._encoded(prompt)[1], sampling_params)

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Generator[str]:
        """The answer to one conversation, piece by piece. Closing the iterator stops the generation."""
        text = self._frontend.render_chat(messages)
        return self._stream(self._frontend.encode(text, add_special_tokens=False, param="messages"), sampling_params)

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Its text, if it has one, and its token ids."""
        text, token_ids = _prompt(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self._frontend.encode(text)
        return text, token_ids

    def _one_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self._defaults] * count
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise InvalidRequestError(
                "sampling_params must be SamplingParams, or one for each prompt", param="sampling_params"
            )
        if len(params) != count:
            raise InvalidRequestError(
                f"there are {count} prompts and {len(params)} sampling_params: give one, or one for each prompt",
                param="sampling_params",
            )
        return list(params)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, token_ids: list[int], params: SamplingParams) -> Request:
        reasoning = None if self._reasoning is None else self._frontend.reasoning_behind(token_ids, self._reasoning)
        return self._frontend.build_request(
            token_ids,
            params,
            request_id=str(next(self._ids)),
            arrival_time=self._clock.now(),
            clamp_max_tokens=True,
            reasoning=reasoning,
            grammar=self._grammar(params, reasoning),
        )

    def _grammar(self, params: SamplingParams, reasoning: ReasoningTags | None) -> str | None:
        if params.structured_outputs is None:
            return None
        around = answer_within(reasoning, self._frontend.special_token)
        grammar = grammar_text(params.structured_outputs, around)
        if grammar not in self._grammars:
            if self._compiler is None:
                setup = self._frontend.grammar_setup()
                self._compiler = GrammarCompiler(setup.token_bytes, setup.special, setup.eos, setup.vocab_size)
            self._compiler.compile(grammar)
            self._grammars.append(grammar)
        return grammar

    def _stream(self, token_ids: list[int], params: SamplingParams | None) -> Generator[str]:
        detokenizer = Detokenizer()
        with closing(self._run([self._request(token_ids, params or self._defaults)])) as outputs:
            for output in outputs:
                text = detokenizer.feed(output)
                if text:
                    yield text

    def _results(
        self, texts: list[str | None], token_ids: list[list[int]], params: list[SamplingParams], use_tqdm: Progress
    ) -> list[PromptResult]:
        requests = [self._request(ids, p) for ids, p in zip(token_ids, params, strict=True)]
        results = [_empty_result(request, text) for text, request in zip(texts, requests, strict=True)]
        by_id = {result.request_id: (result, Detokenizer()) for result in results}
        with _progress(use_tqdm, len(requests)) as bar:
            for output in self._run(requests):
                self._add(*by_id[output.request_id], output)
                if bar is not None and output.finish_reason is not None:
                    bar.update()
        return results

    def _add(self, result: PromptResult, detokenizer: Detokenizer, output: RequestOutput) -> None:
        completion = result.outputs[0]
        completion.text += detokenizer.feed(output)
        completion.token_ids += output.token_ids
        completion.finish_reason = output.finish_reason
        completion.stop_reason = output.stop_reason
        if result.prompt_logprobs is not None and output.prompt_logprobs is not None:
            token_ids = result.prompt_token_ids[len(result.prompt_logprobs) :]
            result.prompt_logprobs += map(self._alternatives, token_ids, output.prompt_logprobs)
        if output.num_cached_tokens is not None:
            result.num_cached_tokens = output.num_cached_tokens
        if completion.logprobs is not None and output.logprobs is not None:
            assert completion.cumulative_logprob is not None
            completion.cumulative_logprob += math.fsum(entry.logprob for entry in output.logprobs)
            completion.logprobs += [
                self._alternatives(token_id, entry)
                for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
            ]

    def _alternatives(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        def decoded(token: int) -> str:
            return self._frontend.token_bytes(token).decode("utf-8", errors="replace")

        best = {
            token: Logprob(logprob, rank, decoded(token))
            for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
        }
        return best | {token_id: Logprob(entry.logprob, entry.rank, decoded(token_id))}

    def _run(self, requests: list[Request]) -> Generator[RequestOutput]:
        """Step the engine until all of `requests` have ended; whatever has not is aborted when this is closed.

        Several may be open at once: each step's outputs go to the inbox of the run that they belong to.
        """
        inbox: deque[RequestOutput] = deque()
        live: set[str] = set()
        try:
            for request in requests:
                with self._exclusive():
                    self._engine.submit(request)
                    live.add(request.request_id)
                    self._inboxes[request.request_id] = inbox
            while live:
                while not inbox:
                    with self._exclusive():
                        if not inbox:  # another thread's step may have filled it
                            self._step()
                output = inbox.popleft()
                if output.finish_reason is not None:
                    live.discard(output.request_id)
                    del self._inboxes[output.request_id]
                if output.finish_reason is FinishReason.ERROR:
                    kind = RequestFailedError if output.is_alone else EngineDeadError
                    raise kind(output.error or "the engine failed on this request")
                yield output
        finally:
            with self._lock:
                for request_id in live:
                    del self._inboxes[request_id]
                    ended = any(output.request_id == request_id and output.finish_reason for output in inbox)
                    if not ended and not self._closed:
                        self._engine.abort(request_id)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception:
            self._close()  # half a step is done: what the cache holds is not known any more
            raise
        for output in outputs:
            self._inboxes[output.request_id].append(output)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock, _interrupts_wait():
            if self._closed:
                raise EngineDeadError("this LLM is closed: make a new one")
            yield


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end: half a step would leave the cache wrong."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])


def _progress(use_tqdm: Progress, total: int) -> Any:
    """A context manager of a bar, or of None."""
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Processed prompts")
    if not use_tqdm or not sys.stderr.isatty():
        return nullcontext()
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, desc="Processed prompts", unit=" prompts")


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many: list[Any] = list(prompts) if isinstance(prompts, Sequence) else [None]
    return [many] if many and _are_ids(many) else many


def _prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """The text and the token ids of a prompt, which has one of them or both. Raises InvalidRequestError."""
    text: Any = None
    ids: Any = None
    match prompt:
        case str():
            text = prompt
        case Mapping():
            for name, value in prompt.items():
                if name not in ("prompt", "prompt_token_ids") and value:
                    raise InvalidRequestError(
                        f"a prompt has {shorten(repr(name))}; it can have prompt (text) or prompt_token_ids",
                        param="prompts",
                    )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        case list():
            ids = prompt
    if isinstance(ids, list) and _are_ids(ids) and isinstance(text, str | None):
        return text, list(ids)
    if ids is None and isinstance(text, str):
        return text, None
    raise InvalidRequestError(
        'prompts must be text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these',
        param="prompts",
    )


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _empty_result(request: Request, prompt: str | None) -> PromptResult:
    params = request.params
    completion = Completion(seed=params.seed)
    if params.logprobs is not None:
        completion.logprobs, completion.cumulative_logprob = [], 0.0
    result = PromptResult(request.request_id, prompt, request.prompt_token_ids, [completion])
    if params.prompt_logprobs is not None:
        result.prompt_logprobs = [None]
    return result
