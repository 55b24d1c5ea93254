"""The real engine on tiny models: a request's life, refusals, and what it says of itself."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.backends.cpu.backend import instruction_sets
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.core.records import (
    FinishReason,
    ReasoningTags,
    RepetitionDetection,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from octavo.engine.engine import Engine, system_info
from octavo.engine.limits import check_token_limits
from octavo.engine.process import EngineLike
from octavo.llm import LLM
from tests.tiny_models import TinyLlama, write_tiny_llama

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 1, 2, 3, 4, 5, 6, 7]
SPEC = TinyLlama(context_length=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", SPEC)


def make_engine(model: Path, **options: Any) -> Engine:
    defaults = {"max_model_len": 64, "threads": 1, "max_num_seqs": 4, "block_size": 8}
    return Engine(EngineConfig(model=str(model), **{**defaults, **options}))


@pytest.fixture
def engine(model: Path) -> Engine:
    return make_engine(model)


def request(request_id: str = "a", prompt: list[int] | None = None, **params: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=PROMPT if prompt is None else prompt,
        params=SamplingParams(**{"seed": 1, "max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **params}),
        arrival_time=0.0,
    )


def run(engine: Engine, *requests: Request) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {r.request_id: [] for r in requests}
    for r in requests:
        engine.submit(r)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_an_engine_is_what_the_loop_and_the_llm_ask_for(engine: Engine) -> None:
    like: EngineLike = engine
    assert not like.has_work


def test_a_request_ends_once_with_its_length(engine: Engine) -> None:
    outputs = run(engine, request(max_tokens=5))["a"]
    assert len(token_ids(outputs)) == 5
    assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert not engine._live, "an ended request is remembered"


def test_a_long_prompt_can_be_made_to_let_others_pass(model: Path) -> None:
    engine = make_engine(model, long_prefill_token_threshold=4)
    engine.submit(request(max_tokens=1))
    assert [len(engine.step()) for _ in range(5)] == [0, 0, 0, 0, 1], "20 prompt tokens, 4 in a step"


def test_output_ends_at_the_models_length(engine: Engine) -> None:
    outputs = run(engine, request(max_tokens=1000))["a"]
    assert len(token_ids(outputs)) == 64 - len(PROMPT)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_an_idle_engine_has_no_work_and_a_step_brings_nothing(engine: Engine) -> None:
    run(engine, request())
    assert not engine.has_work
    assert engine.step() == []


def test_a_stop_token_ends_a_request_and_hides_its_text(engine: Engine) -> None:
    first, second, *_ = token_ids(run(engine, request())["a"])
    assert first != second
    outputs = run(engine, request(stop_token_ids=(second,)))["a"]
    assert token_ids(outputs) == [first, second]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, second)
    assert outputs[-1].text == b""


def test_the_text_of_an_output_is_the_bytes_of_its_tokens(engine: Engine) -> None:
    outputs = run(engine, request(max_tokens=20))["a"]
    for output in outputs:
        (token,) = output.token_ids
        if token < 256:
            assert len(output.text) == 1
    assert sum(len(o.text) for o in outputs) >= 20


def test_tokens_beyond_the_vocabulary_show_nothing(tmp_path: Path) -> None:
    spec = TinyLlama(vocab_size=900, num_padding_ids=640)
    engine = make_engine(write_tiny_llama(tmp_path / "padded.gguf", spec))
    outputs = run(engine, request(max_tokens=40, temperature=1.0))["a"]
    padding = [o for o in outputs if o.token_ids[0] > spec.eos_token_id]
    assert padding
    assert all(o.text == b"" for o in padding)


def test_logprobs_come_only_if_they_are_asked_for(engine: Engine) -> None:
    outputs = run(engine, request("with", logprobs=2), request("without"))
    assert all(o.logprobs is None for o in outputs["without"])
    for output in outputs["with"]:
        (entry,) = output.logprobs or []
        assert entry.top_ids[0] == output.token_ids[0]
        assert (entry.rank, len(entry.top_logprobs)) == (1, 2)


def test_cached_tokens_are_told_once_with_the_first_output(engine: Engine) -> None:
    cold = run(engine, request())["a"]
    warm = run(engine, request())["a"]
    assert [o.num_cached_tokens for o in cold] == [0] + [None] * 4
    assert [o.num_cached_tokens for o in warm] == [16] + [None] * 4
    assert token_ids(cold) == token_ids(warm)


def test_an_aborted_request_is_not_heard_of_again_and_gives_its_blocks_back(engine: Engine) -> None:
    engine.submit(request("a", max_tokens=30))
    engine.submit(request("b", prompt=[9, 9], max_tokens=30))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    assert {o.request_id for o in engine.step()} == {"b"}
    engine.abort("b")
    assert not engine.has_work
    assert engine.step() == []
    assert engine.stats().num_blocks_in_use == 0
    assert len(token_ids(run(engine, request("a"))["a"])) == 5


def test_closing_drops_every_request_and_gives_the_memory_back(engine: Engine) -> None:
    engine.submit(request())
    engine.step()
    program = weakref.ref(engine.program)
    engine.close()
    engine.close()
    assert not engine.has_work
    assert engine.stats().num_blocks_in_use == 0
    assert program() is None


def test_stats_count_blocks_tokens_and_steps(engine: Engine) -> None:
    engine.submit(request("a"))
    engine.submit(request("b"))
    engine.step()
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 0)
    assert stats.num_blocks_in_use == 4  # two whole blocks are shared
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 16)
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.num_blocks_in_use) == (0, 0, 0)
    assert stats.num_blocks_cached > 0
    assert stats.num_steps == 5


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "0 tokens; it must have 1 to 63"),
        ([1] * 64, "64 tokens; it must have 1 to 63"),
        ([1, 300], "token ids from 1 to 300; the model knows 0 to 299"),
        ([-1, 3], "token ids from -1 to 3"),
    ],
)
def test_what_cannot_be_computed_is_refused(engine: Engine, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.submit(request(prompt=prompt))
    assert not engine.has_work


def test_the_engine_describes_itself(model: Path) -> None:
    info = make_engine(model, max_model_len=None, threads=2).info
    assert info.served_model_name == "tiny"
    assert (info.max_model_len, info.max_prompt_tokens, info.vocab_size) == (200, 199, 300)
    assert (info.max_num_seqs, info.block_size, info.kv_cache_dtype, info.threads) == (4, 8, "bfloat16", 2)
    assert info.isa == instruction_sets()[0]
    assert dict(info.memory_table)["full-length sequences"] == "4.0 of 200 tokens"
    assert info.warnings == []
    assert make_engine(model, served_model_name="mine").info.served_model_name == "mine"


@pytest.mark.parametrize("isa", instruction_sets())
def test_a_forced_instruction_set_is_the_one_that_runs(model: Path, isa: str) -> None:
    assert make_engine(model, isa=isa).info.isa == isa


def test_an_instruction_set_that_is_not_here_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mmx' is not available here; available: .*portable"):
        make_engine(model, isa="mmx")


def test_more_than_the_models_length_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 201; this model allows 2 to 200"):
        make_engine(model, max_model_len=201)


@pytest.mark.parametrize("length", ["auto", -1])
def test_the_length_may_be_what_there_is_memory_for(model: Path, length: str | int) -> None:
    whole = make_engine(model, max_model_len=length)
    assert (whole.info.max_model_len, whole.info.warnings) == (200, [])
    part = make_engine(model, max_model_len=length, num_gpu_blocks_override=7)
    assert (part.info.max_model_len, part.info.num_blocks) == (56, 7)
    (warning,) = part.info.warnings
    assert "56 of the model's 200 tokens" in warning
    with pytest.raises(ConfigError, match="the KV cache has room for 0 tokens"):
        make_engine(model, max_model_len=length, kv_cache_memory_bytes=1)


def test_a_step_budget_below_the_number_of_sequences_is_raised_with_a_warning(model: Path) -> None:
    engine = make_engine(model, max_num_batched_tokens=2)
    (warning,) = engine.info.warnings
    assert "--max-num-batched-tokens is 2, raised to 4" in warning
    assert engine.scheduler.config.max_num_batched_tokens == 4


def test_a_cache_too_small_for_one_sequence_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len \d+, or a larger --kv-cache-memory-bytes"):
        make_engine(model, kv_cache_memory_bytes=8192)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model at all, only some text")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        make_engine(path)


def test_the_system_describes_itself() -> None:
    info = dict(system_info())
    assert list(info) == ["processor", "instruction sets", "threads", "memory"]
    assert "portable" in info["instruction sets"]
    assert all(info.values())


def test_the_offline_llm_generates_and_chats_with_it(model: Path) -> None:
    with LLM(str(model), max_model_len=64, threads=1) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        one, two = llm.generate(["Hello", "Hello"], params)
        (chat,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert len(chat.outputs[0].token_ids) == 6


def test_a_thinking_budget_forces_the_end_tag_whoever_else_runs(model: Path) -> None:
    tags = ReasoningTags(starts=(), ends=("</think>",), is_open=True, end_token_ids=(9, 8, 7))
    thinking = msgspec.structs.replace(
        request("thinking", max_tokens=8, thinking_token_budget=3, allowed_token_ids=(20, 21)), reasoning=tags
    )
    alone = token_ids(run(make_engine(model), thinking)["thinking"])
    assert alone[3:6] == [9, 8, 7]
    assert {*alone[:3], *alone[6:]} <= {20, 21}
    company = [request("a"), request("b", allowed_token_ids=(5,), max_tokens=8)]
    together = run(make_engine(model), company[0], thinking, company[1])
    assert token_ids(together["thinking"]) == alone
    assert token_ids(together["b"]) == [5] * 8


def test_a_repetition_ends_a_request(model: Path) -> None:
    detection = RepetitionDetection(max_pattern_size=2, min_count=4)
    [*_, last] = run(make_engine(model), request("a", allowed_token_ids=(5,), repetition_detection=detection))["a"]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.REPETITION, "repetition_detected")


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {100_000: 1}), ("allowed_token_ids", (100_000,)), ("logprobs", 21), ("prompt_logprobs", -1)],
)
def test_what_the_model_cannot_do_is_refused_behind_the_door_too(engine: Engine, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(request(**{field: value}))
    assert caught.value.param == field
    assert not engine.has_work


def prompt_logprobs(outputs: list[RequestOutput]) -> list[TokenLogprobs]:
    return [entry for output in outputs for entry in output.prompt_logprobs or ()]


@pytest.mark.parametrize("chunk", [4, 7, 512])
@pytest.mark.parametrize("isa", instruction_sets())
def test_a_prompt_is_scored_as_its_tokens_were_when_they_were_sampled(model: Path, isa: str, chunk: int) -> None:
    said = run(make_engine(model, isa=isa), request("a", max_tokens=30, temperature=1.0, logprobs=3))["a"]
    answer = token_ids(said)
    engine = make_engine(model, isa=isa, max_num_batched_tokens=chunk)
    run(engine, request("warm", PROMPT + answer))  # its prefix would be in the cache
    outputs = run(engine, request("b", PROMPT + answer, prompt_logprobs=3))["b"]
    scored = prompt_logprobs(outputs)
    assert len(scored) == len(PROMPT) + len(answer) - 1
    assert scored[len(PROMPT) - 1 :] == [entry for output in said for entry in output.logprobs or ()]
    pieces = [output for output in outputs if output.prompt_logprobs]
    assert len(pieces) == -(-len(scored) // chunk)
    first = next(output for output in outputs if output.token_ids)
    assert outputs.index(pieces[-1]) <= outputs.index(first), "the prompt comes before, or with, the first token"
    assert first.num_cached_tokens == 0
    assert engine.stats().num_blocks_in_use == 0


def test_a_scored_prompt_can_be_aborted_between_its_pieces(model: Path) -> None:
    engine = make_engine(model, max_num_batched_tokens=4)
    engine.submit(request("a", prompt_logprobs=0))
    (output,) = engine.step()
    assert (output.request_id, output.token_ids, len(output.prompt_logprobs or ())) == ("a", [], 4)
    engine.abort("a")
    assert engine.step() == []
    assert engine.stats().num_blocks_in_use == 0


def test_prompts_that_are_preempted_are_scored_once(model: Path) -> None:
    """The first needs the blocks of the second while that is in the middle of its prompt."""
    alone = run(make_engine(model, max_num_batched_tokens=8), request("b", PROMPT * 2, prompt_logprobs=2))["b"]
    engine = make_engine(model, max_num_batched_tokens=5, num_gpu_blocks_override=11)
    requests = [request(name, PROMPT * 2, prompt_logprobs=2, max_tokens=20) for name in "abc"]
    together = run(engine, *requests)
    assert engine.stats().num_preemptions > 0
    for name in "abc":
        assert prompt_logprobs(together[name]) == prompt_logprobs(alone)


def test_too_many_alternatives_together_are_refused(model: Path) -> None:
    engine = make_engine(model, max_logprobs=-1, max_model_len=200)
    vocab_size = engine.info.vocab_size
    few = run(engine, request("a", prompt_logprobs=-1, logprobs=-1, max_tokens=2))["a"]
    assert all(sorted(entry.top_ids) == list(range(vocab_size)) for entry in prompt_logprobs(few))
    check_token_limits(SamplingParams(logprobs=2**22, max_tokens=1), 1, 2**30, -1)
    with pytest.raises(InvalidRequestError, match="10 output tokens; together the limit is 4,194,304"):
        check_token_limits(SamplingParams(logprobs=-1, max_tokens=10), 1, 2**20, -1)
    with pytest.raises(InvalidRequestError, match="9 prompt tokens; together the limit is 4,194,304"):
        check_token_limits(SamplingParams(prompt_logprobs=-1), 10, 2**20, -1)
