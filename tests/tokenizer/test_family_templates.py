"""Prompts of 21 families' templates against transformers' apply_chat_template, and where the templates come from.

templates/*.jinja have the structure of the families' own templates (conditions, loops over tools and calls, white
space, dates) in other words.
"""

from __future__ import annotations

import copy
import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Ort> & 'mehr'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "12° <b>"}
USER = {"role": "user", "content": " Hi <b>&'\" 😀\n\n there "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo"}
SYSTEM = {"role": "system", "content": "Be brief. /no_think \n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER, {"role": "assistant", "content": "x", "reasoning_content": "r"}, USER],
    "system and turns": [SYSTEM, USER, ANSWER, USER],
    "assistant last": [USER, ANSWER],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    "call and more": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, ANSWER, USER],
    "two calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, RESULT, RESULT],
    "wrong order": [ANSWER, USER],
    "late system": [USER, ANSWER, SYSTEM, USER],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"tools": [TOOL]},
    {"tools": [TOOL, TOOL], "tools_go_to_user": False, "enable_thinking": True},
    {"documents": [{"id": 1, "title": "A", "text": "<x> ü"}, {"title": "B", "text": ""}], "controls": {"citations": 1}},
    {"tools": [TOOL], "documents": [{"text": "y"}], "enable_thinking": False, "built_in": ["interpreter", "web"]},
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({BOS: 0, EOS: 1}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)


def try_to_render(
    oracle: Any, chat: list[dict[str, Any]], source: str, options: dict[str, Any]
) -> tuple[str | None, str]:
    """The prompt, or None and why there is none."""
    options = {"add_generation_prompt": True, **options}
    try:
        return oracle.apply_chat_template(copy.deepcopy(chat), chat_template=source, tokenize=False, **options), ""
    except Exception as error:
        return None, str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_transformers(name: str, oracle: Any) -> None:
    ours = ChatTemplate(TEMPLATES[name], BOS, EOS)
    rendered = 0
    for chat in CHATS.values():
        for options in OPTIONS:
            expected, refusal = try_to_render(oracle, chat, TEMPLATES[name], options)
            if expected is None:  # what transformers refuses we refuse in the same words
                with pytest.raises(InvalidRequestError) as caught:
                    ours.render(copy.deepcopy(chat), **options)
                assert refusal in str(caught.value)
                continue
            assert ours.render(copy.deepcopy(chat), **options) == expected
            rendered += 1
    assert rendered >= 6


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_as_text_give_the_prompt_of_arguments_as_an_object(name: str) -> None:
    function = CALL["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    written = {**CALL, "function": {**function, "arguments": text}}
    template = ChatTemplate(TEMPLATES[name], BOS, EOS)

    def prompt_with(call: dict[str, Any]) -> str:
        chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]
        try:
            return template.render(chat, tools=[TOOL])
        except InvalidRequestError as error:
            return str(error)

    assert prompt_with(written) == prompt_with(CALL)


def test_templates_may_print_join_and_look_into_arguments() -> None:
    source = """{%- set a = messages[0].tool_calls[0].function.arguments -%}
        {{ '<' + a + '>' }} {{ a }} {{ a ~ '!' }} {{ a | tojson }} {{ a.x }} {{ a is mapping }} {{ a is string }}"""

    def render(arguments: Any) -> str:
        call = {"function": {"name": "f", "arguments": arguments}}
        return ChatTemplate(source, "", "").render([{"role": "assistant", "tool_calls": [call]}])

    assert render('{"x":  1}') == '<{"x":  1}> {"x":  1} {"x":  1}! {"x": 1} 1 True False'
    for slip in ('{"x": ', "[1]", "[" * 100_000):  # a model's: it is shown as it is
        assert render(slip).startswith(f"<{slip}> {slip}")


def test_there_are_templates_of_the_most_used_families() -> None:
    assert len(TEMPLATES) >= 21
    assert all(len(source) > 200 for source in TEMPLATES.values())


# -- where templates come from -----------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(builtin_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(builtin_metadata)


def test_gguf_templates_are_chosen_by_what_a_request_brings(tokenizer: Tokenizer) -> None:
    metadata = {
        "tokenizer.chat_template": "plain {{ bos_token }}",
        "tokenizer.chat_template.tool_use": "tools {{ tools | length }}",
        "tokenizer.chat_template.rag": "documents {{ documents | length }}",
        "tokenizer.chat_templates": ["tool_use", "rag"],
    }
    template = ChatTemplate.from_gguf(metadata, tokenizer)
    assert template is not None
    assert template.render([]) == "plain <|im_start|>"
    assert template.render([], tools=[TOOL]) == "tools 1"
    assert template.render([], documents=[{}, {}]) == "documents 2"
    assert template.render([], tools=[TOOL], documents=[{}]) == "tools 1"
    only_default = ChatTemplate.from_gguf({"tokenizer.chat_template": "{{ tools | length }}"}, tokenizer)
    assert only_default is not None
    assert only_default.render([], tools=[TOOL]) == "1"
    for nothing in ({}, {"tokenizer.chat_template": 7}, {"tokenizer.chat_templates": ["x"]}):
        assert ChatTemplate.from_gguf(nothing, tokenizer) is None


