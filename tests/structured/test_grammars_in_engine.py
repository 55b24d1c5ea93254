"""Grammars in the real engine: whose request ends how, and what nobody else notices."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.core.config import EngineConfig
from octavo.core.records import (
    FinishReason,
    ReasoningTags,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)
from octavo.engine.engine import Engine
from octavo.structured import compiler
from octavo.structured.compiler import GrammarCompiler
from octavo.structured.constraint import Constraint, Grammars
from octavo.structured.grammar import answer_within, grammar_text
from tests.structured import vocabulary
from tests.tiny_models import TinyLlama, write_tiny_llama

SPEC = TinyLlama(context_length=300)
WORD = "start: /[a-z]{20}/"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", SPEC)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = make_engine(model)
    yield engine
    engine.close()


def make_engine(model: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(**{"model": str(model), "threads": 1, "max_num_seqs": 8, "block_size": 8, **options}))


def request(request_id: str, grammar: str | None = WORD, **params: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(**{"seed": 5, "max_tokens": 60, **params}),
        arrival_time=0.0,
        grammar=grammar,
    )


def run(engine: Engine, *requests: Request) -> dict[str, RequestOutput]:
    """The last output of each request, with the text of all."""
    texts = {r.request_id: b"" for r in requests}
    ends: dict[str, RequestOutput] = {}
    for r in requests:
        engine.submit(r)
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
            if output.finish_reason is not None:
                assert output.request_id not in ends
                output.text = texts[output.request_id]
                ends[output.request_id] = output
    return ends


def test_an_output_follows_its_grammar_and_ends_with_it(engine: Engine) -> None:
    end = run(engine, request("a"))["a"]
    assert end.finish_reason is FinishReason.STOP
    assert len(end.text) == 20
    assert end.text.isalpha()
    assert end.text.islower()


def test_many_with_and_without_grammars_are_as_each_alone(model: Path) -> None:
    kinds = [WORD, 'start: "a" start | "b"', None, 'start: %json {"type": "array", "items": {"type": "integer"}}']
    requests = [request(str(i), kinds[i % 4], seed=i, max_tokens=40, temperature=1 + i % 2) for i in range(16)]
    crowded = make_engine(model, max_model_len=64, num_gpu_blocks_override=14, max_num_batched_tokens=9)
    together = run(crowded, *requests)
    assert crowded.stats().num_preemptions > 0, "the pool was to be too small"
    for one in requests:
        alone = make_engine(model, max_model_len=64)
        assert run(alone, one)[one.request_id].text == together[one.request_id].text
        alone.close()
    crowded.close()


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}])
def test_where_nothing_else_may_come_an_output_ends_whatever_was_asked(engine: Engine, params: dict[str, Any]) -> None:
    end = run(engine, request("a", **params))["a"]
    assert (end.finish_reason, len(end.text)) == (FinishReason.STOP, 20)


def test_with_ignore_eos_a_grammar_that_may_go_on_does(engine: Engine) -> None:
    end = run(engine, request("a", "start: /[a-z]*/", ignore_eos=True))["a"]
    assert end.finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_it_within_its_grammar(engine: Engine) -> None:
    end = run(engine, request("a", 'start: /[a-e]*/ "x" /[a-e]*/', stop=("x",), logit_bias={ord("x"): 50}))["a"]
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, "x")
    assert b"x" not in end.text


TAGS = ReasoningTags(starts=(), ends=("</think>",), is_open=True, end_token_ids=tuple(b"</think>"))
THINKING = grammar_text(StructuredOutputs(regex="[a-z]{20}"), answer_within(TAGS, lambda text: None))


def thinking(request_id: str, **params: Any) -> Request:
    return msgspec.structs.replace(
        request(request_id, THINKING, thinking_token_budget=7, temperature=1.5, **params), reasoning=TAGS
    )


def test_a_spent_budget_ends_the_reasoning_and_the_grammar_goes_on_with_the_answer(engine: Engine) -> None:
    for seed in range(3):
        end = run(engine, thinking("a", seed=seed, skip_special_tokens=False))["a"]
        thoughts, _, answer = end.text.partition(b"</think>")
        assert end.finish_reason is FinishReason.STOP
        assert thoughts
        assert re.fullmatch(rb"[ \r\n\t]{0,8}[a-z]{20}", answer)


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason"),
    [
        ({"stop": ("/thi",)}, FinishReason.STOP, "/thi"),
        ({"max_tokens": 10}, FinishReason.LENGTH, None),
        ({"bad_words": ("think",), "bad_words_token_ids": ((ord("t"),),)}, FinishReason.STOP, None),
        ({"allowed_token_ids": tuple(b"abc")}, FinishReason.STOP, None),
        ({"logit_bias": dict.fromkeys(b"</think>", -100)}, FinishReason.STOP, None),
        ({"min_tokens": 58}, FinishReason.STOP, None),
    ],
)
def test_what_is_forced_can_end_an_output_and_nothing_can_forbid_it(
    engine: Engine, params: dict[str, Any], reason: FinishReason, stop_reason: str | None
) -> None:
    end = run(engine, thinking("a", **params))["a"]
    assert (end.finish_reason, end.stop_reason) == (reason, stop_reason)
    if stop_reason is None and reason is FinishReason.STOP:
        assert b"</think>" in end.text
    else:
        assert end.text.endswith(b"<" if stop_reason else b"</t")


def test_a_grammar_that_runs_out_of_fuel_ends_its_request_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "STEP_LEXER_FUEL", 2_000)
    engine = make_engine(model)
    costly = "start: /(.*(a|b).{0,2000}c){20}/"
    ends = run(engine, request("costly", costly, max_tokens=200), request("plain", None), request("word"))
    assert ends["costly"].finish_reason is FinishReason.ERROR
    assert ends["costly"].is_alone
    assert str(ends["costly"].error).endswith(compiler.TOO_COMPLEX)
    assert ends["plain"].finish_reason is not FinishReason.ERROR
    assert ends["word"].finish_reason is FinishReason.STOP
    assert engine.stats().num_blocks_in_use == 0
    engine.close()


class Panic(BaseException):
    """As llguidance's, which are no Exceptions."""


