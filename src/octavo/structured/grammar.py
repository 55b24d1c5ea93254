"""What a request wants its output to look like, written as one grammar in llguidance's dialect of Lark.

Knows the syntax only: whether a grammar compiles, and how large it may get, is `compiler`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError, shorten
from octavo.core.records import ReasoningTags, StructuredOutputs
from octavo.structured.schema import checked_schema

MAX_GRAMMAR_BYTES = 256 << 10
MAX_CHOICES = 5000
MAX_TAGS = 256
# Between tokens of JSON. Without a limit, a weak model can write line breaks until max_tokens.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# Forcing would restrict a fixed text to one way of cutting it into tokens; which one is the model's choice.
_HEAD = '%llguidance {"no_forcing": true}\n'
_ANY_TEXT = r"/(.|\n)*/"
_PLAIN = StructuredOutputs(json_object=True)

SpecialToken = Callable[[str], int | None]  # the id of the special token with a text


def grammar_text(outputs: StructuredOutputs, around: str = "") -> str:
    """The grammar of an output. `around`: Lark rules in which what `outputs` says is called @answer.

    Raises InvalidRequestError naming the field.
    """
    lark = _lark(outputs)
    if len(lark.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"{outputs.kind} makes a grammar of {len(lark):,} characters, the limit is {MAX_GRAMMAR_BYTES:,} bytes: "
            "make it smaller",
            param="structured_outputs",
        )
    if not around:
        return _HEAD + lark
    parts = [
        {"lark_grammar": _HEAD + around},
        {"name": "answer", "lark_grammar": _HEAD + lark},
    ]
    return json.dumps({"grammars": parts})


def quoted(text: str) -> str:
    """A text as Lark writes it. Raises InvalidRequestError for one that is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{shorten(text)!r} has half of a surrogate pair, which no output can have: remove it",
            param="structured_outputs",
        ) from None
    return json.dumps(text, ensure_ascii=False)


def expression(mark: str, special_token: SpecialToken) -> str:
    """A mark of a model's format: a special token if it is one, or else its text."""
    token_id = special_token(mark)
    return quoted(mark) if token_id is None else f"<[{token_id}]>"


def answer_within(tags: ReasoningTags | None, special_token: SpecialToken, *, instead: str = "") -> str:
    """Rules of what stands around an @answer: before it reasoning, if the model may reason, and a little white space.

    instead: a grammar of what may come in the answer's place. "" if there is nothing but the answer.
    """
    rules = []
    answer = "@answer"
    if instead:
        rules.append(instead.replace("start:", "instead:", 1))
        answer = "(instead | @answer)"
    if tags is not None and (tags.is_open or tags.starts):
        answer = f"reasoning {answer}"
        rules += _reasoning_rules(tags, special_token)
    return "\n".join([f"start: {answer}", *rules]) if rules else ""


def _reasoning_rules(tags: ReasoningTags, special_token: SpecialToken) -> list[str]:
    """Free text up to an end tag."""
    rules = [f"THOUGHTS: {_ANY_TEXT}", "WS: /[ \\r\\n\\t]{0,8}/"]
    endings = []
    for number, tag in enumerate(tags.ends):
        end = expression(tag, special_token)
        if end.startswith("<"):
            endings.append(f"THOUGHTS {end}")
        else:
            rules.append(f"thoughts_{number}[lazy]: THOUGHTS {end}")
            endings.append(f"thoughts_{number}")
    reasoning = f"({' | '.join(endings)})"
    if not tags.is_open:
        starts = " | ".join(expression(tag, special_token) for tag in tags.starts)
        reasoning = f"(WS ({starts}) {reasoning})?"
    return [f"reasoning: {reasoning} WS", *rules]


def json_expression(schema: Any, outputs: StructuredOutputs = _PLAIN) -> str:
    """A JSON value that fits a schema, as an expression. `outputs` says what white space there may be.

    Raises InvalidRequestError.
    """
    fields = checked_schema(schema, closed=outputs.disable_additional_properties)
    if outputs.whitespace_pattern is not None:
        spaces: dict[str, Any] = {"whitespace_pattern": outputs.whitespace_pattern}
    elif outputs.disable_any_whitespace:
        spaces = {"whitespace_flexible": False}
    else:
        spaces = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps({**fields, "x-guidance": spaces}, allow_nan=False)


