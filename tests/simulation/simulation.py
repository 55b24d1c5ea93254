"""Seeded random workloads through the real engine: every request must come out as if it had run alone, bit for bit.

`simulate(seed)` draws a tiny model, an engine configuration and a workload (arrivals over time, shared prefixes,
aborts, pools that force preemption), runs it with the cache's invariants checked after every step, and then runs each
request alone in a fresh engine with other threads, blocks and chunks. What may round differently by design is the same
on both sides: instruction set, KV and activation data type. All cache memory is NaN before it is written.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from octavo.backends.cpu.backend import instruction_sets
from octavo.backends.cpu.lowering import NATURAL_STORAGE
from octavo.core.config import EngineConfig
from octavo.core.records import (
    FinishReason,
    ReasoningTags,
    RepetitionDetection,
    Request,
    RequestOutput,
    SamplingParams,
    SequenceStatus,
    StructuredOutputs,
    TokenLogprobs,
)
from octavo.engine.engine import Engine
from octavo.kv_cache.groups import blocks_of_sequence, kinds_of
from octavo.quantization.formats import FORMATS, GGML_TYPES
from octavo.structured.grammar import grammar_text
from tests.tiny_models import TinyLlama, write_tiny_llama

NUM_MODELS = 64
PARTITION = 256  # tokens of a context that attention softmaxes alone (csrc/program.h)
BLOCK_SIZES = (8, 16, 32)
THREADS = (1, 2, 3)
WEIGHT_TYPES = tuple(kind for kind in NATURAL_STORAGE if kind in GGML_TYPES)
KV_DTYPES = ("float32", "float16", "bfloat16")
MATRICES = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
GRAMMARS = (
    grammar_text(StructuredOutputs(regex="[a-e]{2,60}")),
    grammar_text(StructuredOutputs(grammar='start: "a" | "b" start "c"')),
    grammar_text(StructuredOutputs(json={"type": "object", "additionalProperties": {"type": "integer"}})),
    'start: "abcdefg" "h" /[i-p]+/',  # which forces tokens
)
ENOUGH_SEEDS = 300  # after so many, each event must have happened

MakeEngine = Callable[[EngineConfig], Engine]


class SimulationError(AssertionError):
    """A seed failed; the message is one line that says how to replay it."""


@dataclass(frozen=True)
class Planned:
    request: Request
    arrival_step: int
    abort_step: int | None


@dataclass
class Answer:
    """All that a client hears of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_pieces: int = 0  # that these came in
    text: bytes = b""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output follows the end"
        is_first = bool(output.token_ids) and not self.token_ids
        assert (output.num_cached_tokens is not None) == is_first, "cached tokens are told once, at first"
        assert output.prompt_logprobs is None or not self.token_ids, "the prompt comes before the second token"
        self.prompt_logprobs += output.prompt_logprobs or []
        self.num_pieces += output.prompt_logprobs is not None
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.text += output.text
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass(frozen=True)
class Workload:
    model: TinyLlama
    crowded: EngineConfig
    alone: EngineConfig
    requests: list[Planned]


def run_seeds(
    seeds: Iterable[int],
    on_seed: Callable[[int, Counter[str]], None] = lambda seed, events: None,
    make_engine: MakeEngine = Engine,
) -> Counter[str]:
    """Simulate them all; returns how often each event happened. Raises SimulationError at the first that fails."""
    events: Counter[str] = Counter()
    for seed in seeds:
        try:
            events += simulate(seed, make_engine)
        except Exception as error:
            raise SimulationError(
                f"seed {seed}: {type(error).__name__}: {error} | replay: python -m tests.simulation --seeds 1 "
                f"--start {seed}"
            ) from error
        on_seed(seed, events)
    return events


