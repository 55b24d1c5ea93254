"""The Jinja environment of chat templates: what transformers offers them, in a sandbox with bounds on work and size.

Jinja's own sandbox keeps a template from the interpreter; this one also keeps it from running or growing without end.
It does not know messages. Imported late: jinja2 takes a tenth of a second.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 1 << 24  # of any text that a template makes
MAX_STEPS = 500_000  # turns of loops and calls in one rendering; a few seconds
_MAX_WIDTH = 1 << 16  # numbers given to filters and methods, which may pad to them
_WIDE_FIELD = re.compile(r"\d{6,}|%[^a-zA-Z%]*\*")

_steps: ContextVar[int] = ContextVar("steps of this rendering", default=0)


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Raises SecurityError where a template goes too far. Call `begin` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        del self.globals["lipsum"]  # writes as much random text as it is asked to
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _bounded_filter("tojson", _tojson)
        self.filters["_turns"] = _turns
        self.filters["_joined"] = _joined

    @staticmethod
    def begin() -> None:
        _steps.set(0)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _AddBounds().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _require(isinstance(right, int | float) and abs(right) <= 64, f"the exponent {right!r}")
        elif operator == "%" and isinstance(left, str):
            _require(not _WIDE_FIELD.search(left), "a field that wide")
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(some, str | bytes | list | tuple):
                    _require_chars(len(some) * times)
        elif operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _require_chars(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            _require(result.bit_length() <= 4096, "a number that large")
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja2)
        _step()
        if isinstance(__obj, LoopContext) and args and hasattr(args[0], "__len__"):  # a loop that calls itself
            _step(len(args[0]))
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_text_function(__obj.__name__, (text, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is only its content.

    A scope of its own, as in transformers: what is set within is not seen after it.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _AddBounds(NodeTransformer):
    """Loops and joined texts go through filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2 finds it by this name)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_turns", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(
            nodes.List(node.nodes, lineno=node.lineno), "_joined", [], [], None, None, lineno=node.lineno
        )


@pass_context  # so that jinja2 does not fold it into a constant
def _turns(context: Context, items: Any) -> Any:
    """What a loop runs over, after its turns have been counted."""
    if not hasattr(items, "__len__"):
        items = list(_counted(items))
    else:
        _step(len(items))
    return items


def _counted(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        _step()
        yield item


@pass_context
def _joined(context: Context, items: list[Any]) -> str:
    texts = [str(item) for item in items]
    _require_chars(sum(map(len, texts)))
    return "".join(texts)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also keeps jinja2's mark that the environment comes first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _step()
        own = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _check_text_function(name, own, kwargs)
        return function(*args, **kwargs)

    return bounded


def _check_text_function(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bounds for a method of a text or a filter, before it runs. args[0] is the text itself."""
    for number in (*args[1:], *kwargs.values()):
        _require(not isinstance(number, int) or abs(number) <= _MAX_WIDTH, f"the number {number!r}")
    if not args or not isinstance(args[0], str):
        if name == "join" and len(args) > 1 and isinstance(args[1], str) and hasattr(args[0], "__len__"):
            _require_chars(len(args[1]) * len(args[0]))
        return
    text = args[0]
    if name in ("format", "format_map"):
        _require(not _WIDE_FIELD.search(text), "a field that wide")
    elif name == "join" and len(args) > 1 and hasattr(args[1], "__len__"):
        _require_chars(len(text) * len(args[1]))
    elif name == "replace" and len(args) > 2 and isinstance(args[1], str) and isinstance(args[2], str):
        _require_chars(len(text) + text.count(args[1]) * len(args[2]))


def _step(count: int = 1) -> None:
    steps = _steps.get() + count
    _steps.set(steps)
    _require(steps <= MAX_STEPS, f"more than {MAX_STEPS:,} loop turns and calls")


def _require_chars(count: int) -> None:
    _require(count <= MAX_CHARS, f"a text of more than {MAX_CHARS:,} characters")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SecurityError(f"it asks for {what}, more than a chat template may")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
