"""The flags of `vllm serve` and `vllm bench serve` that octavo has no flag for, and what becomes of each: accepted,
accepted with a note, or refused with what to do instead. For the command line, config files, the environment and
Python.

Knows no parser. Names and values are those of vLLM 0.6 to 0.32; what octavo does have under the same name is in WORKS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, shorten

Verdict = Literal["silent", "note", "refused"]
Kind = Literal["value", "values", "switch", "optional"]
SILENT: Verdict = "silent"  # nothing depends on it, or octavo does so anyway
NOTE: Verdict = "note"  # accepted, and a line at start says what it means here
REFUSED: Verdict = "refused"
NOTHING = ("", "none", "null", "false", "{}", "[]", "()")  # values that ask for nothing, whatever the flag

# vLLM's flags that octavo has under the same name.
WORKS = (
    "model tokenizer tokenizer-revision served-model-name dtype quantization revision download-dir hf-overrides "
    "generation-config override-generation-config max-model-len block-size kv-cache-dtype enable-prefix-caching "
    "gpu-memory-utilization kv-cache-memory-bytes num-gpu-blocks-override max-num-batched-tokens max-num-seqs "
    "long-prefill-token-threshold seed host port uds root-path disable-fastapi-docs enable-auto-tool-choice "
    "tool-call-parser reasoning-parser api-key ssl-certfile ssl-keyfile ssl-ca-certs ssl-cert-reqs allowed-origins "
    "allowed-methods allowed-headers allow-credentials h11-max-incomplete-event-size h11-max-header-count "
    "enable-request-id-headers disable-uvicorn-access-log disable-access-log-for-endpoints enable-log-requests "
    "max-log-len config max-logprobs kv-cache-metrics kv-cache-metrics-sample chat-template "
    "chat-template-content-format response-role default-chat-template-kwargs trust-request-chat-template ssl-ciphers "
    "max-num-queued-reqs stream-interval disable-log-stats uvicorn-log-level shutdown-timeout"
)

# (group, verdict, what is said, flags). A flag is its name, /SHORT for another spelling, then ! for a switch, + for
# several values or ? for a value that may be left out, then =A,B for values that are accepted in silence ("true" of a
# switch). A switch that is off is accepted in silence, unless it is being on that is.
_TABLE: tuple[tuple[str, Verdict, str, str], ...] = (
    (
        "model",
        NOTE,
        "no code of a model's repository is ever run",
        "trust-remote-code! code-revision",
    ),
    (
        "model",
        REFUSED,
        "models generate text here; there are no embeddings, scores or classes",
        "task=auto,generate runner=auto,generate convert=auto,none pooler-config override-pooler-config "
        "pooler-type io-processor-plugin",
    ),
    (
        "model",
        NOTE,
        "a model's files say by themselves how they are read",
        "tokenizer-mode=auto,hf,fast config-format=auto,hf",
    ),
    (
        "model",
        REFUSED,
        "weights are read from safetensors or GGUF files, whichever the model has",
        "load-format=auto,safetensors,gguf,hf pt-load-map-location=cpu model-loader-extra-config model-weights",
    ),
    ("model", REFUSED, "the server takes and gives text", "skip-tokenizer-init! enable-prompt-embeds! tokens-only!"),
    ("model", REFUSED, "use --hf-overrides, or put config.json into the model's folder", "hf-config-path"),
    (
        "model",
        REFUSED,
        "everybody on this machine can see it there: set the environment's HF_TOKEN",
        "hf-token?=true",
    ),
    (
        "model",
        REFUSED,
        "use --hf-overrides '{\"rope_scaling\": {...}}' or '{\"rope_theta\": N}'",
        "rope-scaling rope-theta",
    ),
    ("model", REFUSED, "use --max-model-len with the length of the window", "disable-sliding-window!"),
    (
        "model",
        REFUSED,
        "octavo has its own code for each architecture (docs/supported_models.md)",
        "model-impl=auto,vllm model-class-overrides",
    ),
    ("model", REFUSED, "use --quantization", "quantization-config quantization-param-path"),
    ("model", NOTE, "what --quantization can be is in docs/model_files.md", "allow-deprecated-quantization!"),
    ("model", REFUSED, "use --kv-cache-dtype", "override-attention-dtype"),
    (
        "model",
        REFUSED,
        "no code is loaded; requests have logit_bias, bad_words, allowed_token_ids and structured_outputs",
        "logits-processors+ logits-processor-pattern",
    ),
    (
        "model",
        REFUSED,
        "log-probabilities are the model's own, before penalties and temperature (raw_logprobs)",
        "logprobs-mode=raw_logprobs",
    ),
    ("model", NOTE, "the draw inverts the cumulative distribution and needs no such noise", "use-fp64-gumbel!"),
    (
        "model",
        REFUSED,
        "it is not measured or kept",
        "enable-return-routed-experts! return-sampling-mask! enable-trace-replay!",
    ),
    ("model", REFUSED, "a server without requests uses no CPU; end it to free its memory", "enable-sleep-mode!"),
    ("model", NOTE, "long prompts are tokenized in threads anyway", "renderer-num-workers=1 tokenizer-pool-size=0"),
    (
        "model",
        NOTE,
        "long prompts are tokenized in threads anyway",
        "tokenizer-pool-type tokenizer-pool-extra-config",
    ),
    ("model", NOTE, "the model is loaded by one process", "max-parallel-loading-workers"),
    (
        "model",
        NOTE,
        "files are mapped into memory, and pages are read as they are needed",
        "safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size",
    ),
    ("model", NOTE, "only weights, settings and tokenizer files are downloaded", "ignore-patterns+"),
    ("model", SILENT, "progress is shown in a terminal", "use-tqdm-on-load!"),
    ("model", REFUSED, "this build computes on the CPU", "device=auto,cpu device-ids override-neuron-config"),
    (
        "kernels",
        NOTE,
        "nothing is compiled or captured: kernels are ready, and a step is always run the same way",
        "enforce-eager! compilation-config/-cc/-O optimization-level performance-mode cudagraph-capture-sizes+ "
        "cuda-graph-sizes+ max-cudagraph-capture-size max-seq-len-to-capture max-context-len-to-capture "
        "jit-monitor-mode jit-monitor-verbose!",
    ),
    (
        "kernels",
        NOTE,
        "kernels are chosen by the processor; --isa forces a set, --threads says how many threads",
        "attention-backend attention-config/-ac kernel-config moe-backend linear-backend ir-op-priority "
        "gdn-prefill-backend kda-prefill-backend enable-flashinfer-autotune! enable-bf16x3-router-gemm! "
        "disable-cascade-attn!=true mamba-backend mamba-ssu-algorithm enable-flash-late-interaction!=true",
    ),
    (
        "kernels",
        NOTE,
        "it is about GPUs",
        "enable-cumem-allocator! enable-nccl-comm-suspend! disable-custom-all-reduce! calculate-kv-scales!",
    ),
    ("kernels", REFUSED, "start octavo under numactl", "numa-bind! numa-bind-nodes+ numa-bind-cpus+"),
    (
        "cache",
        NOTE,
        "a preempted request is computed again, so nothing is swapped",
        "swap-space=0",
    ),
    ("cache", REFUSED, "preempted requests are computed again", "preemption-mode=recompute"),
    (
        "cache",
        NOTE,
        "weights are in this machine's memory already",
        "cpu-offload-gb=0 cpu-offload-params+ offload-backend offload-group-size offload-num-in-group "
        "offload-prefetch-step offload-params+",
    ),
    (
        "cache",
        REFUSED,
        "the KV cache is in this machine's memory already: size it with --kv-cache-memory-bytes",
        "kv-offloading-size kv-offloading-backend=native",
    ),
    (
        "cache",
        NOTE,
        "prefixes are found by their tokens themselves, without hashes",
        "prefix-caching-hash-algo",
    ),
    (
        "cache",
        REFUSED,
        "the least recently used blocks of the cache go first, and all layers are stored alike",
        "prefix-cache-retention-interval prefix-match-unit kv-cache-dtype-skip-layers+",
    ),
    (
        "cache",
        NOTE,
        "layers with a sliding window keep their window only, always",
        "disable-hybrid-kv-cache-manager! kv-sharing-fast-prefill!",
    ),
    ("cache", SILENT, "there is one block manager", "use-v2-block-manager! num-lookahead-slots"),
    (
        "cache",
        NOTE,
        "it is about models with recurrent layers, which are not supported",
        "mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode replayssm-buffer-len "
        "use-replayssm! enable-mamba-cache-stochastic-rounding! mamba-cache-philox-rounds",
    ),
    (
        "scheduler",
        NOTE,
        "prompts are always computed in chunks, of at most --max-num-batched-tokens tokens a step",
        "enable-chunked-prefill!=true",
    ),
    ("scheduler", REFUSED, "requests are served in the order of arrival", "scheduling-policy=fcfs"),
    ("scheduler", REFUSED, "use --max-num-batched-tokens", "max-num-scheduled-tokens"),
    ("scheduler", REFUSED, "use --max-num-queued-reqs", "max-num-queued-tokens"),
    (
        "scheduler",
        NOTE,
        "use --long-prefill-token-threshold to let short prompts pass long ones",
        "max-num-partial-prefills=1 max-long-partial-prefills=1",
    ),
    (
        "scheduler",
        NOTE,
        "steps are planned one at a time, and every token is sent at once",
        "async-scheduling! num-scheduler-steps=1 multi-step-stream-outputs!=true disable-async-output-proc! "
        "prefill-schedule-interval=1 scheduler-delay-factor=0,0.0 scheduler-reserve-full-isl!=true watermark=0,0.0",
    ),
    ("scheduler", REFUSED, "no code is loaded", "scheduler-cls worker-cls=auto worker-extension-cls"),
    (
        "parallel",
        REFUSED,
        "one process computes with all cores (--threads); there is no second device to share with",
        "tensor-parallel-size/-tp=1 pipeline-parallel-size/-pp=1 data-parallel-size/-dp=1 "
        "decode-context-parallel-size/-dcp=1 prefill-context-parallel-size/-pcp=1 nnodes/-n=1 node-rank/-r=0 "
        "data-parallel-rank/-dpn=0 data-parallel-start-rank/-dpr=0 data-parallel-size-local/-dpl=1 "
        "data-parallel-hybrid-lb/-dph! data-parallel-external-lb/-dpe! data-parallel-multi-port-external-lb/-dpm! "
        "distributed-executor-backend=mp,uni worker-use-ray! headless! speculative-draft-tensor-parallel-size=1",
    ),
    (
        "parallel",
        NOTE,
        "one process computes with all cores (--threads); there is nobody to talk to",
        "master-addr master-port distributed-timeout-seconds cpu-distributed-timeout-seconds "
        "data-parallel-address/-dpa data-parallel-rpc-port/-dpp data-parallel-backend/-dpb=mp dcp-comm-backend "
        "dcp-q-replicate! dcp-kv-cache-interleave-size cp-kv-cache-interleave-size ray-workers-use-nsight! "
        "dp-sync-interval disable-nccl-for-dp-synchronization! data-parallel-supervisor-port "
        "dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold "
        "enable-batch-sharded-sampling!",
    ),
    (
        "parallel",
        NOTE,
        "all experts are in one process",
        "enable-expert-parallel/-ep! enable-ep-weight-filter! all2all-backend enable-elastic-ep! enable-eplb! "
        "eplb-config expert-placement-strategy enable-dbo! ubatch-size dbo-decode-token-threshold "
        "dbo-prefill-token-threshold",
    ),
    (
        "parallel",
        NOTE,
        "an engine that fails is seen and started again anyway",
        "enable-fault-tolerance! fault-tolerance-config",
    ),
    (
        "parallel",
        REFUSED,
        "one process talks to all clients",
        "api-server-count/-asc=1",
    ),
    ("parallel", NOTE, "the engine always has a process of its own", "disable-frontend-multiprocessing!"),
    (
        "multimodal",
        NOTE,
        "octavo takes text only",
        "limit-mm-per-prompt mm-processor-kwargs media-io-kwargs mm-processor-cache-gb mm-processor-cache-type "
        "disable-mm-preprocessor-cache! mm-shm-cache-max-object-size-mb mm-hasher-algorithm mm-encoder-tp-mode "
        "mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path "
        "mm-encoder-fp8-scale-save-margin interleave-mm-strings! skip-mm-profiling! video-pruning-rate "
        "video-pruning-method mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb mm-device-do-normalize! "
        "disable-chunked-mm-input! enable-mm-processor-stats!",
    ),
    ("multimodal", REFUSED, "octavo takes text only", "mm-encoder-only! enable-mm-embeds!"),
    ("multimodal", SILENT, "octavo takes text only", "language-model-only!"),
    (
        "multimodal",
        NOTE,
        "nothing that a request names is ever opened",
        "allowed-local-media-path allowed-media-domains+",
    ),
    (
        "lora",
        REFUSED,
        "adapters are not supported: merge the adapter into its model (peft's merge_and_unload) and serve that",
        "enable-lora! lora-modules+ max-loras=1 max-lora-rank=16 max-cpu-loras lora-dtype=auto fully-sharded-loras! "
        "default-mm-loras enable-tower-connector-lora! lora-target-modules+ specialize-active-lora! "
        "enable-mixed-moe-lora-format! enable-moe-shared-loras! enable-lora-bias! lora-extra-vocab-size=256 "
        "long-lora-scaling-factors qlora-adapter-name-or-path enable-prompt-adapter! max-prompt-adapters=1 "
        "max-prompt-adapter-token=0",
    ),
    (
        "speculation",
        REFUSED,
        "speculative decoding is not supported yet: leave it out, the text is the same",
        "speculative-config/-sc spec-method spec-model spec-tokens speculative-model speculative-model-quantization "
        "num-speculative-tokens=0 speculative-disable-mqa-scorer! speculative-max-model-len "
        "speculative-disable-by-batch-size ngram-prompt-lookup-max ngram-prompt-lookup-min "
        "spec-decoding-acceptance-method=rejection_sampler typical-acceptance-sampler-posterior-threshold "
        "typical-acceptance-sampler-posterior-alpha disable-logprobs-during-spec-decoding! "
        "per-request-spec-decode-metrics!",
    ),
    (
        "structured output",
        NOTE,
        "structured output is made by llguidance, always",
        "structured-outputs-config guided-decoding-backend=auto,guidance guided-decoding-disable-fallback! "
        "guided-decoding-disable-any-whitespace! guided-decoding-disable-additional-properties!",
    ),
    (
        "structured output",
        REFUSED,
        "no code is loaded; docs/tools.md lists the parsers",
        "tool-parser-plugin reasoning-parser-plugin tool-server",
    ),
    ("structured output", SILENT, "--reasoning-parser is enough", "enable-reasoning!"),
    ("structured output", REFUSED, "--reasoning-parser says how reasoning is marked", "reasoning-config"),
    (
        "observability",
        REFUSED,
        "it is not measured; see /metrics",
        "otlp-traces-endpoint collect-detailed-traces enable-layerwise-nvtx-tracing! enable-mfu-metrics! "
        "cudagraph-metrics! enable-logging-iteration-details! profiler-config enable-per-request-metrics!",
    ),
    (
        "observability",
        NOTE,
        "all metrics are always shown",
        "show-hidden-metrics-for-version",
    ),
    ("observability", SILENT, "there is one engine", "aggregate-engine-logging!"),
    ("server", SILENT, "prompts are logged only with --enable-log-requests", "disable-log-requests!"),
    ("server", REFUSED, "use --log-format, --uvicorn-log-level and --disable-uvicorn-access-log", "log-config-file"),
    ("server", REFUSED, "what a model writes is never logged", "enable-log-outputs!"),
    ("server", SILENT, "what a model writes is never logged", "enable-log-deltas!"),
    ("server", SILENT, "the log always has the traceback of an unexpected error", "log-error-stack!"),
    ("server", SILENT, "/load always counts", "enable-server-load-tracking!"),
    ("server", SILENT, "usage always says how many tokens of a prompt were cached", "enable-prompt-tokens-details!"),
    ("server", REFUSED, "start it again when its certificate has changed", "enable-ssl-refresh!"),
    ("server", REFUSED, "no code is loaded: put a proxy in front", "middleware+"),
    ("server", REFUSED, "there is no such route", "enable-tokenizer-info-endpoint!"),
    ("server", SILENT, "/docs needs nothing from elsewhere", "enable-offline-docs!"),
    ("server", REFUSED, "the server speaks HTTP only", "grpc!"),
    ("server", REFUSED, 'send stream_options {"include_usage": true}', "enable-force-include-usage!"),
    (
        "server",
        REFUSED,
        "send return_tokens_as_token_ids in requests",
        "return-tokens-as-token-ids!",
    ),
    (
        "server",
        REFUSED,
        "send no tools in such requests",
        "exclude-tools-when-tool-choice-none!",
    ),
    ("server", NOTE, "replies have no fingerprint", "fingerprint-mode=none fingerprint-value"),
    (
        "server",
        NOTE,
        "it is about routes that are not here",
        "cohere-is-reasoning-model! cohere-format",
    ),
    (
        "other",
        REFUSED,
        "one engine does the whole of a request",
        "kv-transfer-config kv-events-config ec-transfer-config ec-manager-config weight-transfer-config "
        "diffusion-config/-dc",
    ),
    ("other", NOTE, "nothing of octavo reads it", "additional-config fail-on-environ-validation!"),
)


# The same of `vllm bench serve`.
_BENCH_TABLE: tuple[tuple[str, Verdict, str, str], ...] = (
    (
        "prompts",
        NOTE,
        "no tokenizer is loaded: prompts are words, and the server's usage says how many tokens they are",
        "tokenizer tokenizer-mode trust-remote-code! skip-tokenizer-init!",
    ),
    (
        "prompts",
        NOTE,
        "prompts are sent as they are; --backend openai-chat has the server use its template",
        "skip-chat-template!",
    ),
    ("prompts", REFUSED, "use --random-input-len or --prefix-repetition-prefix-len and -suffix-len", "input-len"),
    ("prompts", REFUSED, "prompts of a file are shuffled by --seed", "disable-shuffle!"),
    ("prompts", REFUSED, "give --num-prompts as many as the file has", "no-oversample!"),
    (
        "prompts",
        REFUSED,
        "use --dataset-name random, or your own prompts with --dataset-name custom",
        "hf-name hf-split hf-subset hf-output-len sonnet-input-len sonnet-output-len sonnet-prefix-len "
        "spec-bench-output-len spec-bench-category random-batch-size=1 blazedit-min-distance blazedit-max-distance "
        "asr-max-audio-len-sec asr-min-audio-len-sec",
    ),
    ("server", REFUSED, "name the certificate in the environment's SSL_CERT_FILE", "insecure!"),
    (
        "server",
        REFUSED,
        "name the adapter with --served-model-name, one in a run",
        "lora-modules+ lora-assignment=random",
    ),
    ("load", REFUSED, "profile the server from outside, as with 'perf record -p PID'", "profile! profile-num-steps"),
    ("load", REFUSED, "use --extra-body", "use-beam-search!"),
    ("load", NOTE, "requests have the ids that the server gives them", "request-id-prefix"),
    ("result", REFUSED, "every run writes a file of its own: name it with --result-filename", "append-result!"),
    (
        "result",
        REFUSED,
        "--save-detailed writes what such a picture shows",
        "plot-timeline! timeline-itl-thresholds plot-dataset-stats!",
    ),
)


# Of what works, what vLLM's EngineArgs and LLM take although it is about the server.
SERVER_OPTIONS = ("max_num_queued_reqs", "reasoning_parser", "shutdown_timeout", "stream_interval")


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag of vLLM that octavo does not have. `spellings` begin with dashes, the long one first."""

    name: str
    spellings: tuple[str, ...]
    kind: Kind
    group: str
    verdict: Verdict
    text: str
    silent_values: tuple[str, ...]

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    def judge(self, where: str, value: Any) -> str | None:
        """None if the value asks for nothing that octavo does not do, else what to say of it. `where` is how the user
        wrote the name. Raises ConfigError."""
        words = {str(item).lower() for item in (value if isinstance(value, list | tuple) else [value])}
        silent = {*NOTHING, *self.silent_values}
        if "true" in self.silent_values:
            silent.discard("false")  # then it is being off that octavo does not do
        if self.verdict == SILENT or words <= silent:
            return None
        if self.verdict == NOTE:
            return f"{where}: {self.text}"
        only = f" (only {' or '.join(self.silent_values)})" if self.silent_values and self.kind != "switch" else ""
        shown = "" if self.kind == "switch" else f" {shorten(str(value))}"
        raise ConfigError(f"{where}{shown} is not supported{only}: {self.text}")


