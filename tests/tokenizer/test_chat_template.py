"""Prompts against transformers' apply_chat_template, and templates that are broken or hostile."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
import tokenizers
import transformers

from octavo.core.errors import InvalidRequestError
from octavo.tokenizer import template_sandbox
from octavo.tokenizer.chat_template import MAX_PROMPT_CHARS, MAX_TEMPLATE_CHARS, ChatTemplate

BOS, EOS = "<s>", "</s>"
TEMPLATES = {
    "chatml": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content | trim + '<|im_end|>\n' }}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{% for m in rest %}
<|im_start|>{{ m.role }}
    {% if m.content %}
{{ m.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
    "llama3": """{{- bos_token }}
{%- if tools is not none %}
{{- 'Tools: ' }}{% for t in tools %}{{ t | tojson(indent=2) }}{{ '\n' }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "qwen": """{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{% continue %}{% endif %}
    {%- if m.role == 'assistant' and loop.index0 < ns.last_user and '</think>' in m.content %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- else %}
        {%- set content = m.content %}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ '\n' }}
    {%- generation %}{{ content }}{{ '<|im_end|>' }}{% endgeneration %}
    {{- '\n' }}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "documents": """{% for d in documents or [] %}[{{ d.title }}] {{ d | tojson }}
{% endfor %}
{%- for m in messages %}{{ m.content }}{{ eos_token if not loop.last }}{% if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}""",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&'\" there"}],
    [{"role": "system", "content": "  Be brief. \n"}, {"role": "user", "content": "Grüße 😀\n\n  x"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "3"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["é<"]}}}]


@pytest.fixture(scope="module")
def oracle() -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({BOS: 0, EOS: 1}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": TOOLS},
        {"enable_thinking": False, "documents": [{"title": "A", "text": "<x> ü"}]},
    ],
)
def test_prompt_equals_transformers(name: str, chat: int, options: dict[str, Any], oracle: Any) -> None:
    ours = ChatTemplate(TEMPLATES[name], BOS, EOS).render(CHATS[chat], **options)
    theirs = oracle.apply_chat_template(
        CHATS[chat], chat_template=TEMPLATES[name], tokenize=False, **{"add_generation_prompt": True, **options}
    )
    assert ours == theirs
    assert ours


def test_smollm_prompt_equals_transformers(builtin_metadata: dict[str, Any], oracle: Any) -> None:
    source = builtin_metadata["tokenizer.chat_template"]
    for chat in CHATS:
        theirs = oracle.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(source, BOS, EOS).render(chat) == theirs
    assert "You are a helpful AI assistant named SmolLM" in ChatTemplate(source, BOS, EOS).render(CHATS[0])


def test_text_parts_are_joined_and_absent_fields_stay_absent() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}|{{ m.name is defined }};{% endfor %}", "", "")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": None}]
    assert template.render(messages) == "a\nb|False;|False;"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], r"messages\[1\]\.content has a part of type 'image_url'"),
        ([{"type": "text"}], "part of type 'text'"),
        (["bare"], "part of type 'bare'"),
        (7, "content is 7; it must be a string"),
    ],
)
def test_content_that_is_not_text_is_refused(content: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatTemplate("{{ messages }}", "", "").render([{"role": "user", "content": "x"}, {"content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("a\n{% if %}", "Expected an expression.*line 2"),
        ("{{ nosuch.field }}", "'nosuch' is undefined"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ lipsum(9) }}", "undefined"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_failing_template_tells_its_own_words(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        ChatTemplate(source, "", "").render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_template_that_cannot_be_compiled_is_told_before_it_is_needed() -> None:
    assert ChatTemplate(TEMPLATES, BOS, EOS).warnings() == []
    broken = ChatTemplate(
        {"default": "a\n{% if %}", "rag": "{{ x }}", "tool_use": "{{ x | nosuch }}"}, "", ""
    ).warnings()
    assert len(broken) == 2
    assert re.search(r"the default chat template, as it is broken: Expected an expression.*line 2", broken[0])
    assert re.search(r"the tool_use chat template, as it is broken: No filter named 'nosuch'", broken[1])
    assert "the limit is" in ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1), "", "").warnings()[0]


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen"])
@pytest.mark.parametrize("content", ["And so", "  And so, ", "\n- one\n- ", "two words"])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_continued_final_message_ends_as_in_transformers(name: str, content: str, role: str, oracle: Any) -> None:
    chat = [*CHATS[1], {"role": "assistant", "content": "two words"}, {"role": role, "content": content}]
    ours = ChatTemplate(TEMPLATES[name], BOS, EOS).render(
        chat, add_generation_prompt=False, continue_final_message=True
    )
    theirs = oracle.apply_chat_template(
        chat, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    assert ours == theirs
    assert ours.endswith(content.strip() if name == "llama3" else content)


def test_the_last_text_part_is_continued() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", "", ""
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}], continue_final_message=True) == "<a><b"


@pytest.mark.parametrize(
    ("messages", "source"),
    [
        ([], "{{ messages }}"),
        ([{"role": "assistant", "content": None}], "{{ messages }}"),
        ([{"role": "assistant", "content": "x"}], "{{ messages[0].role }}"),
        ([{"role": "assistant", "content": "<think>x"}], "{{ messages[0].content.split('<think>')[0] }}"),
    ],
)
def test_a_final_message_that_is_not_there_cannot_be_continued(messages: list[dict[str, Any]], source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, "", "").render(messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "as_text", "as_parts"),
    [
        ("{{ messages[0].content }}", "x", "a\nb"),
        ("{% for p in messages[0]['content'] %}{{ p.text }}{% endfor %}", "x", "ab"),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }}{% endfor %}", "x", "ab"),
        ("{% for p in messages[0].content | list %}{{ p.text }}{% endfor %}", "x", "ab"),
        ("{% for word in messages[0].content.split() %}{{ word }},{% endfor %}", "x,", "a,b,"),
        (
            "{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}"
            "{% for p in c[:] %}[{{ p.text }}]{% endfor %}{% endif %}",
            "x",
            "[a][b]",
        ),
    ],
)
def test_a_template_gets_contents_as_it_reads_them(source: str, as_text: str, as_parts: str) -> None:
    template = ChatTemplate(source, "", "")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": "x"}]) == as_text
    assert template.render([{"role": "user", "content": parts}]) == as_parts


def test_the_form_of_contents_can_be_forced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "", "")
    assert template.render([{"content": "x"}], content_format="openai") == "[{'type': 'text', 'text': 'x'}]"
    looping = ChatTemplate("{% for p in messages[0].content %}({{ p }}){% endfor %}", "", "")
    assert looping.render([{"content": [{"type": "text", "text": "ab"}]}], content_format="string") == "(a)(b)"


@pytest.mark.parametrize(
    "source",
    [
        "{% set s = 'x' * 16000000 %}{% set ns = namespace(all=[]) %}"
        "{% for i in range(1000) %}{% set ns.all = ns.all + [s[1:]] %}{% endfor %}",
        "{% set s = 'x' * 16000000 %}{% set ns = namespace(all=[]) %}"
        "{% for i in range(1000) %}{% set ns.all = ns.all + [s.upper()] %}{% endfor %}",
    ],
)
def test_texts_are_bounded_in_all(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="268,435,456 characters in all"):
        ChatTemplate(source, "", "").render([])


@pytest.mark.parametrize(
    "loop",
    [
        "{% for i in range(90000) %}LOOK{% endfor %}",
        "{% for i in [0] recursive %}LOOK{% if loop.depth == 1 %}{{ loop(range(90000)) }}{% endif %}{% endfor %}",
    ],
)
def test_a_rendering_has_its_time(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    source = "{% set s = 'x' * 1000000 %}" + loop.replace("LOOK", "{% if 'yx' in s %}{% endif %}")
    with pytest.raises(InvalidRequestError, match=r"more than 0\.05 seconds"):
        ChatTemplate(source, "", "").render([])


def test_output_is_bounded() -> None:
    source = "{% set s = 'x' * 100000 %}{% for i in range(100000) %}{{ s }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=f"{MAX_PROMPT_CHARS:,} characters"):
        ChatTemplate(source, "", "").render([])


def test_variables_of_the_caller_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }}{{ self_made }}{{ self is defined }}", "", "")
    assert template.render([{"content": "x"}], messages=[], self_made=7, self=1) == "17True"


def test_strftime_now_formats_the_present() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", "", "").render([]) == str(datetime.datetime.now().year)