def missing_events(events: Counter[str]) -> list[str]:
    """What the simulation is there for and never happened."""
    wanted = ["preemption", "prefix hit", "abort while waiting", "abort while running", "chunked prefill"]
    wanted += ["several partitions in decode", "several partitions in a chunk", "prefix hit after preemption"]
    wanted += ["greedy", "sampled", "penalties", "stop string", "stop token", "end of sequence", "length"]
    wanted += ["grammar", "end of a grammar", "preemption within a grammar"]
    wanted += ["bias", "allowed ids", "bad words", "thinking budget", "repetition", "whole vocabulary"]
    wanted += ["prompt scored", "prompt scored in pieces", "preemption of a prompt half scored"]
    wanted += ["full layers", "sliding layers", "full and sliding layers"]
    wanted += ["longer than the window", "prefix hit longer than the window"]
    wanted += ["experts", "no experts", "tied embeddings", "head of its own", "float activations", "no prefix cache"]
    wanted += [f"{n} threads" for n in THREADS] + [f"blocks of {n}" for n in BLOCK_SIZES]
    for isa in instruction_sets():
        wanted += [f"{isa} {kind.name}" for kind in WEIGHT_TYPES] + [f"{isa} {dtype}" for dtype in KV_DTYPES]
    return [event for event in wanted if not events[event]]


def simulate(seed: int, make_engine: MakeEngine = Engine) -> Counter[str]:
    """Returns the events. Raises AssertionError if a request differs from itself run alone, or an invariant breaks.

    `make_engine` makes the engine that runs the whole workload.
    """
    workload = draw_workload(random.Random(seed))
    events: Counter[str] = Counter()
    answers = _run_crowded(workload, make_engine, events)
    for planned in workload.requests:
        answer = answers[planned.request.request_id]
        if answer.token_ids or answer.prompt_logprobs:
            _compare(answer, _run_alone(workload.alone, planned.request), planned.request)
    _count(workload, answers, events)
    return events


def draw_workload(rng: random.Random) -> Workload:
    model = draw_model(rng.randrange(NUM_MODELS))
    long = rng.random() < 0.12
    max_model_len = rng.randint(PARTITION + 40, 3 * PARTITION) if long else rng.randint(24, 120)
    block_size, other_block_size = rng.sample(BLOCK_SIZES, 2)
    threads, other_threads = rng.sample(THREADS, 2)
    max_num_seqs = rng.choice([1, 2, 4, 8])
    path = str(model_path(model))
    isa = rng.choice(instruction_sets())
    kv_dtype = rng.choice(KV_DTYPES)
    activation_dtype = rng.choice(["auto", "auto", "float32"])
    max_num_batched_tokens = max(max_num_seqs, rng.choice([64, 300] if long else [1, 5, 9, 17, 40, 128]))
    blocks_of_one = _blocks_of_one(model, max_model_len, max_num_batched_tokens, block_size)
    tokens_alone = rng.choice([100, 512] if long else [3, 13, 31, 512])
    crowded = EngineConfig(
        model=path,
        isa=isa,
        kv_cache_dtype=kv_dtype,
        activation_dtype=activation_dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        threads=threads,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks_override=blocks_of_one + rng.choice([0, 0, 1, 2, blocks_of_one, 6 * blocks_of_one]),
        enable_prefix_caching=rng.random() < 0.85,
        max_logprobs=-1,
    )
    alone = EngineConfig(
        model=path,
        isa=isa,
        kv_cache_dtype=kv_dtype,
        activation_dtype=activation_dtype,
        max_model_len=max_model_len,
        block_size=other_block_size,
        threads=other_threads,
        max_num_seqs=1,
        max_num_batched_tokens=tokens_alone,
        num_gpu_blocks_override=_blocks_of_one(model, max_model_len, tokens_alone, other_block_size),
        enable_prefix_caching=False,
        max_logprobs=-1,
    )
    num_requests = rng.randint(2, 4) if long else rng.randint(3, 10)
    return Workload(model, crowded, alone, _draw_requests(rng, model, max_model_len, num_requests))


def _blocks_of_one(model: TinyLlama, max_model_len: int, max_chunk: int, block_size: int) -> int:
    return blocks_of_sequence(kinds_of(model.kv_groups), max_model_len, max_chunk, block_size)


