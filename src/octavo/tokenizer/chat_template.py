"""Messages to a prompt by the Jinja template that a model brings, as Hugging Face transformers renders it.

A template is foreign code: it runs in Jinja's immutable sandbox, and its output is bounded. It does not know tokens.
"""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from octavo.core.errors import InvalidRequestError, shorten
from octavo.tokenizer.hf_folder import HFFolder
from octavo.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    import jinja2

    from octavo.tokenizer.template_sandbox import ChatTemplateEnvironment

MAX_PROMPT_CHARS = 1 << 24
MAX_TEMPLATE_CHARS = 1 << 20  # the largest in use have 30,000
_GGUF_KEY = "tokenizer.chat_template"
_CONTINUED_HERE = "OCTAVO-CONTINUES-HERE "  # the space shows whether the template trims


class ContentForm(enum.Enum):
    """How a template wants a message's content: as text, as a list of parts, or as whichever of them it came as."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


class ChatTemplate:
    """The templates of one model: a single one, or several by name ("default", "tool_use", "rag")."""

    def __init__(self, source: str | Mapping[str, str], bos_token: str, eos_token: str) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._templates: dict[str, jinja2.Template] = {}
        self._forms: dict[str, ContentForm] = {}
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

    def faults(self) -> dict[str, str]:
        """What hinders each template, by name, from ever being rendered, if anything does."""
        found = {}
        for name in self._sources:
            try:
                self._compile(name)
            except Exception as error:  # Jinja's compiler may also fail as Python's can, by depth for example
                found[name] = _words_of(error)
        return found

    def warnings(self) -> list[str]:
        """The same, one sentence each."""
        return [
            f"chats are refused that need the {name} chat template, as it is broken: {words}"
            for name, words in self.faults().items()
        ]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: str = "auto",
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`; `kwargs` are further variables that the template may read.

        A message's content is a string, None, or a list of text parts. Templates get it as text, the parts joined by
        line breaks, with content_format "string", as a list of parts with "openai", and with "auto" as they read it.
        Fields that are None are left out, as templates ask only whether a field is there. A call's
        arguments are an object or JSON text; templates get the object, which they may also print or join to a text as
        JSON. Of several templates, "tool_use" is for requests with tools, "rag" for those with documents.
        continue_final_message: the prompt ends where the last message's content ends. Raises InvalidRequestError, with
        the template's own words, if the template is broken, does not end, or refuses the messages.
        """
        name = self._chosen(tools, documents)
        form = self._form(name, content_format)
        shown = [_as_templates_want(message, i, form) for i, message in enumerate(messages)]
        final_content = _mark_end(shown) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": shown,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": documents,
        }
        pieces: list[str] = []
        size = 0
        try:
            template = self._compile(name)
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
        prompt = "".join(pieces)
        return _cut_at_mark(prompt, final_content) if continue_final_message else prompt

    def _form(self, name: str, content_format: str) -> ContentForm:
        if content_format != "auto":
            return ContentForm.PARTS if content_format == "openai" else ContentForm.TEXT
        with self._lock:
            if name not in self._forms:
                from octavo.tokenizer.content_format import form_read_by

                try:
                    self._forms[name] = form_read_by(self._environment, self._sources[name])
                except Exception:  # a broken template: rendering it says why
                    self._forms[name] = ContentForm.TEXT
            return self._forms[name]

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


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """The last message's content, whose end is marked from now on. Raises InvalidRequestError if it has none."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        last = content[-1] if content else None
        if last is not None:
            content[-1] = {**last, "text": last["text"] + _CONTINUED_HERE}
            return str(last["text"])
    elif content is not None:
        messages[-1]["content"] = content + _CONTINUED_HERE
        return str(content)
    raise InvalidRequestError(
        "continue_final_message needs a last message with content: add one, or leave it out", "continue_final_message"
    )


def _cut_at_mark(prompt: str, content: str) -> str:
    """`prompt` up to the mark; up to the content's last character that is no space if the template trims it."""
    end = prompt.rfind(_CONTINUED_HERE.strip())
    if end < 0 or content.strip() not in prompt:
        raise InvalidRequestError(
            "continue_final_message needs a chat template that writes the last message's content as it is, and this "
            "one does not: leave it out, or use completions with a plain prompt",
            "continue_final_message",
        )
    return prompt[:end] if prompt.startswith(_CONTINUED_HERE, end) else prompt[:end].rstrip()


def _as_templates_want(message: Mapping[str, Any], index: int, form: ContentForm) -> dict[str, Any]:
    fields = _with_content(message, index, form)
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


def _with_content(message: Mapping[str, Any], index: int, form: ContentForm) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content")
    if content is None:
        return fields
    if isinstance(content, str):
        return {**fields, "content": [{"type": "text", "text": content}]} if form is ContentForm.PARTS else fields
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"messages[{index}].content is {shorten(repr(content))}; it must be a string or a list of text parts",
            param="messages",
        )
    texts = [_text_of(part, index) for part in content]
    if form is ContentForm.TEXT:
        return {**fields, "content": "\n".join(texts)}
    return {**fields, "content": [{"type": "text", "text": text} for text in texts]}


def _text_of(part: Any, index: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise InvalidRequestError(
            f"messages[{index}].content has a part of type {shorten(repr(kind))};"
            ' only {"type": "text", "text": "..."} is supported',
            param="messages",
        )
    return text
