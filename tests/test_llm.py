from __future__ import annotations

import io
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tqdm import tqdm  # type: ignore[import-untyped]

import octavo
from octavo.core.clock import VirtualClock
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelFileError
from octavo.core.records import FinishReason, RequestOutput, SamplingParams
from octavo.llm import LLM, Logprob
from tests.server.fake_engine import FAIL, REFUSE, FakeEngine, frontend


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(EngineConfig("echo", max_model_len=64))


@pytest.fixture
def llm(engine: FakeEngine) -> LLM:
    return LLM.over(engine, frontend(engine.info), VirtualClock())


def test_prompts_of_all_kinds_are_continued_in_their_order(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    texts = [r.outputs[0].text for r in llm.generate(["ab", [120, 121], "0123456"], params)]
    assert texts == ["abab", "xyxy", "0123"]
    (one,) = llm.generate("é!", params)
    assert (one.prompt, one.prompt_token_ids) == ("é!", [0xC3, 0xA9, 33])
    assert (one.outputs[0].text, one.outputs[0].token_ids) == ("é!\ufffd", [0xC3, 0xA9, 33, 0xC3])
    assert one.outputs[0].finish_reason is FinishReason.LENGTH
    assert llm.generate([97, 98], params)[0].prompt is None
    assert llm.generate([], params) == []


def test_prompt_logprobs_have_an_entry_for_each_token_and_none_for_the_first(llm: LLM) -> None:
    asked, not_asked, alone = llm.generate(
        ["abcdef", "ab", "a"],
        [SamplingParams(max_tokens=2, prompt_logprobs=1), SamplingParams(), SamplingParams(prompt_logprobs=0)],
    )
    assert asked.prompt_logprobs is not None
    assert asked.prompt_logprobs[0] is None
    assert asked.prompt_logprobs[1:] == [
        {0xE2: Logprob(-0.25, 1, "\ufffd"), ord(c): Logprob(-0.5 * i, 2, c)} for i, c in enumerate("bcdef", 1)
    ]
    assert asked.outputs[0].text == "ab"
    assert not_asked.prompt_logprobs is None
    assert alone.prompt_logprobs == [None]


def test_a_thinking_budget_needs_the_name_of_a_reasoning_parser(llm: LLM, engine: FakeEngine) -> None:
    params = SamplingParams(max_tokens=2, thinking_token_budget=5)
    with pytest.raises(InvalidRequestError, match="LLM: reasoning_parser"):
        llm.generate("ab", params)
    with pytest.raises(ConfigError, match=r"'qwen4'; it must be one of .*qwen3"):
        LLM(reasoning_parser="qwen4")
    requests = []
    engine.submit, submit = lambda r: (requests.append(r), submit(r)), engine.submit
    thinking = LLM.over(engine, frontend(engine.info), VirtualClock(), reasoning_parser="qwen3")
    thinking.generate(["ab", "ab<think>\n", list(b"ab<think></think>")], params)
    told = [(bool(r.reasoning.starts), r.reasoning.is_open, bytes(r.reasoning.end_token_ids)) for r in requests]
    assert told == [(True, False, b"</think>"), (True, True, b"</think>"), (False, False, b"</think>")]


def test_threads_share_the_engine(llm: LLM) -> None:
    with ThreadPoolExecutor(8) as threads:
        prompts = [chr(97 + i % 26) * (1 + i % 5) for i in range(64)]
        results = list(threads.map(lambda p: llm.generate(p, SamplingParams(max_tokens=30)), prompts))
    assert [r[0].outputs[0].text for r in results] == [p[0] * 30 for p in prompts]


def test_an_engine_that_failed_within_a_step_is_not_used_again(
    llm: LLM, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[RequestOutput]:
        raise RuntimeError("a step went wrong")

    monkeypatch.setattr(engine, "step", fail)
    with pytest.raises(RuntimeError, match="went wrong"):
        llm.generate("ab")
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("ab")


def test_messages_and_parameters_of_wrong_types_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="messages is text"):
        llm.chat("hi")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        llm.generate("ab", {"temperature": 0})  # type: ignore[arg-type]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    results = llm.generate(["ab", "cd"], [SamplingParams(max_tokens=1), SamplingParams(stop=("cdc",))])
    assert [r.outputs[0].text for r in results] == ["a", "cdc"]
    assert results[1].outputs[0].stop_reason == "cdc"
    with pytest.raises(InvalidRequestError, match="2 prompts and 1"):
        llm.generate(["ab", "cd"], [SamplingParams()])


def test_a_result_says_the_seed_that_repeats_it(llm: LLM) -> None:
    drawn, given = llm.generate(["ab", "cd"], [SamplingParams(), SamplingParams(seed=7)])
    assert isinstance(drawn.outputs[0].seed, int)
    assert given.outputs[0].seed == 7


def test_logprobs_are_keyed_by_token_id(llm: LLM) -> None:
    (result,) = llm.generate("ab", SamplingParams(max_tokens=2, logprobs=2))
    completion = result.outputs[0]
    assert completion.logprobs is not None
    assert completion.logprobs[0] == {97: Logprob(-0.5, 1, "a"), 0xE2: Logprob(-1.5, 2, "\ufffd")}
    assert completion.cumulative_logprob == -1.0


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    params = SamplingParams(max_tokens=10)
    assert [r.outputs[0].text for r in llm.chat(hello, params)] == ["user:hello"]
    assert [r.outputs[0].text for r in llm.chat([hello, bye], params)] == ["user:hello", "user:bye\n>"]


def test_chat_goes_on_with_a_message_and_takes_a_template(llm: LLM) -> None:
    opened = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    (result,) = llm.chat(opened, SamplingParams(max_tokens=1), continue_final_message=True)
    assert result.prompt == "user:hi\nassistant:so"
    (result,) = llm.chat(opened, SamplingParams(max_tokens=1), chat_template="{{ messages[1].content }}")
    assert result.prompt == "so"
    with pytest.raises(InvalidRequestError, match="give one of them"):
        llm.chat(opened, continue_final_message=True, add_generation_prompt=True)


def test_output_ends_at_the_models_length(llm: LLM) -> None:
    (result,) = llm.generate("a" * 60, SamplingParams(max_tokens=500))
    assert len(result.outputs[0].token_ids) == 4


def test_streams_may_interleave_with_each_other_and_with_generate(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    first, second = llm.stream("abc", params), llm.stream("xyz", params)
    pieces = [next(first), next(second), next(first)]
    assert llm.generate("01", params)[0].outputs[0].text == "010101"
    assert pieces[0] + pieces[2] + "".join(first) == "abcabc"
    assert pieces[1] + "".join(second) == "xyzxyz"


def test_a_closed_stream_leaves_nothing_running(llm: LLM, engine: FakeEngine) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=40))
    next(stream)
    stream.close()
    assert not engine.has_work
    assert engine.stats().num_blocks_in_use == 0