def _lark(outputs: StructuredOutputs) -> str:
    match outputs.kind:
        case "json":
            return f"start: {json_expression(_decoded(outputs.json, 'json'), outputs)}"
        case "json_object":
            return f"start: {json_expression({'type': 'object'}, outputs)}"
        case "regex":
            assert outputs.regex is not None
            return f"start: {_regex(outputs.regex)}"
        case "choice":
            assert outputs.choice is not None
            return _choice(outputs.choice)
        case "grammar":
            assert outputs.grammar is not None
            return _user_grammar(outputs.grammar)
        case _:
            return _structural_tag(_decoded(outputs.structural_tag, "structural_tag"), outputs)


def _decoded(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"structured_outputs.{name} is not JSON: {error}", param="structured_outputs"
        ) from None


def _regex(pattern: str) -> str:
    from llguidance import LLMatcher

    quoted(pattern)
    made = json.loads(LLMatcher.grammar_from_regex(pattern))
    return str(made["grammars"][0]["lark_grammar"]).removeprefix("start: ")


def _choice(choices: Sequence[str]) -> str:
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(
            f"choice has {len(choices):,} texts, the limit is {MAX_CHOICES:,}: offer fewer", param="structured_outputs"
        )
    return "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, choices))


def _user_grammar(text: str) -> str:
    """Lark as it is; GBNF and EBNF with ::= become Lark."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"grammar has {len(text):,} characters, the limit is {MAX_GRAMMAR_BYTES:,}: make it smaller",
            param="structured_outputs",
        )
    quoted(text)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # of a converter that says what is wrong by whatever exception it meets
        raise InvalidRequestError(
            f"structured_outputs.grammar is neither Lark nor GBNF: {shorten(str(error), 300)}",
            param="structured_outputs",
        ) from None


def _structural_tag(tag: Any, outputs: StructuredOutputs) -> str:
    """Free text in which each trigger is followed by the rest of one of its structures."""

    def refuse(text: str) -> InvalidRequestError:
        return InvalidRequestError(f"structural_tag {text}", param="structured_outputs")

    if not isinstance(tag, dict) or not isinstance(tag.get("structures"), list) or not tag["structures"]:
        raise refuse('must be an object with "structures", each with "begin", "schema" and "end", and "triggers"')
    unknown = set(tag) - {"type", "structures", "triggers"}
    if unknown:
        raise refuse(f"has {shorten(sorted(unknown)[0])!r}, which is not supported: use structures and triggers")
    triggers = tag.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise refuse('must have "triggers", a list of texts, none of them empty')
    if len(tag["structures"]) > MAX_TAGS or len(triggers) > MAX_TAGS:
        raise refuse(f"has more than {MAX_TAGS} structures or triggers: send fewer")
    branches: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for number, structure in enumerate(tag["structures"]):
        where = f"structures[{number}]"
        if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
            raise refuse(f'{where} must be an object with "begin", "schema" and "end"')
        begin, end = structure["begin"], structure.get("end", "")
        if not isinstance(end, str):
            raise refuse(f"{where}.end must be text")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise refuse(f"{where}.begin is {shorten(repr(begin))}, but begins with no trigger: add one")
        rest = [quoted(begin[len(trigger) :])] if len(begin) > len(trigger) else []
        rest.append(json_expression(structure.get("schema", {}), outputs))
        branches[trigger].append(" ".join([*rest, quoted(end)] if end else rest))
    unused = next((t for t, parts in branches.items() if not parts), None)
    if unused is not None:
        raise refuse(f"has the trigger {shorten(repr(unused))}, with which no structure begins: remove it")
    return triggered({quoted(trigger): parts for trigger, parts in branches.items()})


def triggered(branches: dict[str, list[str]], *, at_least_one: bool = False, only_one: bool = False) -> str:
    """Free text with, after each trigger, one of its branches. Triggers and branches are expressions."""
    rules = []
    names = []
    for number, (trigger, parts) in enumerate(branches.items()):
        name = f"tag_{number}"
        names.append(name)
        if trigger.startswith("<"):
            opening = f"TEXT {trigger}"
        else:
            rules.append(f"trigger_{number}[lazy]: TEXT {trigger}")
            opening = f"trigger_{number}"
        rules.append(f"{name}: {opening} ({' | '.join(f'({part})' for part in parts)})")
    count = ("" if at_least_one else "?") if only_one else ("+" if at_least_one else "*")
    return "\n".join([f"start: ({' | '.join(names)}){count} rest", "rest: TEXT", f"TEXT: {_ANY_TEXT}", *rules])
