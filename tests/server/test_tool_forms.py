"""Whatever a form lets a model write, its parser reads as calls whose arguments fit."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.records import StructuredOutputs
from octavo.server.answer_form import answer_form
from octavo.server.protocol import ChatBody
from octavo.server.text_parser import CallArguments, CallStart, Content, Event
from octavo.server.tools.mistral import Mistral
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.plain import PlainCalls
from octavo.server.tools.registry import TOOL_PARSERS
from octavo.structured.grammar import grammar_text
from tests.structured.vocabulary import EOS, TOKENS, Form, allowed, compiler, cut

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3}},
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["CET", 'a"}']}}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "time": TIME, "stop": {"maxProperties": 0}}
FORMED = {name: parser for name, parser in TOOL_PARSERS.items() if parser.form(lambda _: None) is not None}
READERS = {**FORMED, "plain": PlainCalls}


def tool(name: str, parameters: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def body(**fields: Any) -> ChatBody:
    tools = [tool("get_weather", WEATHER, strict=True), tool("time", TIME, strict=True), tool("stop", None)]
    return ChatBody(messages=[], **{"tools": tools, **fields})


def form_of(request: ChatBody, parser: type[ToolParser]) -> Form:
    made = answer_form(request, parser, None, lambda _: None)
    assert made.outputs is not None
    form = Form.__new__(Form)
    Form.shared = Form.shared or compiler()
    form.matcher = Form.shared.compile(grammar_text(made.outputs, made.around))
    return form


def written(form: Form, seed: int, start: str = "") -> str:
    """A text that a model of random moods may write; it closes what it has opened in the end."""
    rng = random.Random(seed)
    matcher = form.matcher.deep_copy()
    ids = cut(start.encode())
    assert matcher.consume_tokens(ids)
    for count in range(4000):
        choices = sorted(allowed(matcher.compute_bitmask()))
        if EOS in choices and (len(choices) == 1 or rng.random() < 0.2):
            return b"".join(TOKENS[i] for i in ids).decode()
        choices = [i for i in choices if i != EOS]
        closing = [i for i in choices if TOKENS[i][:1] in b'"]}']
        ids.append(rng.choice(closing if closing and rng.random() < 0.3 + count / 300 else choices))
        assert matcher.consume_token(ids[-1])
    raise AssertionError("it goes on and on")


def read(parser: type[ToolParser], text: str) -> tuple[str, list[tuple[str, str]], ToolParser]:
    """Content, calls with their arguments, and the parser, which has seen the text in pieces."""
    reader = parser()
    events: list[Event] = []
    for character in text:
        events += reader.feed(character)
    events += reader.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case CallStart():
                calls.append((event.name, ""))
            case CallArguments():
                calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    return "".join(event.text for event in events if isinstance(event, Content)), calls, reader


def check_arguments(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("name", READERS)
def test_who_must_call_calls_and_says_nothing_else(name: str) -> None:
    form = form_of(body(tool_choice="required"), READERS[name])
    numbers = set()
    for seed in range(25):
        text = written(form, seed)
        content, calls, reader = read(READERS[name], text)
        assert (content, bool(calls), reader.last_is_whole) == ("", True, True), text
        check_arguments(calls)
        numbers.add(len(calls))
    assert len(numbers) > 1, "several calls were never made"


@pytest.mark.parametrize("name", READERS)
def test_without_parallel_calls_there_is_one(name: str) -> None:
    form = form_of(body(tool_choice="required", parallel_tool_calls=False), READERS[name])
    for seed in range(15):
        content, calls, _ = read(READERS[name], written(form, seed))
        assert (content, len(calls)) == ("", 1)


@pytest.mark.parametrize("name", READERS)
def test_the_named_function_is_called_once(name: str) -> None:
    form = form_of(body(tool_choice={"type": "function", "function": {"name": "time"}}), READERS[name])
    for seed in range(10):
        content, calls, _ = read(READERS[name], written(form, seed))
        assert (content, [called for called, _ in calls]) == ("", ["time"])
        check_arguments(calls)


@pytest.mark.parametrize("name", FORMED)
def test_a_strict_function_that_is_called_of_free_will_gets_arguments_that_fit(name: str) -> None:
    form = form_of(body(), FORMED[name])
    assert form.fits("Hello, I call <nobody> and write {}.")
    parser = FORMED[name]
    sample = written(form_of(body(tool_choice={"type": "function", "function": {"name": "stop"}}), parser), 0)
    opening = sample.partition("stop")[0]
    for seed in range(10):
        text = written(form, seed, f"Well.\n{opening}")
        _, calls, _ = read(parser, text)
        assert calls, text
        check_arguments([call for call in calls[:1] if call[0] != "stop"])


def test_marks_that_are_special_tokens_are_written_as_such() -> None:
    ids = {"[TOOL_CALLS]": 300, "[ARGS]": 301}
    grammar = Mistral.form(ids.get).required([], ids.get, only_one=True)  # type: ignore[union-attr]
    assert "start: calls" in grammar
    assert "<[300]>" in grammar
    made = answer_form(body(tool_choice="required"), Mistral, None, ids.get)
    assert made.outputs is not None
    assert '"get_weather" <[301]>' in str(made.outputs.grammar)


def test_a_name_that_a_format_could_not_read_is_written_as_json() -> None:
    form = TOOL_PARSERS["kimi_k2"].form(lambda _: None)
    assert form is not None
    assert form.can_write("get_weather-2.0")
    assert not form.can_write("what: a name")
    assert PlainCalls.form(lambda _: None).can_write('any "name"')


def test_hundreds_of_functions_can_be_offered() -> None:
    tools = [tool(f"function_{i}", WEATHER) for i in range(256)]
    form = form_of(body(tools=tools, tool_choice="required"), PlainCalls)
    names = {read(PlainCalls, written(form, seed))[1][0][0] for seed in range(3)}
    assert len(names) == 3


def test_an_answer_in_a_given_form_may_call_instead() -> None:
    hermes = TOOL_PARSERS["hermes"]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    form = form_of(body(response_format=schema), hermes)
    assert form.fits("12")
    assert form.fits('<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    assert not form.fits("hello")


def test_functions_that_are_not_strict_leave_an_answer_free() -> None:
    made = answer_form(body(tools=[tool("time", TIME)]), TOOL_PARSERS["hermes"], None, lambda _: None)
    assert made.outputs is None


@pytest.mark.parametrize(
    ("fields", "parser", "complaint"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "hermes", "not among the tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "hermes", "both"),
        ({}, "pythonic", "calls that are JSON"),
        ({"tools": [tool("a" * 300_000, {})], "tool_choice": "required"}, "hermes", "the limit is"),
    ],
)
def test_what_goes_not_together_is_refused(fields: dict[str, Any], parser: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        answer_form(body(**fields), TOOL_PARSERS[parser], None, lambda _: None)


def test_a_free_answer_without_tools_has_no_form() -> None:
    made = answer_form(ChatBody(messages=[]), None, None, lambda _: None)
    assert (made.outputs, made.around) == (None, "")
    made = answer_form(ChatBody(messages=[], response_format={"type": "json_object"}), None, None, lambda _: None)
    assert made.outputs == StructuredOutputs(json_object=True)