class Interrupted(FakeEngine):
    """Ctrl-C comes in the middle of its third step."""

    def step(self) -> list[RequestOutput]:
        if self.stats().num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # a handler would run here
        return super().step()


def test_ctrl_c_waits_for_the_end_of_a_step_and_leaves_nothing_running() -> None:
    engine = Interrupted(EngineConfig("echo", max_model_len=64))
    llm = LLM.over(engine, frontend(engine.info), VirtualClock())
    with pytest.raises(KeyboardInterrupt):
        llm.generate("ab", SamplingParams(max_tokens=40))
    assert engine.stats().num_steps == 3
    assert not engine.has_work
    assert llm.generate("ab", SamplingParams(max_tokens=4))[0].outputs[0].text == "abab"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("top_p", None),
        ("top_k", True),
        ("max_tokens", 2.5),
        ("seed", "x"),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} is ") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name


def test_prompts_may_be_objects_as_in_vllm(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    results = llm.generate(
        [{"prompt": "ab"}, {"prompt_token_ids": [120, 121]}, {"prompt": "said", "prompt_token_ids": [98]}, "cd"], params
    )
    assert [(r.prompt, r.prompt_token_ids, r.outputs[0].text) for r in results] == [
        ("ab", [97, 98], "ab"),
        (None, [120, 121], "xy"),
        ("said", [98], "bb"),
        ("cd", [99, 100], "cd"),
    ]
    assert llm.generate({"prompt": "ab", "multi_modal_data": None}, params)[0].outputs[0].text == "ab"
    assert "".join(llm.stream({"prompt_token_ids": [120]}, params)) == "xx"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "has 'multi_modal_data'; it can have prompt"),
        ({"prompt": 5}, "prompts must be text"),
        ({"prompt_token_ids": "ab"}, "prompts must be text"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "prompts must be text"),
        ({}, "prompts must be text"),
        ([5.0], "prompts must be text"),
    ],
)
def test_a_prompt_that_is_none_is_refused(llm: LLM, prompt: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompt)  # type: ignore[arg-type]


