"""What a request asks for becomes a grammar that allows just that."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequestError
from octavo.core.records import STRUCTURED_KINDS, ReasoningTags, StructuredOutputs
from octavo.structured.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, answer_within, grammar_text
from octavo.structured.schema import MAX_DEPTH
from tests.structured.vocabulary import CALL, EOS, TOKENS, Form, cut, special_token

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def refused(**outputs: object) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        Form(**outputs)
    assert caught.value.param == "structured_outputs"
    return str(caught.value)


@pytest.mark.parametrize("seed", range(5))
def test_json_that_fits_a_schema_is_allowed_however_it_is_cut_into_tokens(seed: int) -> None:
    form = Form(json=PERSON)
    assert form.fits('{"name": "hello true", "age": 3}', seed)
    assert form.fits('{"name":"é😀\\n","other":[{}]}', seed)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"name": 3}', '{"name": "a"', '{"name": "a"} ', ' {"name": "a"}', '{"name": "a", "age": 1.5}']
)
def test_other_json_is_not(text: str) -> None:
    assert not Form(json=PERSON).fits(text)


def test_a_schema_may_come_as_text() -> None:
    assert Form(json='{"type": "integer"}').fits("12")
    assert "not JSON" in refused(json='{"type": ')


def test_white_space_in_json_comes_to_an_end() -> None:
    form = Form(json_object=True)
    assert form.fits("{" + " " * 40 + "}")
    assert not form.fits("{" + "\n" * 41 + "}")


def test_white_space_is_what_the_request_says() -> None:
    assert not Form(json_object=True, disable_any_whitespace=True).fits("{ }")
    assert Form(json_object=True, whitespace_pattern="\t").fits("{\t}")
    assert not Form(json_object=True, whitespace_pattern="\t").fits("{ }")


def test_objects_can_be_closed() -> None:
    form = Form(json={"$defs": {"p": PERSON}, "$ref": "#/$defs/p"}, disable_additional_properties=True)
    assert form.fits('{"name":"a"}')
    assert not form.fits('{"name":"a","b":1}')


def test_a_closed_object_keeps_a_property_called_properties() -> None:
    schema = {"type": "object", "properties": {"const": {"type": "object", "properties": {"a": {}}}}}
    form = Form(json=schema, disable_additional_properties=True)
    assert form.fits('{"const":{"a":1}}')
    assert not form.fits('{"const":{"b":1}}')


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    form = Form(json_object=True)
    assert form.fits('{"a": [1, null, {"b": "c"}]}')
    assert not form.fits("[]")


def test_a_regular_expression_matches_the_whole_output() -> None:
    form = Form(regex=r"(a/b|\d{3}-\w+)")
    assert form.fits("a/b")
    assert form.fits("123-hello")
    assert not form.fits("123-")
    assert not form.fits("x123-a")
    assert "look-around" in refused(regex="(?=a)b")


def test_a_choice_may_be_the_beginning_of_another() -> None:
    form = Form(choice=["true", "truer", 'say "é\\"'])
    assert form.fits("true")
    assert form.fits("truer")
    assert form.fits('say "é\\"')
    assert not form.fits("tru")


def test_grammars_are_lark_or_gbnf() -> None:
    for grammar in ('start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'):
        form = Form(grammar=grammar)
        assert form.fits("((x))")
        assert not form.fits("((x)")
    assert "neither Lark nor GBNF" in refused(grammar="root ::= (")
    assert "unknown name" in refused(grammar="start: other")


def test_a_users_grammar_may_force_how_a_text_is_cut_into_tokens() -> None:
    form = Form(grammar='%llguidance {"no_forcing": false}\nstart: "hello" " " "true"')
    assert form.fits([TOKENS.index(b"hello"), ord(" "), TOKENS.index(b"true")])
    assert not form.fits(list(b"hello true"))


def test_a_structural_tag_leaves_text_free_but_what_follows_its_triggers() -> None:
    form = Form(structural_tag=TAG)
    assert form.fits("hello <f")
    assert form.fits("hello <f=a>12</f> and <f=b>true</f> end")
    assert not form.fits("hello <f=")
    assert not form.fits("hello <f=c>")
    assert not form.fits("hello <f=b>12</f>")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"structures": []}, "structures"),
        ({"triggers": []}, "triggers"),
        ({"triggers": ["<g="]}, "begins with no trigger"),
        ({"triggers": ["<f=", "<g="]}, "with which no structure begins"),
        ({"format": {}}, "not supported"),
        ({"structures": [{"begin": 3}]}, "structures[0]"),
    ],
)
def test_a_structural_tag_that_makes_no_sense_is_refused(change: dict[str, object], complaint: str) -> None:
    assert complaint in refused(structural_tag={**TAG, **change})


def test_special_tokens_are_in_no_text() -> None:
    assert not Form(regex=r"(.|\n)*").fits([*cut(b"a"), CALL])
    assert not Form(regex="<.*>").fits([CALL])
    assert Form(regex="<.*>").fits("<|call|>"), "spelled out it is a text like any other"


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_reasoning_before_the_answer_is_free_text(is_open: bool, seed: int) -> None:
    tags = ReasoningTags(starts=("<think>",), ends=("</think>",), is_open=is_open)
    start = "" if is_open else "\n<think>"
    form = Form(answer_within(tags, special_token), json={"type": "integer"})
    assert form.fits(start + '{"a": <b></thin 3</think>\n\n12', seed)
    assert form.fits(start + "</think>12", seed)
    assert form.fits("12", seed) is not is_open
    assert not form.fits(start + "hello</think>hello", seed)
    assert not form.fits(start + "12", seed)


def test_tags_of_reasoning_may_be_special_tokens() -> None:
    tags = ReasoningTags(starts=("<|call|>",), ends=("<eos>", "<|call|>"), is_open=False)
    form = Form(answer_within(tags, special_token), regex="yes")
    assert form.fits([CALL, *cut(b"hm <|call|>"), CALL, *cut(b"yes")])
    assert form.fits([CALL, EOS, *cut(b"yes")])
    assert not form.fits([*cut(b"<|call|>"), CALL, *cut(b"yes")])


def test_what_is_known_to_come_without_reasoning_has_no_around() -> None:
    assert answer_within(None, special_token) == ""
    assert answer_within(ReasoningTags(starts=(), ends=("</think>",), is_open=False), special_token) == ""


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"not": {}}, "not"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "object", "minProperties": 2}, "required"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        (False, "object"),
        ({"$ref": "#"}, "no text fits"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "no text fits"),
        ({"enum": [float("inf")]}, "number"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_with_the_reason(schema: object, complaint: str) -> None:
    assert complaint in refused(json=schema)


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {
        "type": "object",
        "properties": {"minProperties": {"const": 5}, "enum": {}},
        "required": ["minProperties"],
    }
    assert Form(json=schema, disable_additional_properties=True).fits('{"minProperties":5}')


def test_what_is_too_large_is_refused_with_the_limit() -> None:
    deep: dict[str, object] = {}
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}
    assert str(MAX_DEPTH) in refused(json=deep)
    assert f"{MAX_CHOICES:,}" in refused(choice=["a"] * (MAX_CHOICES + 1))
    for outputs in ({"regex": "a" * MAX_GRAMMAR_BYTES}, {"grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}):
        with pytest.raises(InvalidRequestError, match=f"{MAX_GRAMMAR_BYTES:,}"):
            grammar_text(StructuredOutputs(**outputs))


KEYWORDS = ("type", "properties", "items", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "required", "pattern")
SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5)
NAMES = st.sampled_from(KEYWORDS) | st.text()
VALUES = st.recursive(
    SCALARS | st.sampled_from(["#", "object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES, kind=st.sampled_from(STRUCTURED_KINDS), closed=st.booleans())
@settings(max_examples=300, deadline=None)
def test_nonsense_is_refused_or_kept_and_nothing_else_happens(value: object, kind: str, closed: bool) -> None:
    with suppress(InvalidRequestError):
        Form(**{kind: value, "disable_additional_properties": closed})


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    for outputs in ({"choice": ["\ud83d"]}, {"regex": "\ud83d"}, {"grammar": "\ud83d"}):
        assert "surrogate" in refused(**outputs)
