"""The parts of the Messages route alone: arguments made JSON, conversations made ours."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.messages.arguments import MALFORMED, MAX_DEPTH, JsonArguments
from octavo.server.messages.bodies import MessagesBody
from octavo.server.messages.conversation import chat_body
from octavo.server.protocol import ChatBody


def mended(pieces: list[str]) -> str:
    arguments = JsonArguments()
    return "".join([*map(arguments.next, pieces), arguments.end()])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
FRAGMENTS = ["{", "}", "[", "]", ",", ":", '"', "\\", "\n", " ", '"a"', '"ž": ', "ž", "1", "-", ".5", "true", "null"]
FRAGMENTS += ["\\u00e9", "\\ud83d", "\\ude00", "\\u12", "\\x", '{"a": ', "'", "True"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "ü", "b": [1, {"c": null}]}', {"a": "ü", "b": [1, {"c": None}]}),
        (' {"a":1,"b":[],} ', {"a": 1, "b": []}),
        ('{"a": [1, 2,]}', {"a": [1, 2]}),
        ('{"a": "1\n\t2"}', {"a": "1\n\t2"}),
        (r'{"a": "\d\'\u12"}', {"a": r"\d\'\u12"}),
        (r'{"a": "\ud83d\ude00\ud83d\u0041\udc00"}', {"a": "😀�A�"}),
        ("", {}),
        ("{", {}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b": ', {"a": 1}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1, 2]}}),
        ('{"a": 1}}', {"a": 1}),
        ("null", {MALFORMED: "null"}),
        ("{'a': 1}", {MALFORMED: "'a': 1}"}),
        ('{"a": 1 "b": 2}', {"a": 1, MALFORMED: ' "b": 2}'}),
        ('{"a": {"b": True}, "c": 3}', {"a": {}, MALFORMED: '"b": True}, "c": 3}'}),
        ('{"a": [1}, "b": 3}', {"a": [1], MALFORMED: '}, "b": 3}'}),
        ('{"a": NaN}', {MALFORMED: '"a": NaN}'}),
    ],
)
def test_arguments_are_mended_and_what_cannot_be_is_kept_as_text(text: str, value: Any) -> None:
    assert json.loads(mended([text])) == value
    assert mended(list(text)) == mended([text])


@settings(max_examples=150, deadline=None)
@given(value=st.dictionaries(st.text(), JSON_VALUES, max_size=4), spaced=st.booleans(), ascii_only=st.booleans())
def test_an_object_stays_what_it_is(value: dict[str, Any], spaced: bool, ascii_only: bool) -> None:
    text = json.dumps(value, indent=1 if spaced else None, ensure_ascii=ascii_only)
    text.encode("utf-8", "replace")
    assert json.loads(mended([text])) == json.loads(text)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_cut_anywhere_becomes_one_object_that_can_be_sent(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=16)))
    whole = mended([text])
    value = msgspec.json.decode(whole)
    assert isinstance(value, dict)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert mended([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == whole


def test_a_depth_that_readers_may_not_bear_is_text() -> None:
    text = '{"a": ' * 100_000
    started = time.process_time()
    value = json.loads(mended([text[i : i + 64] for i in range(0, len(text), 64)]))
    assert time.process_time() - started < 5
    assert MALFORMED in value
    for _ in range(MAX_DEPTH - 1):
        value = value["a"]
    assert value == {"a": {}} or value == {}


def chat(**fields: Any) -> ChatBody:
    return chat_body(msgspec.convert({"max_tokens": 5, **fields}, MessagesBody), {"temperature": 0.6, "top_k": 20})


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "citations": None, "cache_control": {"type": "ephemeral"}}


def test_turns_become_messages_and_results_messages_of_their_own() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
    messages = [
        {"role": "user", "content": "One"},
        user(text("Two")),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "octavo"},
                {"type": "redacted_thinking", "data": "secret"},
                text("I look."),
                call,
            ],
        },
        user(
            {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
            {"type": "tool_result", "tool_use_id": "t2", "content": [text("a"), text("b")]},
            {"type": "tool_result", "tool_use_id": "t3"},
            text("And?"),
        ),
        {"role": "system", "content": "Hurry."},
        user(text("Now")),
    ]
    assert chat(messages=messages, system=[text("Be"), text("brief.")]).messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "One\nTwo"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Hurry."},
        {"role": "user", "content": "Now"},
    ]


def test_settings_become_ours_and_the_models_own_defaults_fill_the_rest() -> None:
    tool = {"name": "f", "description": None, "input_schema": {"type": "object"}, "eager_input_streaming": True}
    body = chat(
        messages=[user()],
        stop_sequences=["x"],
        temperature=1.0,
        metadata={"user_id": "me"},
        tools=[tool],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        output_config={"effort": "high"},
    )
    assert (body.temperature, body.top_k, body.top_p) == (1.0, 20, 1.0)
    assert (body.max_tokens, body.stop, body.user) == (5, ["x"], "me")
    function = {"name": "f", "parameters": {"type": "object"}}
    assert body.tools == [{"type": "function", "function": function}]
    assert (body.tool_choice, body.parallel_tool_calls) == ("auto", False)
    assert body.template_variables == {"reasoning_effort": "high", "enable_thinking": False}
    assert body.messages == [{"role": "user", "content": ""}]


def test_thinking_and_a_last_message_of_the_assistant_have_fields_of_ours() -> None:
    question, begun = {"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}
    body = chat(messages=[question], thinking={"type": "enabled", "budget_tokens": 7})
    assert (body.enable_thinking, body.include_reasoning, body.thinking_token_budget) == (True, True, 7)
    assert body.begins_message
    body = chat(messages=[question, begun])
    assert (body.enable_thinking, body.include_reasoning, body.thinking_token_budget) == (False, False, None)
    assert body.continue_final_message
    assert not body.begins_message
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    assert chat(messages=[question, call]).begins_message