def test_a_bar_is_shown_on_a_terminal_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = []
    for terminal, use_tqdm in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
        llm.generate(["ab", "c"], use_tqdm=use_tqdm)
        shown.append(sys.stderr.getvalue())  # type: ignore[attr-defined]
    assert "2/2" in shown[0]
    assert shown[1:] == ["", ""]
    bars = []
    llm.chat(
        [{"role": "user", "content": "a"}], use_tqdm=lambda **how: bars.append(tqdm(**how, file=sys.stderr)) or bars[0]
    )
    assert (bars[0].n, bars[0].total) == (1, 1)


def test_the_tokenizer_is_there_for_whoever_asks(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 33]
    assert tokenizer.encode("x" * 1000, add_special_tokens=False) == [120] * 1000
    assert (tokenizer.decode([0xC3, 0xA9, 256]), tokenizer.decode(33)) == ("é<eos>", "!")
    assert tokenizer.decode([33, 256], skip_special_tokens=True) == "!"
    with pytest.raises(InvalidRequestError, match="id 257"):
        tokenizer.decode([257])


def test_stops_may_be_given_as_in_vllm() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[5]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


def test_a_refusal_or_a_failure_of_one_prompt_leaves_nothing_running(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="refuses"):
        llm.generate(["ab", REFUSE.decode()])
    assert not engine.has_work
    with pytest.raises(EngineDeadError, match="on purpose"):
        llm.generate(["ab", FAIL.decode()])
    assert not engine.has_work
    with pytest.raises(InvalidRequestError, match="no tokens"):
        llm.generate(["ab", ""])
    for wrong in ([5.0], [["a"]], [[1.5]], 5):
        with pytest.raises(InvalidRequestError, match="a list of these"):
            llm.generate(wrong)
    assert not engine.has_work


def test_leaving_the_context_closes_the_engine(llm: LLM, engine: FakeEngine) -> None:
    with llm:
        assert not engine.closed
    assert engine.closed
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("ab")


@pytest.mark.parametrize("option", ["max_model_len", "block_size", "threads", "gpu_memory_utilization"])
def test_an_option_of_the_wrong_type_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=option.replace("_", "-")):
        LLM(__file__, **{option: "8"})


@pytest.mark.parametrize("option", ["model", "tokenizer", "download_dir", "generation_config", "dtype", "hf_overrides"])
def test_an_option_that_is_no_text_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is 5; it must be"):
        LLM(**{option: 5})  # type: ignore[arg-type]


def test_a_model_may_be_named_by_a_path_object(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        LLM(tmp_path / "nothing.gguf")


def test_a_misspelt_option_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM(__file__, max_modle_len=5)


def test_the_package_has_its_names_and_no_others() -> None:
    assert octavo.LLM is LLM
    assert octavo.SamplingParams is SamplingParams
    assert octavo.StructuredOutputsParams is octavo.StructuredOutputs
    assert set(octavo.__all__) == {name for name in octavo.__all__ if getattr(octavo, name)}
    assert octavo.RepetitionDetection(max_pattern_size=3, min_count=2).min_pattern_size == 0
    assert octavo.__version__
    with pytest.raises(AttributeError):
        _ = octavo.nothing  # type: ignore[attr-defined]