@cache
def draw_model(number: int) -> TinyLlama:
    """Models by number, so that their files can be shared between seeds."""
    rng = random.Random(f"model {number}")
    num_kv_heads = rng.choice([1, 1, 2, 3])
    num_heads = num_kv_heads * rng.randint(1, 6 // num_kv_heads)
    head_dim = rng.choice([32, 40, 48, 64, 80])
    kind = WEIGHT_TYPES[number % len(WEIGHT_TYPES)]
    wide = FORMATS[kind].block_length > 32
    mixed = rng.random() < 0.5
    num_layers = rng.choice([1, 1, 2, 3])
    window = random.Random(f"window {number}").choice([0, 0, 0, 1, 7, 16, 33, 64, 300])
    num_experts = random.Random(f"experts {number}").choice([0, 0, 0, 1, 3, 8])
    return TinyLlama(
        hidden_size=256 if wide else rng.choice([32, 64, 96, 160]),
        intermediate_size=256 if wide else rng.choice([32, 96, 160, 224]),
        num_layers=num_layers,
        num_experts=num_experts,
        experts_per_token=min(2, num_experts),
        windows=tuple(0 if layer % 3 == number % 2 else window for layer in range(num_layers)) if window else (),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rng.choice([None, None, head_dim // 2]),
        vocab_size=rng.randint(300, 500),
        num_padding_ids=rng.choice([0, 0, 40]),
        tied_embeddings=rng.random() < 0.5,
        attention_bias=rng.random() < 0.2,
        type=kind,
        types=tuple((name, rng.choice(WEIGHT_TYPES)) for name in MATRICES if rng.random() < 0.5) if mixed else (),
        seed=number,
    )


@cache
def model_path(model: TinyLlama) -> Path:
    return write_tiny_llama(_model_folder() / f"{model.seed}.gguf", model)


def _model_folder() -> Path:
    return Path(_temporary_folder().name)


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="octavo-simulation-")


def _draw_requests(rng: random.Random, model: TinyLlama, max_model_len: int, count: int) -> list[Planned]:
    def tokens(n: int) -> list[int]:
        return [rng.randrange(model.vocab_size) for _ in range(n)]

    # Either prompts fill most of a sequence, or it is output that grows until the pool is exhausted.
    longest, most_output = rng.choice([(max_model_len - 1, 12), (max_model_len - 1, 40), (max_model_len // 3, 120)])
    families = [tokens(rng.randint(longest // 2, longest)) for _ in range(rng.randint(1, 2))]
    requests = []
    for i in range(count):
        family = rng.choice(families)
        beginning = family[: rng.choice([0, len(family), rng.randint(1, len(family))])]
        prompt = (beginning + tokens(rng.choice([0, 1, rng.randint(1, 40)])))[:longest] or tokens(1)
        room = min(max_model_len - len(prompt), most_output)
        arrival = rng.choice([0, 0, 1, rng.randrange(30)])
        request = Request(
            request_id=f"request-{i}",
            prompt_token_ids=prompt,
            params=_draw_params(rng, model, max_tokens=rng.choice([room, rng.randint(1, room)])),
            arrival_time=0.0,
            cache_salt=rng.choice([None, None, None, "salt"]),
            grammar=random.Random(f"grammar {prompt}").choice([*[None] * 9, *GRAMMARS]),
            reasoning=ReasoningTags(
                starts=rng.choice([(), ("a", "e", "\x05", " ")]),
                ends=rng.choice([("never to be said",), ("i", "o")]),
                is_open=rng.random() < 0.5,
                end_token_ids=tuple(tokens(rng.randint(1, 3))),
            ),
        )
        requests.append(Planned(request, arrival, arrival + rng.randrange(25) if rng.random() < 0.15 else None))
    return requests


def _draw_params(rng: random.Random, model: TinyLlama, max_tokens: int) -> SamplingParams:
    def some(chance: float, count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(model.vocab_size) for _ in range(count)) if rng.random() < chance else ()

    penalised, stopping = rng.random() < 0.2, rng.random() < 0.3
    allowed = some(0.2, rng.choice([2, 30]))
    # Bad words are likely to come where few tokens may.
    bad_words = [some(1, rng.randint(1, 2)) for _ in range(rng.choice([0, 0, 1, 20]))]
    bad_words += [tuple(rng.choices(allowed, k=2))] if allowed else []
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.8]),
        top_k=rng.choice([0, 0, 1, 20]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 1.5]) if penalised else 0.0,
        frequency_penalty=rng.choice([0.0, 0.5]) if penalised else 0.0,
        repetition_penalty=1.2 if penalised else 1.0,
        seed=rng.getrandbits(63),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        logprobs=rng.choice([0, 1, 5, -1]),
        prompt_logprobs=rng.choice([None, None, None, 0, 2, -1]),
        logit_bias={t: rng.choice([-100, -2.5, 3, 100]) for t in some(0.2, 5)} or None,
        allowed_token_ids=allowed or None,
        bad_words_token_ids=tuple(bad_words),
        repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3) if rng.random() < 0.3 else None,
        thinking_token_budget=rng.choice([None, None, 0, 3]),
        stop=tuple(rng.sample("abcdehilmnoprstu", 6)) if stopping else (),
        stop_token_ids=tuple(rng.randrange(model.vocab_size) for _ in range(12)) if stopping else (),
        include_stop_str_in_output=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
    )


def _new_engine(config: EngineConfig, make_engine: MakeEngine) -> Engine:
    engine = make_engine(config)
    engine.program.pool.fill(0xFF)
    return engine


def _run_crowded(workload: Workload, make_engine: MakeEngine, events: Counter[str]) -> dict[str, Answer]:
    engine = _new_engine(workload.crowded, make_engine)
    answers: dict[str, Answer] = {}
    aborted: set[str] = set()
    last_step = max(max(p.arrival_step, p.abort_step or 0) for p in workload.requests)
    step = 0
    while step <= last_step or engine.has_work:
        for planned in workload.requests:
            request_id = planned.request.request_id
            if planned.arrival_step == step:
                engine.submit(planned.request)
                answers[request_id] = Answer()
            if planned.abort_step == step and answers[request_id].finish_reason is None:
                events["abort while running" if answers[request_id].token_ids else "abort while waiting"] += 1
                engine.abort(request_id)
                aborted.add(request_id)
        for _, constraint in engine._compiling.values():
            constraint.ready.wait()  # how long that takes shall not decide what a seed does
        for output in engine.step():
            assert output.request_id not in aborted, "an output follows an abort"
            answers[output.request_id].add(output)
        for live in engine._live.values():
            num_scored = len(answers[live.seq.request.request_id].prompt_logprobs)
            half = 0 < num_scored < live.seq.num_prompt_tokens - 1
            inside = live.constraint is not None and live.num_outputs > 0
            events["preemption within a grammar"] += inside and live.seq.status is SequenceStatus.WAITING
            events["preemption of a prompt half scored"] += half and live.seq.status is SequenceStatus.WAITING
        engine.cache.check_invariants()
        assert engine.scheduler.num_running <= workload.crowded.max_num_seqs
        step += 1
        assert step < 5_000, "requests wait for ever"
    stats = engine.stats()
    assert stats.num_blocks_in_use == stats.num_requests_running == stats.num_requests_waiting == 0
    assert all(a.finish_reason for request_id, a in answers.items() if request_id not in aborted)
    events["preemption"] += stats.num_preemptions
    events["prefix hit"] += stats.prefix_cache_hits > 0
    events["prefix hit after preemption"] += stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    return answers


def _run_alone(config: EngineConfig, request: Request) -> Answer:
    engine = _new_engine(config, Engine)
    engine.submit(request)
    answer = Answer()
    while engine.has_work:
        for output in engine.step():
            answer.add(output)
    return answer


def _compare(answer: Answer, alone: Answer, request: Request) -> None:
    """An aborted request has said the beginning of what it says alone."""
    who, n = request.request_id, len(answer.token_ids)
    num_scored = len(answer.prompt_logprobs)
    assert answer.prompt_logprobs == alone.prompt_logprobs[:num_scored], f"{who}: prompt logprobs differ"
    assert not n or num_scored == len(alone.prompt_logprobs), f"{who}: {num_scored} prompt logprobs"
    for i, (ours, theirs) in enumerate(zip(answer.token_ids, alone.token_ids, strict=False)):
        assert ours == theirs, f"{who}: token {i} is {ours}, alone it is {theirs}"
        ours_logprobs, theirs_logprobs = answer.logprobs[i], alone.logprobs[i]
        assert ours_logprobs == theirs_logprobs, f"{who}: logprobs {i} are {ours_logprobs}, alone {theirs_logprobs}"
    assert n <= len(alone.token_ids), f"{who}: {n} tokens, alone {len(alone.token_ids)}"
    if answer.finish_reason is None:
        assert alone.text.startswith(answer.text), f"{who}: text {answer.text!r}, alone {alone.text!r}"
        return
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        ours, theirs = getattr(answer, name), getattr(alone, name)
        assert ours == theirs, f"{who}: {name} is {ours!r}, alone {theirs!r}"


def _count(workload: Workload, answers: dict[str, Answer], events: Counter[str]) -> None:
    """Notes what the configuration and the answers show to have happened."""
    model, config = workload.model, workload.crowded
    for name, shape in model.shapes().items():
        if len(shape) == 2:
            events[f"{config.isa} {model.type_of(name, shape).name}"] += 1
    events[f"{config.isa} {config.kv_cache_dtype}"] += 1
    events["tied embeddings" if model.tied_embeddings else "head of its own"] += 1
    events["float activations"] += config.activation_dtype == "float32"
    kinds = {group.kind for group in model.kv_groups}
    events[f"{' and '.join(sorted(kinds))} layers"] += 1
    events["experts" if model.num_experts else "no experts"] += 1
    events["no prefix cache"] += not config.enable_prefix_caching
    for side in (config, workload.alone):
        events[f"{side.threads} threads"] += 1
        events[f"blocks of {side.block_size}"] += 1
    window = max(model.windows, default=0)
    for planned in workload.requests:
        answer, request = answers[planned.request.request_id], planned.request
        num_prompt, num_outputs = len(request.prompt_token_ids), len(answer.token_ids)
        if not num_outputs:
            continue
        if window and num_prompt + num_outputs > window + config.block_size:
            events["longer than the window"] += 1
            events["prefix hit longer than the window"] += (answer.num_cached_tokens or 0) > window
        events["chunked prefill"] += num_prompt > config.max_num_batched_tokens
        events["several partitions in a chunk"] += num_prompt > PARTITION
        events["several partitions in decode"] += num_prompt + num_outputs - 1 > PARTITION and num_outputs > 1
        params = request.params
        events["greedy" if params.greedy else "sampled"] += 1
        events["grammar"] += request.grammar is not None
        ended = answer.finish_reason is FinishReason.STOP and answer.stop_reason is None
        events["end of a grammar"] += request.grammar is not None and ended
        events["penalties"] += params.has_penalties
        events["bias"] += params.logit_bias is not None
        events["allowed ids"] += params.allowed_token_ids is not None
        events["bad words"] += bool(params.bad_words_token_ids)
        events["whole vocabulary"] += params.logprobs == -1
        events["prompt scored"] += answer.num_pieces > 0
        events["prompt scored in pieces"] += answer.num_pieces > 1
        events["thinking budget"] += params.thinking_token_budget is not None and _has_been_ended(request, answer)
        events["repetition"] += answer.finish_reason is FinishReason.REPETITION
        events["length"] += answer.finish_reason is FinishReason.LENGTH
        if answer.finish_reason is FinishReason.STOP:
            reason = answer.stop_reason
            kind = "end of sequence" if reason is None else "stop token" if isinstance(reason, int) else "stop string"
            events[kind] += 1


def _has_been_ended(request: Request, answer: Answer) -> bool:
    """Whether the tokens that end a reasoning are in the answer."""
    assert request.reasoning is not None
    end = list(request.reasoning.end_token_ids)
    return any(answer.token_ids[i : i + len(end)] == end for i in range(len(answer.token_ids)))
