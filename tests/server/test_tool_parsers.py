"""Texts of models against the calls in them. What a parser finds must not depend on how the text was cut."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.reasoning import REASONING_PARSERS
from octavo.server.text_parser import CallArguments, CallStart, Content, Event
from octavo.server.tools.registry import TOOL_PARSERS

Found = tuple[str, list[tuple[str, str]], bool]  # content, (name, arguments) of the calls, whether the last is whole


def parse(name: str, pieces: list[str], tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Found:
    parser = TOOL_PARSERS[name](tools)
    content, calls = "", []
    for events in (*map(parser.feed, pieces), parser.finish()):
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallStart):
                assert event.index == len(calls)
                calls.append((event.name, ""))
            else:
                assert event.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, calls, parser.last_is_whole


F, G = '{"name": "f", "arguments": {"a": "ü", "b": [1, {"c": null}]}}', '{"name": "g", "arguments": {}}'
F_CALL, G_CALL = ("f", '{"a": "ü", "b": [1, {"c": null}]}'), ("g", "{}")
LLAMA_F = F.replace("arguments", "parameters")
PYTHON_F, PYTHON_F_CALL = "f(a='ü', b=[1, {\"c\": None}])", ("f", F_CALL[1])

XML_F = """<function=f>
<parameter=a>
ü
</parameter>
<parameter=b>
[1, {"c": null}]
</parameter>
</function>"""
XML_G = "<function=g></function>"
INVOKE_F = """<invoke name="f">
<parameter name="a">ü</parameter>
<parameter name="b">[1, {"c": null}]</parameter>
</invoke>"""
GLM_F = """f
<arg_key>a</arg_key>
<arg_value>ü</arg_value>
<arg_key>b</arg_key><arg_value>[1, {"c": null}]</arg_value>
"""
DSML_F = (
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">ü</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">[1, {"c": null}]</｜DSML｜parameter></｜DSML｜invoke>'
)

# parser, text, content, calls
CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", "", [F_CALL]),
    ("hermes", f"So:\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>\n", "So:", [F_CALL, G_CALL]),
    ("hermes", f"\n\n<tool_call>{F}</tool_call>\n\nDone.\n", "Done.", [F_CALL]),
    ("hermes", f"A\n<tool_call>{G}</tool_call>\nB", "A\n\nB", [G_CALL]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"id": 1, "name": "f\\u00fc", "arguments": {}}</tool_call>', "", [("fü", "{}")]),
    ("hermes", f"<tool_call>{F}\n<tool_call>{G}", "", [F_CALL, G_CALL]),  # nothing closed
    ("hermes", f"<tool_call>[{F}, {G}]</tool_call>", "", [F_CALL, G_CALL]),
    ("granite", f"<|tool_call|>[{F}, {G}]", "", [F_CALL, G_CALL]),
    ("granite", f"Well. <tool_call>[{F}] Yes.", "Well.  Yes.", [F_CALL]),
    ("jamba", f"<tool_calls>[\n {F},\n {G}\n]</tool_calls>", "", [F_CALL, G_CALL]),
    ("phi4_mini_json", f"functools[{F}]", "", [F_CALL]),
    ("smollm", f"<tool_call>[{F}, {G}]</tool_call>", "", [F_CALL, G_CALL]),
    ("smollm", f"<tool_call>{F}</tool_call><code>\n{PYTHON_F}\ng()\n</code>", "", [F_CALL, PYTHON_F_CALL, G_CALL]),
    ("llama3_json", LLAMA_F, "", [F_CALL]),
    ("llama3_json", f"<|python_tag|>{LLAMA_F}; {G}", "", [F_CALL, G_CALL]),
    ("llama3_json", f"I call.\n\n  {LLAMA_F}\n{G}\nAnd wait.", "I call.\n\nAnd wait.", [F_CALL, G_CALL]),
    ("llama4_json", '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    ("mistral", f'[TOOL_CALLS] [{F}, {G[:-1]}, "id": "abcdefghi"}}]', "", [F_CALL, G_CALL]),
    ("mistral", f"Hm[TOOL_CALLS]f[ARGS]{F_CALL[1]}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{{}}", "Hm", [F_CALL, G_CALL]),
    ("mistral", f"[TOOL_CALLS]f{F_CALL[1]}", "", [F_CALL]),  # the inner mark is a special token that was left out
    ("pythonic", f"[{PYTHON_F}, g()]", "", [PYTHON_F_CALL, G_CALL]),
    ("pythonic", f"See [it](there):\n[{PYTHON_F},\n g()]\nBye", "See [it](there):\n\nBye", [PYTHON_F_CALL, G_CALL]),
    ("pythonic", "[a.b(x=-1.5, y=(1, 2), z=true,)]", "", [("a.b", '{"x": -1.5, "y": [1, 2], "z": true}')]),
    ("pythonic", '[f(a=\'it\\\'s)]\', b=""""q"\n""")]', "", [("f", '{"a": "it\'s)]", "b": "\\"q\\"\\n"}')]),
    ("pythonic", "[f(a='two\nlines')]", "", [("f", '{"a": "two\\nlines"}')]),
    (
        "qwen3_coder",
        f"So:\n<tool_call>\n{XML_F}\n</tool_call>\n<tool_call>{XML_G}</tool_call>",
        "So:",
        [F_CALL, G_CALL],
    ),
    ("qwen3_xml", f"{XML_F}\n</tool_call>\n{XML_G} Bye", "Bye", [F_CALL, G_CALL]),  # the outer tag is left out
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n\n1\n2\n\n</parameter>\n</function>",
        "",
        [("f", '{"a": "\\n1\\n2\\n"}')],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=a>x<parameter=y>\n<parameter=b>\ntrue\n</function>",
        "",
        [("f", '{"a": "x<parameter=y>", "b": true}')],
    ),  # end tags are missing
    ("seed_oss", f"<seed:tool_call>{XML_F}{XML_G}</seed:tool_call>", "", [F_CALL, G_CALL]),
    (
        "minimax_m2",
        f'<minimax:tool_call>\n{INVOKE_F}\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "",
        [F_CALL, G_CALL],
    ),
    ("deepseek_v32", f"Ok.<｜DSML｜function_calls>\n{DSML_F}\n</｜DSML｜function_calls>", "Ok.", [F_CALL]),
    ("glm45", f"<tool_call>{GLM_F}</tool_call>\n<tool_call>g\n</tool_call>", "", [F_CALL, G_CALL]),
    ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>1 \n</arg_value></tool_call>", "", [("f", '{"a": 1}')]),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        f"{F_CALL[1]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [F_CALL, G_CALL],
    ),
    (
        "deepseek_v31",
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{F_CALL[1]}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        [F_CALL, G_CALL],
    ),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{F_CALL[1]}"
        "<|tool_call_end|><|tool_call_begin|>g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        " ok",
        "ok",
        [F_CALL, G_CALL],
    ),
    (
        "openai",
        f"Ok.<|channel|>commentary to=functions.f<|message|>{F_CALL[1]}<|call|>"
        "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}",
        "Ok.",
        [F_CALL, G_CALL],
    ),
    ("olmo3", f"<function_calls>\n{PYTHON_F}\ng()\n</function_calls>", "", [PYTHON_F_CALL, G_CALL]),
]

NO_CALLS = [
    ("hermes", "Hello.\n\n"),
    ("hermes", " \n "),
    ("hermes", "<tool_call>no JSON</tool_call> <tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": "f", "arguments": '),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": }</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", "<tool_call>[1, 2]</tool_call></tool_call>"),
    ("hermes", "a < b, <tool, </tool_call>"),
    ("llama3_json", '{"answer": 42}\n'),
    ("llama3_json", '{"name": "Bob", "age": 42}'),
    ("llama3_json", '{"name": "Bob"}'),
    ("llama3_json", '<|python_tag|>print("x")'),
    ("llama3_json", 'The call is {"name": "f", "parameters": {}}, I think.'),
    ("mistral", "[TOOL_CALLS]what now?"),
    ("mistral", "[TOOL_CALLS] [] [TOOL_CALLS]"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", '[f("a")]'),
    ("pythonic", "[f(a)]"),
    ("pythonic", "Call [f(a=1)]."),
    ("smollm", "<code>\nx = f(a=1)\n</code>"),
    ("olmo3", "<function_calls>\n</function_calls>"),
    ("openai", "<|channel|>final<|message|>{}"),
    ("openai", "<|channel|>commentary to=functions.f <|message|>text<|call|>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nWhat now?"),
    ("qwen3_coder", "Use <function=f> or <function= to call"),
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
    ("glm45", "<tool_call>f<arg_k"),
    ("glm45", "<tool_call>\n</tool_call>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>x"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"),
]

# parser, text, content, calls, whether the last call is whole
ODD: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')], False),  # cut
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')], True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "", [("f", '{"a": 1,}')], True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x', "x", [("f", '{"a": 1')], False),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
     [("f", '{"a": "</tool_call>"}')], True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x}}\n</tool_call> y', "y", [("f", '{"a": "x}}\n')], False),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call> y', "}\n y", [("f", "{}")], True),
    ("hermes", f'<tool_call>{G} {{"name": 1}} </tool_call>', '{"name": 1}', [G_CALL], True),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}, "b", 5}</tool_call>',
        ', "b"5}',
        [("f", "{}")],
        True,
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {},', "", [("f", "{}")], True),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "b[TOOL_CALLS', "", [("f", '{"a": "b[TOOL_CALLS')], False),
    ("pythonic", "[f(a='x', b='cut h", "", [("f", '{"a": "x", "b": "cut h')], False),
    ("pythonic", "[f(a=12", "", [("f", '{"a": 12')], False),
    ("pythonic", "[f(a=1, b", "", [("f", '{"a": 1, "b": ')], False),
    ("pythonic", "[f(a=1,", "", [("f", '{"a": 1')], False),
    ("pythonic", "[f(a=today(), b=1e999, c={1}, d=b'')]", "",
     [("f", '{"a": "today()", "b": "1e999", "c": "{1}", "d": "b\'\'"}')], True),
    ("pythonic", "[f(a=1] more", "more", [("f", '{"a": 1}')], True),
    ("qwen3_coder", "<function=f><parameter=a>\ncut h", "", [("f", '{"a": "cut h"')], False),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter> so <b", "so <b", [("f", '{"a": 1')], False),
    ("qwen3_coder", "<function=f><parameter=a>NaN</parameter><parameter=b>\\ud800</parameter></function>", "",
     [("f", '{"a": "NaN", "b": "\\\\ud800"}')], True),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value> ž", "ž", [("f", '{"a": "x"')], False),
    ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b', "", [("f", '{"a": "b')], False),
    ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1<|tool_call_end|> x', "x",
     [("f", '{"a": 1')], False),
    ("pythonic", "[f(a='\\ud800')]", "", [("f", '{"a": "\\ud800"}')], True),
]  # fmt: skip


def cuts(text: str) -> list[list[str]]:
    return [[text], *([text[i : i + n] for i in range(0, len(text), n)] for n in (1, 2, 3, 5, 8, 13))]


def test_the_document_names_every_parser() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    assert [name for name in (*TOOL_PARSERS, *REASONING_PARSERS) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in cuts(text):
        assert parse(name, pieces) == (content, calls, True)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    for pieces in cuts(text):
        assert parse(name, pieces) == (text, [], False)


@pytest.mark.parametrize(("name", "text", "content", "calls", "whole"), ODD)
def test_broken_and_cut_calls_lose_nothing(
    name: str, text: str, content: str, calls: list[tuple[str, str]], whole: bool
) -> None:
    for pieces in cuts(text):
        assert parse(name, pieces) == (content, calls, whole)


def test_arguments_come_piece_by_piece_and_plain_text_at_once() -> None:
    parser = TOOL_PARSERS["hermes"]()
    assert parser.feed("Hello <b") == [Content("Hello <b")]
    assert parser.feed(" <tool") == []
    start, *arguments = parser.feed('_call>{"name": "f", "arguments": {"text": "on')
    assert start == CallStart(0, "f")
    assert arguments_of(arguments) == '{"text": "on'
    assert arguments_of(parser.feed("ce up")) == "ce up"
    assert arguments_of(parser.feed('on"}}</tool_call>')) == 'on"}'


def test_a_python_value_comes_when_it_is_whole() -> None:
    parser = TOOL_PARSERS["pythonic"]()
    assert parser.feed("[f(a=1")[0] == CallStart(0, "f")
    assert arguments_of(parser.feed("2, b=")) == '12, "b": '
    assert arguments_of(parser.feed("'x', c=3)")) == '"x", "c": 3}'


def test_json_that_cannot_become_a_call_is_not_held_back() -> None:
    events = TOOL_PARSERS["llama3_json"]().feed('{"answer": ')
    assert "".join(event.text for event in events if isinstance(event, Content)) == '{"answer":'


SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "odd": "no schema",
    }
}


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("text", "12", "12"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", 'say "ü"\n\\', 'say "ü"\n\\'),
        ("number", " 12 ", 12),
        ("number", "twelve", "twelve"),
        ("flag", "True", True),
        ("list", "['a', None]", ["a", None]),
        ("list", '["a", null]', ["a", None]),
        ("odd", "True", "True"),
        ("unknown", "1, 2", "1, 2"),
        ("unknown", "1.5", 1.5),
    ],
)
def test_bare_values_are_what_the_schema_says_or_what_they_look_like(key: str, raw: str, value: Any) -> None:
    for name, text in (
        ("qwen3_coder", f"<function=f>\n<parameter={key}>\n{raw}\n</parameter>\n</function>"),
        ("glm45", f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{raw}</arg_value>\n</tool_call>"),
    ):
        for pieces in cuts(text):
            _, ((_, arguments),), whole = parse(name, pieces, SCHEMAS)
            assert whole
            assert json.loads(arguments) == {key: value}


def test_text_of_a_bare_value_comes_piece_by_piece() -> None:
    parser = TOOL_PARSERS["qwen3_coder"](SCHEMAS)
    assert arguments_of(parser.feed("<function=f>\n<parameter=text>\none")) == '{"text": "one'
    assert arguments_of(parser.feed("\ntwo\n")) == "\\ntwo"
    assert arguments_of(parser.feed("</parameter>\n</function>")) == '"}'


def test_a_call_whose_model_gives_it_an_id_keeps_that() -> None:
    start, *_ = TOOL_PARSERS["kimi_k2"]().feed("<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{")
    assert start == CallStart(0, "f", "functions.f:3")


def arguments_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, CallArguments))


# Marks, halves of marks, and what may be between them. "ž" stands for what must not be lost.
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_call", "<|tool_call|>", "<tool_calls>", "</tool_calls>", "functools",
    "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<code>", "</code>", "<function_calls>", "</function_calls>",
    '{"name": "f", "arguments": ', '{"name": "ž", "parameters": ', '{"arguments": ', '"name": "g"', '{"ž": ', '"ž"',
    "{", "}", "[", "]", ",", ":", ";", '"', "\\", "\n", " ", "ž", "ž", "1", "'", '"""', "f(", "a=", "a='ž'", ")",
    "null", "None", "[f(a=1, ", F, G, PYTHON_F, "<function=f>", "<function=", "<parameter=a>", "\n<parameter=b>",
    "</parameter>", "</function>", ">", '<invoke name="f">', '<parameter name="a">', "</invoke>", "<minimax:tool_call>",
    "<seed:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f", DSML_F,
    "<｜DSML｜function_calls>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```", "```json",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.g:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|channel|>", "commentary to=functions.f", "<|constrain|>", "<|message|>", "<|call|>",
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_cut_anywhere_gives_the_same_and_loses_nothing(name: str, data: st.DataObject) -> None:
    fragments = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14))
    text = "".join(fragments)
    whole = parse(name, [text])
    assert parse(name, list(text)) == whole
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert parse(name, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == whole
    content, calls, _ = whole
    found = content + "".join(name + arguments for name, arguments in calls)
    assert found.count("ž") == text.count("ž") or '"ž":' in text  # a key that no call has goes with its value
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>" * 20_000),
        ("hermes", f"<tool_call>{G}" * 10_000),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"arguments": ' + '{"a": ' * 50_000),
        ("hermes", '<tool_call>{"arguments": ' + '{"a": ' * 20_000 + "1" + "}" * 20_000 + ', "name": "f"}'),
        ("hermes", "\n" * 200_000),
        ("llama3_json", "{\n" * 100_000),
        ("mistral", "[TOOL_CALLS]" * 20_000),
        ("pythonic", "[f(a=" + "[" * 100_000 + ")]"),
        ("pythonic", "[f(a=" + "-" * 100_000 + "1)]"),
        ("pythonic", "[f(a=" + "9" * 100_000 + ")]"),
        ("pythonic", "[f(a=1)\n" * 20_000),
        ("qwen3_coder", "<function=f><parameter=a>" * 10_000),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>" * 5_000),
        ("qwen3_coder", "<function=f><parameter=a>" + "[" * 100_000 + "</parameter>"),
        ("glm45", "<tool_call>" * 20_000),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" * 10_000),
    ],
)
def test_long_nonsense_takes_time_linear_in_its_length(name: str, text: str) -> None:
    started = time.process_time()
    content, calls, _ = parse(name, [text[i : i + 4] for i in range(0, len(text), 4)])
    assert time.process_time() - started < 5
    assert content or calls
