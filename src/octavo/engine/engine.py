"""The engine: a model file becomes something that takes requests, and `step` moves all of them on by one step.

Composes weights, model graph, backend, cache, scheduler and runner. It knows token ids and the bytes that they show,
but neither how text becomes tokens nor who the clients are.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from octavo.backends.cpu.backend import CpuModel, available_threads, create_executor, instruction_sets
from octavo.core.clock import Clock, SystemClock
from octavo.core.config import ALL_THAT_FITS, EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.records import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    SampledToken,
    Sequence,
    TokenLogprobs,
)
from octavo.engine.generation_config import load_generation_defaults
from octavo.engine.limits import check_token_limits
from octavo.engine.loader import load_model, unknown_overrides
from octavo.engine.memory import ModelMemory, format_bytes, longest_that_fits, plan_memory, read_machine_memory
from octavo.engine.messages import EngineInfo
from octavo.engine.packing import packed
from octavo.engine.progress import packing_progress
from octavo.engine.pulse import Pulse
from octavo.engine.reasoning import ThinkingBudget
from octavo.engine.stop import StopChecker
from octavo.engine.text_side import load_vocabulary, vocabulary_warnings
from octavo.kv_cache.block_watch import BlockWatch
from octavo.kv_cache.manager import KVCacheManager
from octavo.runner.constraint import TokenConstraint
from octavo.runner.runner import Runner
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig
from octavo.structured.compiler import GrammarCompiler, end_token_ids
from octavo.structured.constraint import Constraint, Grammars
from octavo.weights.open_checkpoint import open_checkpoint

DEFAULT_KV_CACHE_DTYPE = "bfloat16"
COMPILE_WAIT = 0.02  # seconds that an otherwise idle engine waits for a grammar before it listens to clients again


@dataclass(slots=True)
class _Live:
    """A request that has not ended: what the scheduler does not know of it."""

    seq: Sequence
    stop: StopChecker
    constraint: Constraint | None
    queued_time: float
    scheduled_time: float = 0.0
    num_outputs: int = 0


class Engine:
    """A loaded model and its requests. One thread at a time.

    scheduler, cache, program: the parts, for tests that look inside. pulse: for whoever watches from another process.
    Raises ConfigError, ModelFileError.
    """

    def __init__(self, config: EngineConfig, pulse: Pulse | None = None, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        warnings: list[str] = []
        assert config.model is not None, "the model has been located"
        checkpoint = open_checkpoint(config.model)
        try:
            loaded = load_model(checkpoint, config.asked_length, config.hf_overrides)
            model = loaded.model
            warnings += unknown_overrides(checkpoint, config.hf_overrides)
            self._vocabulary = load_vocabulary(config, checkpoint)
            self._eos_token_ids = self._vocabulary.eos_token_ids | load_generation_defaults(config).eos_token_ids
            self._ends_of_grammars = frozenset(end_token_ids(self._eos_token_ids, model.vocab_size))
            warnings += vocabulary_warnings(self._vocabulary, self._eos_token_ids, model.vocab_size)
            tensors = packed(loaded.tensors, config, checkpoint.quantized_by)
            max_model_len = _max_model_len(config.asked_length, model.max_position_embeddings)
            budget_tokens = _max_num_batched_tokens(config, warnings)
            executor = create_executor(config.isa, config.threads, None if pulse is None else pulse.kernel_counter)
            cpu_model = CpuModel(
                model.graph,
                tensors,
                executor,
                float_activations=config.activation_dtype == "float32",
                max_tokens=budget_tokens,
                max_sequences=config.max_num_seqs,
            )
            scheduler_config = SchedulerConfig(
                config.max_num_seqs, budget_tokens, max_model_len, config.long_prefill_token_threshold
            )
            kv_dtype = DEFAULT_KV_CACHE_DTYPE if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
            needs = ModelMemory(
                weight_bytes=cpu_model.weight_bytes,
                workspace_bytes=cpu_model.workspace_bytes,
                block_bytes=cpu_model.block_bytes(config.block_size, kv_dtype),
                block_size=config.block_size,
                max_model_len=max_model_len,
                max_chunk=scheduler_config.max_chunk,
                kv_cache_dtype=kv_dtype,
                kv_groups=model.graph.kv_groups,
            )
            machine = read_machine_memory()
            if config.max_model_len == ALL_THAT_FITS and (fitting := longest_that_fits(machine, needs, config)) > 1:
                if fitting < max_model_len:
                    warnings.append(
                        f"there is memory for {fitting:,} of the model's {max_model_len:,} tokens: --max-model-len is "
                        f"{fitting:,}"
                    )
                max_model_len = fitting
                needs = replace(needs, max_model_len=fitting)
                scheduler_config = replace(scheduler_config, max_model_len=fitting)
            memory = plan_memory(machine, needs, config)
            cpu_model.pack(packing_progress(sys.stderr))
            checkpoint.release_pages()
            warnings += checkpoint.warnings
        finally:
            checkpoint.close()

        self.program = cpu_model.allocate(memory.num_blocks, config.block_size, kv_dtype)
        self.cache = KVCacheManager(
            memory.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            model.graph.kv_groups,
            BlockWatch(memory.num_blocks, self._clock, config.kv_cache_metrics_sample)
            if config.kv_cache_metrics
            else None,
        )
        self.scheduler = Scheduler(scheduler_config, self.cache)
        self._runner = Runner(
            self.program,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_kv_groups=len(model.graph.kv_groups),
            vocab_size=model.vocab_size,
            eos_token_ids=self._eos_token_ids,
            constraints_of=self._constraints,
        )
        self._live: dict[int, _Live] = {}  # by seq_id
        self._grammars = Grammars(self._grammar_compiler, model.vocab_size)
        self._compiling: dict[str, tuple[Request, Constraint]] = {}  # by request id: waits for its grammar
        self._stats = EngineStats(num_blocks=memory.num_blocks)
        self._num_new_tokens = 0  # computed since the last snapshot
        name, *other_names = config.served_names or (Path(config.model).stem,)
        self.info = EngineInfo(
            served_model_name=name,
            other_model_names=other_names,
            max_model_len=max_model_len,
            can_be_longer=max_model_len < model.max_position_embeddings,
            max_prompt_tokens=max_model_len - 1,
            vocab_size=model.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_logprobs=config.max_logprobs,
            block_size=config.block_size,
            num_blocks=memory.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_cache_dtype=kv_dtype,
            isa=executor.isa,
            threads=executor.threads,
            memory_table=memory.rows(),
            warnings=[*warnings, *memory.warnings],
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._compiling)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError if it could not be computed, whatever the door let through."""
        self._check(request)
        if request.grammar is None:
            self._add(request, None)
        else:
            banned = sorted(self._eos_token_ids) if request.params.ignore_eos else ()
            self._compiling[request.request_id] = request, self._grammars.constrain(request.grammar, banned)

    def _add(self, request: Request, constraint: Constraint | None) -> None:
        stop = StopChecker(
            request.params,
            self._eos_token_ids,
            len(request.prompt_token_ids),
            self.info.max_model_len,
        )
        seq = self.scheduler.add(request)
        self._live[seq.seq_id] = _Live(seq, stop, constraint, self._clock.now())

    def abort(self, request_id: str) -> None:
        """End a request, if it has not ended; no output follows."""
        self._compiling.pop(request_id, None)
        seq = self.scheduler.abort(request_id)
        if seq is not None:
            self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        live = self._live.pop(seq.seq_id)
        if live.constraint is not None:
            live.constraint.close()

    def step(self) -> list[RequestOutput]:
        """Move on by one step; returns what is new for clients."""
        outputs = self._add_compiled() if self._compiling else []
        plan = self.scheduler.schedule()
        if plan.new:
            now = self._clock.now()
            for seq in plan.new:
                self._live[seq.seq_id].scheduled_time = now
        result = self._runner.execute(plan)
        scored = {prompt.seq_id: prompt.logprobs for prompt in result.scored}
        outputs += [self._take(sampled, scored.pop(sampled.seq_id, None)) for sampled in result.sampled]
        outputs += [
            RequestOutput(request_id=self._live[seq_id].seq.request.request_id, prompt_logprobs=logprobs)
            for seq_id, logprobs in scored.items()
        ]
        for seq in self.scheduler.update(result):
            self._forget(seq)
        self._stats.num_steps += 1
        self._num_new_tokens += plan.num_tokens
        return outputs

    def _add_compiled(self) -> list[RequestOutput]:
        """Queue the requests whose grammars are ready; returns the ends of those whose grammars do not compile."""
        outputs = []
        if not self.scheduler.has_unfinished:
            next(iter(self._compiling.values()))[1].ready.wait(COMPILE_WAIT)
        for request, constraint in [entry for entry in self._compiling.values() if entry[1].ready.is_set()]:
            del self._compiling[request.request_id]
            if constraint.error is None:
                self._add(request, constraint)
            else:
                outputs.append(_failure(request.request_id, constraint.error))
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot, updated in place by the next call."""
        stats, cache = self._stats, self.cache
        stats.num_requests_running = self.scheduler.num_running
        stats.num_requests_waiting = self.scheduler.num_waiting + len(self._compiling)
        stats.num_blocks_in_use = cache.num_blocks_in_use
        stats.num_blocks_cached = cache.num_blocks_cached
        stats.prefix_cache_queries = cache.num_prefix_queries
        stats.prefix_cache_hits = cache.num_prefix_hits
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.num_step_tokens, self._num_new_tokens = self._num_new_tokens, 0
        stats.block_times = cache.take_block_times()
        return stats

    def close(self) -> None:
        """Drop every request, and give back the memory of weights and cache. Nothing but stats may follow."""
        for live in list(self._live.values()):
            self.abort(live.seq.request.request_id)
        self._compiling.clear()
        self._grammars.close()
        if hasattr(self, "program"):  # closing twice is harmless
            del self.program, self._runner

    def _take(self, sampled: SampledToken, prompt_logprobs: list[TokenLogprobs] | None) -> RequestOutput:
        """The news that a sampled token is; marks it if it ends its request."""
        live = self._live[sampled.seq_id]
        request, first = live.seq.request, live.num_outputs == 0
        if live.constraint is not None and live.constraint.error is not None:
            sampled.finish_reason = FinishReason.ERROR
            return _failure(request.request_id, live.constraint.error)
        live.num_outputs += 1
        text = self._visible_bytes(request.params.skip_special_tokens, sampled.token_id)
        if live.constraint is not None and sampled.token_id in self._ends_of_grammars:
            # Allowed only where the grammar may end; with ignore_eos or min_tokens, only where it must.
            released, sampled.finish_reason, stop_reason = live.stop.flush(), FinishReason.STOP, None
        else:
            released, sampled.finish_reason, stop_reason = live.stop.push(sampled.token_id, text, live.num_outputs)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[sampled.token_id],
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            text=released,
            finish_reason=sampled.finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=live.seq.num_cached_tokens if first else None,
            queued_time=live.queued_time if first else 0.0,
            scheduled_time=live.scheduled_time if first else 0.0,
        )

    def _grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(
            self._vocabulary.token_bytes,
            (i for i, special in enumerate(self._vocabulary.is_special) if special),
            self._eos_token_ids,
            self.info.vocab_size,
        )

    def _visible_bytes(self, skip_special_tokens: bool, token_id: int) -> bytes:
        if token_id >= self._vocabulary.vocab_size:  # the model's matrix may be padded beyond the vocabulary
            return b""
        return self._vocabulary.visible_bytes(token_id, skip_special_tokens)

    def _constraints(self, seq: Sequence) -> list[TokenConstraint]:
        """What holds the output to a form; later ones have the last word."""
        constraints: list[TokenConstraint] = []
        request, constraint = seq.request, self._live[seq.seq_id].constraint
        budget = request.params.thinking_token_budget
        if budget is not None and request.reasoning is not None:
            constraints.append(ThinkingBudget(budget, request.reasoning, partial(self._visible_bytes, False)))
        if constraint is not None:
            constraints.append(constraint)
        return constraints

    def _check(self, request: Request) -> None:
        prompt, limit, vocab_size = request.prompt_token_ids, self.info.max_prompt_tokens, self.info.vocab_size
        if not 1 <= len(prompt) <= limit:
            raise InvalidRequestError(
                f"the prompt has {len(prompt):,} tokens; it must have 1 to {limit:,}: "
                f"{self.info.ways_out_of_length('shorten it')}",
                param="prompt",
                code="context_length_exceeded" if prompt else None,
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise InvalidRequestError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}; the model knows 0 to {vocab_size - 1}: "
                "use its own tokenizer",
                param="prompt",
            )
        check_token_limits(request.params, len(prompt), vocab_size, self.info.max_logprobs)
        assert request.params.seed is not None, "the door resolves seeds"


def _failure(request_id: str, error: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error, is_alone=True)


def system_info() -> list[tuple[str, str]]:
    """What `octavo info` shows of this machine: (name, value)."""
    memory = read_machine_memory()
    best, *others = instruction_sets()
    return [
        ("processor", _processor_name()),
        ("instruction sets", ", ".join([f"{best} (used by default)", *others])),
        ("threads", f"{available_threads()}"),
        ("memory", f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} available"),
    ]


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _max_model_len(asked: int | None, limit: int) -> int:
    wanted = limit if asked is None else asked
    if not 2 <= wanted <= limit:
        raise ConfigError(
            f"--max-model-len is {wanted:,}; this model allows 2 to {limit:,} tokens (one of prompt and one of output "
            "at least): choose a value in this range, or leave it out for the most"
        )
    return wanted


def _max_num_batched_tokens(config: EngineConfig, warnings: list[str]) -> int:
    if config.max_num_batched_tokens >= config.max_num_seqs:
        return config.max_num_batched_tokens
    warnings.append(
        f"--max-num-batched-tokens is {config.max_num_batched_tokens}, raised to {config.max_num_seqs}: each of the "
        "--max-num-seqs running requests needs a token a step"
    )
    return config.max_num_seqs
