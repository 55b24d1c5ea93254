"""What a user can choose, as one frozen record. Field names are the flags' names (vLLM's where it has one)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.errors import ConfigError, shorten

KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
ACTIVATION_DTYPES = ("auto", "float32")
CONTENT_FORMATS = ("auto", "string", "openai")  # how chat templates are given the contents of messages
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
QUANTIZATIONS = (
    *("q8_0", "q4_0", "q4_1", "q4_k", "int8"),  # float weights are packed so while they load
    *("gptq", "awq", "fp8", "compressed-tensors", "gguf"),  # what a checkpoint is already
)
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256
MAX_THREADS = 1024
ALL_THAT_FITS = -1  # as a length of sequences: the model's own, or what the KV cache has room for if that is less
MAX_INT = 2**63 - 1  # what passes between processes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine needs to know. None means: decide from the model and the machine.

    Raises ConfigError with value, limit and remedy.
    """

    model: str | None = None  # a GGUF file, a model's folder, org/name of the hub, or the built-in model
    served_model_name: str | tuple[str, ...] | None = None  # or a list; the first name is the one in replies
    tokenizer: str | None = None  # where the tokenizer is, if not with the model
    revision: str | None = None  # of a hub repository
    tokenizer_revision: str | None = None  # of the tokenizer's, or of the model's for the tokenizer only
    download_dir: str | None = None
    dtype: str = "auto"  # of float weights
    quantization: str | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)  # of config.json, or of GGUF metadata
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int | str | None = None  # None: the model's own; -1 or "auto": that, or what there is memory for
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"
    isa: str | None = None
    threads: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_logprobs: int = 20  # most alternatives that logprobs and prompt_logprobs may ask for; -1: no limit
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step, so that others can pass; 0: no limit
    gpu_memory_utilization: float | None = None  # --gpu-memory-utilization, --memory-utilization
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None  # --num-gpu-blocks-override
    enable_prefix_caching: bool = True
    kv_cache_metrics: bool = False  # how long blocks live, lie idle, and until they are used again
    kv_cache_metrics_sample: float = 0.01  # the share of blocks that are watched
    seed: int = 0

    def __post_init__(self) -> None:
        def choice(name: str, value: str, allowed: tuple[str, ...], why: str = "") -> None:
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}{why}")

        def between(name: str, value: object, low: int, high: int = MAX_INT) -> None:
            if value is None:
                return
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} is {shorten(repr(value))}; it must be a whole number")
            if not low <= value <= high:
                bound = f"at least {low:,}" if value < low else f"at most {high:,}"
                raise ConfigError(f"{name} is {value:,}; it must be {bound}")

        b = self.block_size
        if type(b) is not int or not MIN_BLOCK_SIZE <= b <= MAX_BLOCK_SIZE or b & (b - 1):
            bounds = f"from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
            raise ConfigError(f"--block-size is {b!r}; it must be a power of two {bounds}")
        names = (self.served_model_name,) if isinstance(self.served_model_name, str) else self.served_model_name
        if names is not None:
            if not isinstance(names, list | tuple) or not names or not all(isinstance(n, str) and n for n in names):
                raise ConfigError(f"--served-model-name is {self.served_model_name!r}; it must be one or several names")
            object.__setattr__(self, "served_model_name", names[0] if len(names) == 1 else tuple(names))
        for name in (
            "model",
            "tokenizer",
            "revision",
            "tokenizer_revision",
            "download_dir",
            "isa",
            "generation_config",
        ):
            text = getattr(self, name)
            if not isinstance(text, str) and (text is not None or name == "generation_config"):
                raise ConfigError(f"--{name.replace('_', '-')} is {text!r}; it must be text")
        eight_bits = str(self.kv_cache_dtype).startswith(("fp8", "int8", "nvfp4"))
        why = " (8 bits and less are not supported yet)" if eight_bits else ""
        choice("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES, why)
        choice("--activation-dtype", self.activation_dtype, ACTIVATION_DTYPES)
        choice("--dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            choice("--quantization", self.quantization, QUANTIZATIONS)
        for flag, value in (
            ("--hf-overrides", self.hf_overrides),
            ("--override-generation-config", self.override_generation_config),
        ):
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise ConfigError(f"{flag} is {shorten(repr(value))}; it must be a JSON object")
            try:
                msgspec.msgpack.encode(value)  # as it will travel to the engine process
            except (OverflowError, RecursionError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{flag} is {shorten(repr(value))}; it must be a plain JSON object: {error}"
                ) from None
        for name in ("enable_prefix_caching", "kv_cache_metrics"):
            if type(value := getattr(self, name)) is not bool:  # the text "false" would count as true
                raise ConfigError(f"--{name.replace('_', '-')} is {value!r}; it must be True or False")
        if self.max_model_len == "auto":
            object.__setattr__(self, "max_model_len", ALL_THAT_FITS)
        if self.max_model_len != ALL_THAT_FITS:
            between("--max-model-len", self.max_model_len, 1)
        between("--threads", self.threads, 1, MAX_THREADS)
        between("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        between("--max-num-seqs", self.max_num_seqs, 1)
        between("--max-logprobs", self.max_logprobs, -1)
        between("--long-prefill-token-threshold", self.long_prefill_token_threshold, 0)
        between("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, 1)
        between("--num-gpu-blocks-override", self.num_gpu_blocks_override, 1)
        between("--seed", self.seed, -MAX_INT - 1)
        s = self.kv_cache_metrics_sample
        if not (isinstance(s, int | float) and 0 < s <= 1):
            raise ConfigError(f"--kv-cache-metrics-sample is {s!r}; it must be greater than 0 and at most 1")
        u = self.gpu_memory_utilization
        if u is not None and not (isinstance(u, int | float) and 0 < u <= 1):
            raise ConfigError(f"--gpu-memory-utilization is {u!r}; it must be greater than 0 and at most 1")

    @property
    def asked_length(self) -> int | None:
        """max_model_len, if it is a number of tokens."""
        length = self.max_model_len
        return length if isinstance(length, int) and length != ALL_THAT_FITS else None

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model in the API, none if they are to come from the model."""
        names = self.served_model_name
        return (names,) if isinstance(names, str) else names or ()