def test_folder_templates_are_those_that_transformers_reads(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE({BOS: 0, EOS: 1}, [])).save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"

    def compare(tools: list[dict[str, Any]] | None) -> str:
        template = ChatTemplate.from_hf(tmp_path, tokenizer)
        assert template is not None
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False, add_generation_prompt=True)
        assert template.render([USER], tools=tools) == expected
        return str(expected)

    assert ChatTemplate.from_hf(tmp_path, tokenizer) is None
    named = [
        {"name": "default", "template": "A"},
        {"name": "tool_use", "template": "B"},
        {"name": "rag", "template": "C"},
    ]
    for value, plain, with_tools in (("one", "one", "one"), (named, "A", "B")):
        config.write_text(json.dumps({"chat_template": value, "tokenizer_class": "PreTrainedTokenizerFast"}))
        assert (compare(None), compare([TOOL])) == (plain, with_tools)
    (tmp_path / "chat_template.jinja").write_text("D{{ messages[0].role }}")
    assert (compare(None), compare([TOOL])) == ("Duser", "Duser")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("E")
    assert (compare(None), compare([TOOL])) == ("Duser", "E")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template.jinja is no UTF-8"):
        ChatTemplate.from_hf(tmp_path, tokenizer)


# -- hostile templates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if i < 0 %}{% endfor %}" * 30,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [[1]] * 40 recursive %}{{ loop([[1]] * 40) if loop.depth < 9 }}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ ([1] * 10**10) | length }}",
        "{{ 10 ** 10000000 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x' | indent(10**10, true) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ ('x' * 10**6).replace('x', 'x' * 10**6) }}",
        "{{ ('x' * 10**6) | replace('x', 'x' * 10**6) }}",
        "{{ ('x' * 10**6).join('x' * 10**6) }}",
        "{{ ('x' * 10**6) | list | join('x' * 10**6) }}",
        "{{ [1, 2] | batch(10**10, 0) | list }}",
        "{{ ('\\n' * 10**6) | indent(60000, true) }}",
        "{{ ('\\t' * 10**6).expandtabs(60000) }}",
        "{{ ('a ' * 10**6) | wordwrap(1, true, 'x' * 10**6) }}",
        "{{ ('{0}' * 10**6).format('x' * 10**6) }}",
        "{{ ('%(a)s' * 10**6) % {'a': 'x' * 10**6} }}",
        "{{ ('%(a)s' * 10**6) | format(a='x' * 10**6) }}",
        "{{ ('ab' * 10**6).translate({97: 'x' * 10**6}) }}",
        "{{ range(99999) | join('x' * 10**6) }}",
        "{{ ([1] * 10**5) | tojson(separators=['x' * 10**6, 'y']) }}",
        "{{ ([1] * 10**5) | tojson(indent='x' * 10**6) }}",
        *[
            "{% set x = ['a' * 10**6] * 10**6 %}" + use
            for use in (
                *("{{ x }}", "{{ '' ~ x }}", "{{ x | join }}", "{{ ''.join(x) }}", "{{ x | string }}"),
                *("{{ x | tojson }}", "{{ '%s' % [x] }}", "{{ '%r' | format(x) }}", "{{ '{}'.format(x) }}"),
                *("{{ {1: x} }}", "{{ {1: x}.values() }}", "{{ namespace(a=x) }}", "{{ x | sort | length }}"),
                *("{{ x | map('upper') | list }}", "{% for y in x | map('upper') %}{% endfor %}"),
            )
        ],
        *[
            "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}" + use
            for use in ("{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x | pprint }}")
        ],
    ],
)
def test_no_template_runs_or_grows_without_end(source: str) -> None:
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source, "", "").render([USER])
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000, "KiB"


def test_long_chats_are_far_from_the_bounds() -> None:
    chat = [USER, {"role": "assistant", "content": "x" * 1000}] * 2000 + [USER]
    for name in ("llama3", "qwen3", "mistral_v3", "deepseek_r1"):
        assert len(ChatTemplate(TEMPLATES[name], BOS, EOS).render(chat, tools=[TOOL])) > 2_000_000


def test_each_rendering_has_its_own_bounds() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done", "", "")
    assert [template.render([]) for _ in range(9)] == ["done"] * 9


def test_a_template_of_many_megabytes_is_not_compiled() -> None:
    with pytest.raises(InvalidRequestError, match="has 1,048,577 characters, the limit is 1,048,576"):
        ChatTemplate("x" * (2**20 + 1), "", "").render([USER])