def test_a_matcher_that_breaks_ends_its_request_alone(engine: Engine) -> None:
    class Broken:
        def consume_token(self, token_id: int) -> None:
            raise Panic

    engine.submit(request("broken"))
    engine.submit(request("whole"))
    ends: dict[str, FinishReason] = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
        for live in engine._live.values():
            if live.seq.request.request_id == "broken" and live.num_outputs == 3 and live.constraint is not None:
                live.constraint._done.wait()
                live.constraint._matcher = Broken()  # type: ignore[assignment]
    assert ends == {"broken": FinishReason.ERROR, "whole": FinishReason.STOP}


def test_what_does_not_compile_ends_with_an_error_of_its_own(engine: Engine) -> None:
    ends = run(engine, request("bad", "start: nothing"), request("good"))
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert ends["good"].finish_reason is FinishReason.STOP


def test_a_request_whose_grammar_compiles_counts_as_waiting_and_can_be_aborted(engine: Engine) -> None:
    engine.submit(request("a"))
    engine.submit(request("b"))
    assert engine.stats().num_requests_waiting == 2
    engine.abort("a")
    ended = [output for _ in range(200) if engine.has_work for output in engine.step() if output.finish_reason]
    assert [output.request_id for output in ended] == ["b"]


def test_nobody_waits_for_a_grammar_that_compiles(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    make_compiler = engine._grammars._make_compiler
    monkeypatch.setattr(engine._grammars, "_make_compiler", lambda: release.wait() and make_compiler())
    engine.submit(request("slow"))
    engine.submit(request("quick", None, max_tokens=5))
    ended = [output.request_id for _ in range(8) for output in engine.step() if output.finish_reason]
    assert ended == ["quick"]
    release.set()
    assert "slow" in [o.request_id for _ in range(100) if engine.has_work for o in engine.step() if o.finish_reason]


def test_an_output_does_not_depend_on_what_others_with_its_grammar_tried(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 800)
    growing = "start: /(.|\\n)*[a-m].{12}X/"

    def outcome(*requests: Request) -> tuple[FinishReason | None, bytes]:
        engine = make_engine(model)
        end = run(engine, *requests)["a"]
        engine.close()
        return end.finish_reason, end.text

    alone = outcome(request("a", growing))
    assert outcome(*(request(str(i), growing, seed=i) for i in range(6)), request("a", growing)) == alone


@pytest.mark.parametrize(
    "said",
    [
        "Current row has 12007 items; max is 10000; consider making your grammar left-recursive",
        "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable "
        "limits.precompute_large_lexemes",
        "initial lexer configuration (grammar) too big (limit for this grammar: 1000000)",
        "too many states: 50001 > 50000; stopping",
        "Too many items (limit 50000); try avoiding single-byte/short lexemes",
    ],
)
def test_no_setting_of_llguidance_is_named_to_whoever_has_none(said: str) -> None:
    assert compiler.plain(said) == compiler.TOO_COMPLEX
    assert compiler.plain('unknown name: "fuel"') == 'unknown name: "fuel"'


class FailingMatcher:
    """Its second mask fails, as soon as its first token is known; it may panic at that."""

    def __init__(self, panics: bool) -> None:
        self._panics = panics
        self._failed = False

    def is_error(self) -> bool:
        return self._failed

    def get_error(self) -> str:
        return "out of order"

    def consume_token(self, token_id: int) -> None:
        self._failed = True
        if self._panics:
            raise Panic

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0xFF, num_bytes)


