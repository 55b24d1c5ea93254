"""Messages to a prompt by the Jinja template that a model brings, as Hugging Face transformers renders it.

A template is foreign code: it runs in Jinja's immutable sandbox, and its output is bounded. It does not know tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.core.errors import InvalidRequestError

if TYPE_CHECKING:
    import jinja2

MAX_PROMPT_CHARS = 1 << 24


class ChatTemplate:
    """One template; compiled at the first `render`, so that a server that is never asked to chat does not pay."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._source = source
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`; `kwargs` are further variables that the template may read.

        A message's content is a string, None, or a list of text parts, which are joined by line breaks; fields that
        are None are left out, as templates ask only whether a field is there. Raises InvalidRequestError, with the
        template's own words, if the template is broken or refuses the messages.
        """
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": [_with_text_content(message, i) for i, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": documents,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_PROMPT_CHARS:
                    raise InvalidRequestError(
                        f"the chat template wrote more than {MAX_PROMPT_CHARS:,} characters: shorten the messages",
                        param="messages",
                    )
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template can fail in any way that Python code can
            raise InvalidRequestError(f"the chat template failed: {_words_of(error)}", param="messages") from error
        return "".join(pieces)

    @cached_property
    def _template(self) -> jinja2.Template:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationBlock(Extension):
            """`{% generation %}` marks what a model wrote, for training; here it is only its content."""

            tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        del environment.globals["lipsum"]  # writes as much random text as it is asked to
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _words_of(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    return f"{error or type(error).__name__}" + (f" (line {line} of the template)" if line else "")


def _with_text_content(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content", "")
    if isinstance(content, str):
        return fields
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"messages[{index}].content is {content!r}; it must be a string or a list of text parts", param="messages"
        )
    return {**fields, "content": "\n".join(_text_of(part, index) for part in content)}


def _text_of(part: Any, index: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise InvalidRequestError(
            f"messages[{index}].content has a part of type {kind!r};"
            ' only {"type": "text", "text": "..."} is supported',
            param="messages",
        )
    return text