@cache
def vllm_flags() -> Mapping[str, VllmFlag]:
    """By name. Made when it is first asked for: most command lines need none of it."""
    return _by_name(_TABLE)


@cache
def vllm_bench_flags() -> Mapping[str, VllmFlag]:
    """Those of `vllm bench serve`, by name."""
    return _by_name(_BENCH_TABLE)


def _by_name(table: tuple[tuple[str, Verdict, str, str], ...]) -> dict[str, VllmFlag]:
    flags = (_flag(entry, group, verdict, text) for group, verdict, text, entries in table for entry in entries.split())
    return {flag.name: flag for flag in flags}


def _flag(entry: str, group: str, verdict: Verdict, text: str) -> VllmFlag:
    head, _, values = entry.partition("=")
    kinds: dict[str, Kind] = {"!": "switch", "+": "values", "?": "optional"}
    kind = kinds.get(head[-1], "value")
    name, *short = head.rstrip("!+?").split("/")
    return VllmFlag(name, (f"--{name}", *short), kind, group, verdict, text, tuple(values.split(",")) if values else ())


def checked_options(owner: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments under the names of EngineConfig or vLLM as fields of EngineConfig, and what to say of them.

    None means the default, as in vLLM. Raises ConfigError for a name that neither has, and for what is not supported.
    """
    names = [field.name for field in fields(EngineConfig)]
    given: dict[str, Any] = {}
    notes = []
    for name, value in options.items():
        if name in SERVER_OPTIONS and value:
            notes.append(f"{owner}: {name}: it is about the server, where it is --{name.replace('_', '-')}")
        elif name in names:
            if value is not None:
                given[name] = value
        elif name in (*SERVER_OPTIONS, "disable_log_stats"):
            pass  # asks for nothing, or for what is so without a server
        elif flag := vllm_flags().get(name.replace("_", "-")):
            note = flag.judge(f"{owner}: {name}", value)
            if note is not None:
                notes.append(note)
        else:
            import difflib

            near = difflib.get_close_matches(name, [*names, *(flag.dest for flag in vllm_flags().values())], n=1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(names)}"
            raise ConfigError(f"{owner} has no option {name!r}: {hint}")
    return given, notes