@pytest.mark.parametrize("panics", [False, True])
def test_whether_a_token_counts_does_not_depend_on_how_soon_the_next_mask_fails(panics: bool) -> None:
    grammars = Grammars(vocabulary.compiler, 64)
    constraint = Constraint(grammars._masking, 64, ())
    matcher: Any = FailingMatcher(panics)
    constraint.begin(matcher)
    mask = np.zeros(2, np.uint32)
    assert constraint.fill(mask)
    constraint.accept(1)
    assert constraint._done.wait(5)
    assert constraint.error is None, "the token was sampled with a good mask"
    assert not constraint.fill(mask)
    assert ("Panic" if panics else "out of order") in str(constraint.error)
    grammars.close()


def test_a_panic_ends_its_own_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*args: Any) -> None:
        raise Panic

    with monkeypatch.context() as patched:
        patched.setattr(GrammarCompiler, "compile", panic)
        assert run(engine, request("a"))["a"].finish_reason is FinishReason.ERROR
    assert run(engine, request("b"))["b"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("aborted", [True, False])
def test_a_matcher_goes_with_its_request(engine: Engine, aborted: bool) -> None:
    engine.submit(request("a"))
    while not engine._live:
        engine.step()
    engine.step()
    (live,) = engine._live.values()
    constraint = live.constraint
    assert constraint is not None
    assert constraint._matcher is not None
    if aborted:
        engine.abort("a")
    while engine.has_work:
        engine.step()
    deadline = time.monotonic() + 5
    while constraint._matcher is not None:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.001)


def test_an_engine_closes_without_the_grammars_that_wait(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    compiled = []
    release = threading.Event()
    make_compiler = engine._grammars._make_compiler
    monkeypatch.setattr(engine._grammars, "_make_compiler", lambda: release.wait() and make_compiler())
    compile_one = GrammarCompiler.compile
    monkeypatch.setattr(
        GrammarCompiler, "compile", lambda self, grammar: compiled.append(grammar) or compile_one(self, grammar)
    )
    for i in range(5):
        engine.submit(request(str(i), WORD + " " * i))
    threading.Timer(0.1, release.set).start()
    engine.close()
    assert len(compiled) <= 1


def test_an_engine_that_nobody_closes_ends_its_threads(model: Path) -> None:
    before = threading.active_count()
    engine = make_engine(model)
    run(engine, request("a"))
    assert threading.active_count() == before + 2
    del engine
    gc.collect()
    assert threading.active_count() == before


LEFT_OPEN = """
import sys
sys.path[:0] = {path!r}
from tests.structured.test_grammars_in_engine import Path, make_engine, request
engine = make_engine(Path(sys.argv[1]))
for i in range(20):
    engine.submit(request(str(i), 'start: ("x" | "' + "y" * i + '"){{1,3000}} ' * 40))
"""


def test_a_program_can_end_while_grammars_compile(model: Path) -> None:
    script = LEFT_OPEN.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", script, str(model)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_without_grammars_has_no_threads_for_them(engine: Engine) -> None:
    before = threading.active_count()
    run(engine, request("a", None))
    assert threading.active_count() == before


def test_an_engine_without_end_token_ends_grammars_all_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    monkeypatch.setattr(engine, "_eos_token_ids", frozenset())
    assert run(engine, request("a"))["a"].finish_reason is FinishReason.STOP
    engine.close()
