"""Messages to a prompt by the Jinja template that a model brings, as Hugging Face transformers renders it.

A template is foreign code: it runs in Jinja's immutable sandbox, and its output is bounded. It does not know tokens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from octavo.core.errors import InvalidRequestError
from octavo.tokenizer.hf_folder import HFFolder
from octavo.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    import jinja2

    from octavo.tokenizer.template_sandbox import ChatTemplateEnvironment

MAX_PROMPT_CHARS = 1 << 24
MAX_TEMPLATE_CHARS = 1 << 20  # the largest in use have 30,000
_GGUF_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """The templates of one model: a single one, or several by name ("default", "tool_use", "rag")."""

    def __init__(self, source: str | Mapping[str, str], bos_token: str, eos_token: str) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._templates: dict[str, jinja2.Template] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Vocabulary) -> Self | None:
        """From tokenizer.chat_template and tokenizer.chat_template.NAME; None if the file has no template."""
        found = {}
        for key, value in metadata.items():
            name = key.removeprefix(_GGUF_KEY)
            if key.startswith(_GGUF_KEY) and isinstance(value, str) and name[:1] in ("", "."):
                found[name[1:] or "default"] = value
        return cls(found, tokenizer.bos_token, tokenizer.eos_token) if found else None

    @classmethod
    def from_hf(cls, folder: Path, tokenizer: Vocabulary) -> Self | None:
        """From the files of a Hugging Face folder; None if it has no template. Raises ModelFileError."""
        found = HFFolder(folder).chat_templates()
        return cls(found, tokenizer.bos_token, tokenizer.eos_token) if found else None

    def warnings(self) -> list[str]:
        """What hinders each template from ever being rendered, one sentence each."""
        found = []
        for name in self._sources:
            try:
                self._compile(name)
            except Exception as error:  # Jinja's compiler may also fail as Python's can, by depth for example
                found.append(
                    f"chats are refused that need the {name} chat template, as it is broken: {_words_of(error)}"
                )
        return found

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
        are None are left out, as templates ask only whether a field is there. A call's arguments are an object or JSON
        text; templates get the object, which they may also print or join to a text as JSON. Of several templates,
        "tool_use" is for requests with tools, "rag" for those with documents. Raises InvalidRequestError, with the
        template's own words, if the template is broken, does not end, or refuses the messages.
        """
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": [_as_templates_want(message, i) for i, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": documents,
        }
        pieces: list[str] = []
        size = 0
        try:
            template = self._compile(self._chosen(tools, documents))
            self._environment.begin()
            for piece in template.generate(variables):
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

    def _compile(self, name: str) -> jinja2.Template:
        if len(self._sources[name]) > MAX_TEMPLATE_CHARS:
            raise InvalidRequestError(
                f"the chat template has {len(self._sources[name]):,} characters, the limit is {MAX_TEMPLATE_CHARS:,}: "
                "use completions with a plain prompt",
                param="messages",
            )
        with self._lock:
            if name not in self._templates:
                self._templates[name] = self._environment.from_string(self._sources[name])
            return self._templates[name]

    def _chosen(self, tools: object, documents: object) -> str:
        """The template for this kind of request, by the names that transformers gives them."""
        if tools is not None and "tool_use" in self._sources:
            return "tool_use"
        if documents is not None and "rag" in self._sources:
            return "rag"
        return "default" if "default" in self._sources else next(iter(self._sources))

    @cached_property
    def _environment(self) -> ChatTemplateEnvironment:
        from octavo.tokenizer.template_sandbox import ChatTemplateEnvironment

        return ChatTemplateEnvironment()


def _words_of(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    return (str(error) or type(error).__name__) + (f" (line {line} of the template)" if line else "")


class _WrittenObject(dict[str, Any]):
    """Arguments of a call: an object for templates that look into it, its JSON text for those that expect a text."""

    def __init__(self, text: str, value: dict[str, Any]) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _as_templates_want(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    fields = _with_text_content(message, index)
    if isinstance(calls := fields.get("tool_calls"), Sequence):
        fields["tool_calls"] = [_with_arguments_read(call) for call in calls]
    return fields


def _with_arguments_read(call: Any) -> Any:
    """`call` with its arguments as an object. Those that are not one, a model's slip, stay as they are."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    text = function.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**function, "arguments": _WrittenObject(text, value)}}


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
