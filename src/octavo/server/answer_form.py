"""What an answer must look like: what response_format, tool_choice and strict functions say together.

Knows which parser will read the calls, but no format.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from octavo.core.errors import InvalidRequestError, short_repr
from octavo.core.records import ReasoningTags, StructuredOutputs
from octavo.server.protocol import ChatBody
from octavo.server.tools.forms import Function
from octavo.server.tools.parser import ToolParser
from octavo.structured.grammar import MAX_GRAMMAR_BYTES, SpecialToken, answer_within


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """outputs: of the answer itself, None if it is free. around: rules of what stands around it. field: which asks."""

    outputs: StructuredOutputs | None
    around: str
    field: str


def answer_form(
    body: ChatBody, parser: type[ToolParser] | None, reasoning: ReasoningTags | None, special_token: SpecialToken
) -> AnswerForm:
    """parser: None if no calls are looked for. Raises InvalidRequestError."""
    wanted = body.wanted_form()
    if parser is None:
        return AnswerForm(wanted, answer_within(reasoning, special_token), body.form_field)
    calls = _calls(body, parser, wanted, special_token)
    if calls is None or wanted is None:
        outputs = None if calls is None else StructuredOutputs(grammar=calls)
        return AnswerForm(outputs or wanted, answer_within(reasoning, special_token), "tools" if calls else "")
    return AnswerForm(wanted, answer_within(reasoning, special_token, instead=calls), body.form_field)


def _calls(
    body: ChatBody, parser: type[ToolParser], wanted: StructuredOutputs | None, special_token: SpecialToken
) -> str | None:
    """A grammar of the answer's calls, with or without text around them; None if it may be anything."""
    some_strict = any(tool["function"].get("strict") for tool in body.tools)
    if not (body.must_call_tools or some_strict or wanted is not None):
        return None
    size = len(msgspec.json.encode(body.tools))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"tools has {size:,} bytes; to hold calls to it, the limit is {MAX_GRAMMAR_BYTES:,}: send fewer or simpler "
            "functions",
            "tools",
        )
    functions = [Function.of(tool) for tool in body.tools]
    form = parser.form(special_token)
    only_one = not body.parallel_tool_calls
    if body.must_call_tools:
        assert form is not None, "who must call is read by a parser that has a form"
        if wanted is not None:
            raise InvalidRequestError(
                f"tool_choice {short_repr(body.tool_choice)} and {body.form_field} both say what comes: send one",
                body.form_field,
            )
        if body.called_function is not None:
            functions = [function for function in functions if function.name == body.called_function]
            if not functions:
                raise InvalidRequestError(
                    f"tool_choice names {short_repr(body.called_function)}, which is not among the tools: name one",
                    "tool_choice",
                )
        return form.required(functions, special_token, only_one=only_one or body.called_function is not None)
    if form is None:
        what = "tools.strict" if wanted is None else f"{body.form_field} beside tools"
        raise InvalidRequestError(
            f"{what} needs calls that are JSON, which those of this server's tool parser are not: send tool_choice "
            "'required' or 'none', or leave it out",
            "tools" if wanted is None else body.form_field,
        )
    if wanted is not None:
        return form.required(functions, special_token, only_one=only_one)
    return form.optional(functions, special_token, only_one=only_one)
