"""Texts of reasoning models, taken apart however they were cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.reasoning import HARMONY, REASONING_PARSERS
from octavo.core.records import ReasoningTags
from octavo.server.reasoning.harmony import HarmonyReasoning
from octavo.server.reasoning.tagged import TaggedReasoning
from octavo.server.text_parser import Content, Reasoning

OPEN, CLOSED = "<|assistant|>\n<think>\n", "<|assistant|>\n<think>\n\n</think>\n\n"

# parser, end of the prompt, text, reasoning, content
CASES = [
    ("qwen3", "", "<think>\nHm, \n\nyes.\n</think>\n\nHi.\n", "Hm, \n\nyes.", "Hi.\n"),
    ("qwen3", OPEN, "Hm.\n</think>\n\nHi.", "Hm.", "Hi."),
    ("qwen3", OPEN, "<think>Hm.</think>Hi.", "Hm.", "Hi."),
    ("qwen3", OPEN, "cut in the mid", "cut in the mid", ""),
    ("qwen3", OPEN, "cut in the tag </thi", "cut in the tag </thi", ""),
    ("qwen3", CLOSED, "Hi.\n", "", "Hi.\n"),
    ("qwen3", CLOSED, "\nHi </think> there", "", "\nHi </think> there"),
    ("qwen3", "", "\n<thinking> Hi", "", "\n<thinking> Hi"),
    ("qwen3", "", "Hi </think> there", "", "Hi </think> there"),
    ("qwen3", "", "<think>\n\n</think>\n\nHi", "", "Hi"),
    ("qwen3", "", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("qwen3", "", "", "", ""),
    ("qwen3", "", " \n", "", " \n"),
    ("deepseek_r1", "", "Hm.</think>Hi.", "Hm.", "Hi."),
    ("deepseek_r1", "", "<think>\nHm.</think>\nHi.", "Hm.", "Hi."),
    ("deepseek_r1", "", "no end", "no end", ""),
    ("deepseek_v3", CLOSED, "Hi.", "", "Hi."),
    ("mistral", "[/INST]", "[THINK]Hm.[/THINK]Hi.", "Hm.", "Hi."),
    ("granite", "", "Here is my thought process: Hm.\n\nHere's my response: Hi.", "Hm.", "Hi."),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Hi.", "Hm.", "Hi."),
]


def take_apart(name: str, prompt: str, pieces: list[str]) -> tuple[str, str]:
    parser = TaggedReasoning(REASONING_PARSERS[name], prompt)
    reasoning = content = ""
    for events in (*map(parser.feed, pieces), parser.finish()):
        for event in events:
            assert isinstance(event, Reasoning | Content)
            if isinstance(event, Reasoning):
                assert not content
                reasoning += event.text
            else:
                content += event.text
    return reasoning, content


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_answer_are_told_apart_however_the_text_is_cut(
    name: str, prompt: str, text: str, reasoning: str, content: str
) -> None:
    for size in (len(text) or 1, 1, 2, 3, 5, 8):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert take_apart(name, prompt, pieces) == (reasoning, content)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_text_cut_anywhere_gives_the_same_and_loses_only_tags_and_space(name: str, data: st.DataObject) -> None:
    tags = REASONING_PARSERS[name]
    bits = [*tags.starts, *tags.ends, tags.starts[0][:4], tags.ends[0][:-1], " ", "\n", "x", "y z"]
    text = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=10)))
    prompt = data.draw(st.sampled_from(["", tags.starts[0] + "\n", tags.ends[0] + "\n\n"]))
    whole = take_apart(name, prompt, [text])
    assert take_apart(name, prompt, list(text)) == whole
    assert "".join(whole).count("x") == text.count("x")
    if prompt.rstrip() == tags.ends[0]:
        assert whole == ("", text)


def test_reasoning_comes_as_it_is_written() -> None:
    parser = TaggedReasoning(REASONING_PARSERS["qwen3"], OPEN)
    assert parser.feed("I think ") == [Reasoning("I think")]
    assert parser.feed("so") == [Reasoning(" so")]
    assert parser.feed("\n</thi") == []
    assert parser.feed("nk>\n\n") == []
    assert parser.feed("Yes") == [Content("Yes")]


def test_the_engine_is_told_the_tags_and_whether_the_prompt_has_opened_or_closed_the_reasoning() -> None:
    def tags(name: str, prompt: str) -> ReasoningTags:
        return TaggedReasoning(REASONING_PARSERS[name], prompt).tags

    assert tags("qwen3", "hello") == ReasoningTags(starts=("<think>",), ends=("</think>",), is_open=False)
    assert tags("qwen3", "hello<think>\n").is_open
    assert tags("deepseek_r1", "hello").is_open
    closed = tags("deepseek_r1", "<think>\n\n</think>\n\n")
    assert (closed.starts, closed.is_open) == ((), False)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"

# text, reasoning, content
HARMONY_CASES = [
    (f"{ANALYSIS}Hm.<|end|>{FINAL}Hi.\n", "Hm.", "Hi.\n"),
    (f"{ANALYSIS}Hm.<|end|>{FINAL}Hi.<|return|>", "Hm.", "Hi."),
    (f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS} Two.<|end|>\n{FINAL}Hi.", "One. Two.", "Hi."),
    (f"{ANALYSIS}cut in the mid", "cut in the mid", ""),
    (f"{ANALYSIS}cut in the tag <|en", "cut in the tag <|en", ""),
    ("<|channel|>final<|message|>Hi.", "", "Hi."),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>fin", "",
     "I look.<|start|>assistant<|channel|>fin"),
    (" Hi <|channel|>", "", " Hi <|channel|>"),
    ("<|chan", "", "<|chan"),
    ("", "", ""),
    (
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}",
        "Hm.",
        "<|channel|>commentary to=functions.f<|message|>{}",
    ),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "",
     "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "content"), HARMONY_CASES)
def test_messages_of_harmony_are_told_apart_however_the_text_is_cut(text: str, reasoning: str, content: str) -> None:
    for size in (len(text) or 1, 1, 2, 3, 5, 8):
        parser = HarmonyReasoning(REASONING_PARSERS[HARMONY], "<|start|>assistant")
        found = {Reasoning: "", Content: ""}
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        for event in [event for events in (*map(parser.feed, pieces), parser.finish()) for event in events]:
            assert isinstance(event, Reasoning | Content)
            found[type(event)] += event.text
        assert (found[Reasoning], found[Content]) == (reasoning, content)
