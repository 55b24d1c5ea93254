"""An engine, a tokenizer and a template small enough to see through: tokens are bytes, and the engine is an echo.

A request is answered with its own prompt, byte after byte, over and over. A few prompts misbehave on purpose.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.core.records import EngineStats, FinishReason, Request, RequestOutput, TokenLogprobs
from octavo.engine.frontend import Frontend
from octavo.engine.generation_config import GenerationDefaults, load_generation_defaults
from octavo.engine.messages import EngineInfo
from octavo.engine.pulse import Pulse
from octavo.engine.text_side import TextSide
from octavo.tokenizer.chat_template import ChatTemplate

EOS = 256
VOCAB_SIZE = 257
BLOCK_SIZE = 16
NUM_BLOCKS = 4096
MODEL_NAME = "echo"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"

CRASH = b"!crash"  # in a prompt: step() raises
HANG = b"!hang"  # in a prompt: step() never ends
LABOUR = b"!labour"  # in a prompt: a step takes LABOUR_SECONDS, and kernels make progress meanwhile
LABOUR_SECONDS = 2.0
REFUSE = b"!refuse"  # in a prompt: submit() refuses
SAY, END = b"!say ", b"!end"  # in a prompt: the text between the last two is the answer, and then the sequence ends
FAIL = b"!fail"  # in a prompt: this request alone ends with an error, after two tokens


class ByteTokenizer:
    token_bytes = [bytes([i]) for i in range(256)] + [b"<eos>"]
    bos_token = ""
    eos_token = "<eos>"

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def visible_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        return b"" if skip_special_tokens and token_id == EOS else self.token_bytes[token_id]


def text_side(config: EngineConfig | None = None) -> TextSide:
    defaults = GenerationDefaults({}) if config is None else load_generation_defaults(config)
    return TextSide(
        ByteTokenizer(), ChatTemplate(TEMPLATE, "", "<eos>"), defaults, ("this tokenizer only knows bytes",)
    )


def frontend(info: EngineInfo, seed: int = 0) -> Frontend:
    side = text_side()
    return Frontend(side.tokenizer, side.template, info, seed)


@dataclass
class _Running:
    request: Request
    queued_time: float
    text: bytes = b""
    num_tokens: int = 0
    num_scored: int = 1  # of the prompt's tokens, if that was asked for; the first has no log-probability

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.request.prompt_token_ids) + self.num_tokens) // BLOCK_SIZE)


class FakeEngine:
    """Has the interface of `octavo.engine.engine.Engine`. `step_seconds` is how long a step takes."""

    def __init__(self, config: EngineConfig, pulse: Pulse | None = None, step_seconds: float = 0.0) -> None:
        if config.model.endswith(".broken"):
            raise ModelFileError(f"{config.model} is not a GGUF file: its first bytes are 'NOPE'")
        if config.model.endswith(".slow"):
            time.sleep(60)
        max_model_len = config.max_model_len or 1024
        name, *other_names = config.served_names or (MODEL_NAME,)
        self.info = EngineInfo(
            served_model_name=name,
            other_model_names=other_names,
            max_model_len=max_model_len,
            max_prompt_tokens=max_model_len - 1,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=config.max_num_seqs,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_cache_dtype="float32",
            isa="none",
            threads=1,
            memory_table=[("KV cache", f"{NUM_BLOCKS} blocks")],
            warnings=["this engine only echoes"],
        )
        self._pulse = pulse
        self._step_seconds = step_seconds
        self._running: dict[str, _Running] = {}
        self._stats = EngineStats(num_blocks=NUM_BLOCKS)
        self._num_tokens = 0  # computed since the last snapshot
        self.closed = False

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> None:
        if REFUSE in self._prompt(request):
            raise InvalidRequestError("the engine refuses this prompt", param="prompt", code="refused")
        assert request.params.seed is not None
        assert request.params.max_tokens is not None
        self._running[request.request_id] = _Running(request, time.monotonic())

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        began = time.monotonic()
        time.sleep(self._step_seconds)
        self._stats.num_steps += 1
        self._num_tokens += sum(1 if r.num_tokens else len(r.request.prompt_token_ids) for r in self._running.values())
        return [self._advance(running, began) for running in list(self._running.values())]

    def stats(self) -> EngineStats:
        self._stats.num_requests_running = len(self._running)
        self._stats.num_blocks_in_use = sum(r.num_blocks for r in self._running.values())
        self._stats.num_step_tokens, self._num_tokens = self._num_tokens, 0
        return self._stats

    def close(self) -> None:
        self.closed = True

    def _labour(self) -> None:
        assert self._pulse is not None
        for _ in range(20):
            time.sleep(LABOUR_SECONDS / 20)
            self._pulse.kernel_counter[0] += 1

    @staticmethod
    def _prompt(request: Request) -> bytes:
        return bytes(t for t in request.prompt_token_ids if t < 256)

    def _advance(self, running: _Running, began: float) -> RequestOutput:
        request, params = running.request, running.request.params
        prompt = self._prompt(request)
        if CRASH in prompt:
            raise RuntimeError("crashed on purpose")
        while HANG in prompt:
            pass
        if LABOUR in prompt:
            self._labour()
        output = RequestOutput(request_id=request.request_id)
        if params.prompt_logprobs is not None and running.num_scored < len(request.prompt_token_ids):
            # In pieces of two, the last one with the first token.
            places = list(enumerate(request.prompt_token_ids))[running.num_scored : running.num_scored + 2]
            wanted = VOCAB_SIZE if params.prompt_logprobs == -1 else params.prompt_logprobs
            output.prompt_logprobs = [
                TokenLogprobs(-0.5 * i, 2, [0xE2, t][:wanted], [-0.25, -0.5 * i][:wanted]) for i, t in places
            ]
            running.num_scored += 2
            if running.num_scored < len(request.prompt_token_ids):
                return output
        if running.num_tokens == 0:
            output.num_cached_tokens = 0
            output.queued_time, output.scheduled_time = running.queued_time, began
        if FAIL in prompt and running.num_tokens == 2:
            output.finish_reason, output.error = FinishReason.ERROR, "this request failed on purpose"
            del self._running[request.request_id]
            return output
        script = prompt.rpartition(SAY)[2].partition(END)[0] if SAY in prompt else None
        if script is None:
            token_id = request.prompt_token_ids[running.num_tokens % len(request.prompt_token_ids)]
        else:
            token_id = script[running.num_tokens] if running.num_tokens < len(script) else EOS
        running.num_tokens += 1
        output.token_ids = [token_id]
        output.text = b"" if token_id == EOS else bytes([token_id])
        running.text += output.text
        if params.logprobs is not None:
            output.logprobs = [_logprobs(token_id, params.logprobs)]
        stop = next((s for s in params.stop if running.text.endswith(s.encode())), None)
        if stop is not None or token_id in params.stop_token_ids:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop or token_id
        elif token_id == EOS and not params.ignore_eos:
            output.finish_reason = FinishReason.STOP
        elif running.num_tokens == params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            del self._running[request.request_id]
        return output


def _logprobs(token_id: int, wanted: int) -> TokenLogprobs:
    wanted = VOCAB_SIZE if wanted == -1 else wanted
    return TokenLogprobs(-0.5, 1, [token_id, 0xE2, 0x41][:wanted], [-0.5, -1.5, float("-inf")][:wanted])
