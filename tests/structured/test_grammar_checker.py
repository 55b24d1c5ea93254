"""Grammars that take too much are refused, quickly, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError, OverloadedError
from octavo.core.records import StructuredOutputs
from octavo.engine import grammar_check
from octavo.engine.grammar_check import GrammarChecker
from octavo.structured.checker import Setup
from tests.structured.vocabulary import SETUP

YES = StructuredOutputs(choice=("yes", "no"))
# More rules that each need the next one than a stack has room for.
CHAIN = "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1} | "b"' for i in range(9000)), 'r9000: "c"'])
EXPLOSIVE: dict[str, dict[str, Any]] = {
    "a number of too many residues": {"json": {"type": "integer", "multipleOf": 1000003}},
    "thousands of optional properties": {
        "json": {"type": "object", "properties": {f"property-{i}": {"type": "integer"} for i in range(6000)}}
    },
    "a huge enum": {"json": {"enum": [f"value-{i}-{i * 7919 % 100003}" for i in range(40000)]}},
    "a product of alternatives": {
        "json": {
            "type": "object",
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}": {"type": t}}} for t in ("integer", "string")]} for i in range(30)
            ],
        }
    },
    "terminals that double": {
        "grammar": "\n".join(["start: A60", *(f"A{i}: A{i - 1} A{i - 1}" for i in range(1, 61)), 'A0: "x"'])
    },
    "rules of endless depth": {"grammar": CHAIN},
    "parentheses": {"regex": "(" * 50_000 + ")" * 50_000},
}
# These look no better, but cost little.
HARMLESS: dict[str, dict[str, Any]] = {
    "a million characters": {"json": {"type": "string", "maxLength": 10**6}},
    "nested repeats": {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "nested lists": {"json": {"type": "array", "maxItems": 10**9, "items": {"type": "array", "minItems": 10**6}}},
    "a type that contains itself": {
        "json": {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    },
    "types that double": {
        "json": {
            "$ref": "#/$defs/d30",
            "$defs": {
                "d0": {"type": "integer"},
                **{
                    f"d{i}": {"type": "object", "properties": {n: {"$ref": f"#/$defs/d{i - 1}"} for n in "ab"}}
                    for i in range(1, 31)
                },
            },
        }
    },
}


@asynccontextmanager
async def checker(setup: Setup = SETUP) -> AsyncIterator[GrammarChecker]:
    one = GrammarChecker(setup)
    try:
        yield one
    finally:
        await one.close()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_what_explodes_is_refused_in_time_and_the_next_request_is_not() -> None:
    async def check() -> None:
        async with checker() as one:
            for name, outputs in EXPLOSIVE.items():
                began = time.monotonic()
                with pytest.raises(InvalidRequestError) as caught:
                    await one.grammar(StructuredOutputs(**outputs))
                assert time.monotonic() - began < 20, name
                assert len(str(caught.value)) < 600, name
                assert await one.grammar(YES), name

    run(check())


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_large_is_allowed(name: str) -> None:
    async def check() -> None:
        async with checker() as one:
            assert await one.grammar(StructuredOutputs(**HARMLESS[name]))

    run(check())


def test_a_form_need_not_wait_for_those_that_explode() -> None:
    async def check() -> None:
        async with checker() as one:
            await one.grammar(YES)
            forms = [StructuredOutputs(json={"type": "integer", "multipleOf": 1000003 + i}) for i in range(2)]
            slow = [asyncio.create_task(one.grammar(form)) for form in forms]
            await asyncio.sleep(0.1)
            assert await one.grammar(StructuredOutputs(regex="quick"))
            assert not any(task.done() for task in slow)
            refusals = await asyncio.gather(*slow, return_exceptions=True)
            assert all("1 s" in str(refusal) for refusal in refusals)

    run(check())


def test_a_checker_that_was_killed_is_started_again() -> None:
    async def check() -> None:
        async with checker() as one:
            await one.grammar(YES)
            waiting = asyncio.create_task(one.grammar(StructuredOutputs(**EXPLOSIVE["a number of too many residues"])))
            await asyncio.sleep(0.1)
            assert one._process is not None
            one._process.kill()
            with pytest.raises(OverloadedError, match="try again"):
                await waiting
            assert await one.grammar(StructuredOutputs(regex="a"))

    run(check())


def test_a_checker_that_was_stopped_is_replaced() -> None:
    async def check() -> None:
        async with checker() as one:
            await one.grammar(YES)
            assert one._process is not None
            os.kill(one._process.pid, signal.SIGSTOP)
            with pytest.raises(OverloadedError, match="try again"):
                await asyncio.wait_for(one.grammar(StructuredOutputs(regex="a")), 20)
            assert await one.grammar(StructuredOutputs(regex="a"))

    run(check())


def test_a_checker_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "SILENT_LOOKS", 2)

    async def check() -> None:
        one = GrammarChecker(SETUP, (sys.executable, "-c", "import time; time.sleep(1000)"))
        for _ in range(2):
            with pytest.raises(OverloadedError, match="try again"):
                await asyncio.wait_for(one.grammar(YES), 20)
        await one.close()

    run(check())


def test_a_refusal_is_remembered_and_costs_nothing_again() -> None:
    async def check() -> None:
        async with checker() as one:
            form = StructuredOutputs(**EXPLOSIVE["a number of too many residues"])
            with pytest.raises(InvalidRequestError):
                await one.grammar(form)
            began = time.monotonic()
            with pytest.raises(InvalidRequestError, match="1 s"):
                await one.grammar(form)
            assert time.monotonic() - began < 0.5

    run(check())


def test_requests_for_the_same_form_share_one_try() -> None:
    async def check() -> None:
        async with checker() as one:
            many = [asyncio.create_task(one.grammar(YES)) for _ in range(100)]
            assert len(set(await asyncio.gather(*many))) == 1

    run(check())


def test_a_client_that_leaves_takes_nothing_along() -> None:
    async def check() -> None:
        async with checker() as one:
            leaving = asyncio.create_task(one.grammar(YES))
            staying = asyncio.create_task(one.grammar(StructuredOutputs(regex="a")))
            await asyncio.sleep(0)
            leaving.cancel()
            assert "/a/" in await staying
            assert "yes" in await one.grammar(YES)

    run(check())


def test_more_waiting_forms_than_the_limit_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 2)

    async def check() -> None:
        async with checker() as one:
            tasks = [asyncio.create_task(one.grammar(StructuredOutputs(regex=f"a{i}"))) for i in range(3)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(result, OverloadedError) for result in results] == [False, False, True]

    run(check())


def test_verdicts_are_forgotten_when_they_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_KEPT_BYTES", 1000)

    async def check() -> None:
        async with checker() as one:
            for i in range(10):
                await one.grammar(StructuredOutputs(regex=f"a{i}" * 50))
            assert one._kept_bytes <= 1000
            assert one._kept_bytes == sum(map(grammar_check._size, one._kept.values()))

    run(check())


def test_what_cannot_even_be_sent_is_refused() -> None:
    async def check() -> None:
        async with checker() as one:
            with pytest.raises(InvalidRequestError, match="surrogate"):
                await one.grammar(StructuredOutputs(choice=("\ud83d",)))

    run(check())
