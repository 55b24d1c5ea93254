"""The Jinja environment of chat templates: what transformers offers them, in a sandbox with bounds on work and size.

Jinja's own sandbox keeps a template from the interpreter; this one also keeps it from running or growing without end.
It does not know messages. Imported late: jinja2 takes a tenth of a second.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARS = 1 << 24  # of any text that a template makes
MAX_STEPS = 500_000  # turns of loops and calls in one rendering
MAX_SECONDS = 5.0  # of one rendering, of its thread's own time, so that a busy machine changes nothing
MAX_CHARS_IN_ALL = 1 << 28  # of all texts that one rendering makes
_ITEM_CHARS = 16  # an item of a list counts as so many
_MAX_WIDTH = 1 << 16  # numbers given to filters and methods, which may pad to them
_WIDE_FIELD = re.compile(r"\d{6,}|%[^a-zA-Z%]*\*")
# Filters that write out whatever they get, or a changed copy of each text in it.
_WRITERS = frozenset(
    {
        *("string", "join", "format", "tojson", "pprint", "xmlattr", "escape", "e", "forceescape", "upper"),
        *("lower", "title", "capitalize", "trim", "striptags", "replace", "indent", "wordwrap", "center", "truncate"),
        *("wordcount", "urlize", "sort", "unique", "dictsort", "groupby"),
    }
)


class _Spent:
    """What the rendering that runs has used up."""

    def __init__(self) -> None:
        self.steps = 0
        self.chars = 0
        self.began = time.thread_time()


_spent: ContextVar[_Spent] = ContextVar("spent")


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Raises SecurityError where a template goes too far. Call `begin` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols], finalize=_writable
        )
        del self.globals["lipsum"]  # writes as much random text as it is asked to
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _bounded_filter("tojson", _tojson)
        self.filters["_turns"] = _turns
        self.filters["_joined"] = _joined
        self.filters["_sliced"] = _sliced

    @staticmethod
    def begin() -> None:
        _spent.set(_Spent())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _AddBounds().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _require(isinstance(right, int | float) and abs(right) <= 64, "an exponent above 64")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, left.count("%"), right)
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
        if isinstance(__obj, LoopContext) and args:  # a loop that calls itself
            args = (_counted(args[0]), *args[1:])
        # The sandbox wraps "...".format.
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        _require(not isinstance(text, bytes), "a method of bytes")
        if isinstance(text, str):
            _check_text_function(__obj.__name__, (text, *args), kwargs)
        return _made(super().call(__context, __obj, *args, **kwargs))


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
    """Loops, slices and joined texts go through filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2 finds it by this name)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_turns", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        return nodes.Filter(node, "_sliced", [], [], None, None, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(
            nodes.List(node.nodes, lineno=node.lineno), "_joined", [], [], None, None, lineno=node.lineno
        )


@pass_context  # so that jinja2 does not fold it into a constant
def _turns(context: Context, items: Any) -> Any:
    """What a loop runs over, after its turns have been counted."""
    return _counted(items)


def _counted(items: Any) -> _Turns:
    if hasattr(items, "__len__"):
        _step(len(items))
        return _Turns(items)
    return _Turns(_taken(items))


class _Turns:
    """Items of a loop that watches the time. Only loops see it."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _check_time(_spent.get())
            yield item


def _taken(items: Iterable[Any]) -> list[Any]:
    """The items of something that makes them one by one."""
    taken, num_chars = [], 0
    for item in items:
        _step()
        num_chars += _num_chars(item)
        _require_chars(num_chars)
        taken.append(item)
    return taken


def _writable(value: Any) -> Any:
    """A value that the template writes, if its text is not too long."""
    _require_chars(_num_chars(value))
    return value


@pass_context
def _sliced(context: Context, part: Any) -> Any:
    _step()
    return _made(part)


@pass_context
def _joined(context: Context, items: list[Any]) -> str:
    return "".join(map(str, _writable(items)))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also keeps jinja2's mark that the environment comes first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _step()
        first = int(hasattr(function, "jinja_pass_arg"))
        own = [_taken(arg) if isinstance(arg, Iterator) else arg for arg in args[first:]]
        if name in _WRITERS and own:
            _writable(own[0])
        _check_text_function(name, own, kwargs)
        return _made(function(*args[:first], *own, **kwargs))

    return bounded


def _check_text_function(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Bounds for a method of a text or a filter, before it runs. args[0] is the text itself, or what is written."""
    more = (*args[1:], *kwargs.values())
    numbers = [arg for arg in more if isinstance(arg, int)]
    _require(max(map(abs, numbers), default=0) <= _MAX_WIDTH, f"a number above {_MAX_WIDTH:,}")
    if not args:
        return
    text = args[0]
    widest = max([abs(arg) if isinstance(arg, int) else _num_chars(arg) for arg in more], default=0)
    match name:
        case "join":  # of a filter's items, or a method's text between items
            count = len(text) if hasattr(text, "__len__") else 0
            num_items = max([len(arg) for arg in more if hasattr(arg, "__len__")], default=0)
            _require_chars(_num_chars(text) + _num_chars(more) + count * num_items)
        case "indent" | "tojson":
            _require_chars(_num_chars(text) * (1 + widest))
        case "wordwrap":
            _require_chars(len(text) * (1 + max([len(arg) for arg in more if isinstance(arg, str)], default=1)))
        case "format" | "format_map" if isinstance(text, str):
            _check_format(text, text.count("{") + text.count("%"), more)
        case "replace" if isinstance(text, str) and len(more) > 1 and isinstance(more[0], str):
            _require_chars(len(text) + text.count(more[0]) * widest)
        case "expandtabs" if isinstance(text, str):
            _require_chars(len(text) + text.count("\t") * max(8, widest))
        case "translate":
            _require_chars(len(text) * (1 + widest))


def _check_format(form: str, num_fields: int, values: Any) -> None:
    _require(not _WIDE_FIELD.search(form), "a field that wide")
    _require_chars(len(form) + num_fields * _num_chars(values))


def _num_chars(value: Any, depth: int = 0) -> int:
    """About the length of the text that `value` becomes, deeper levels indented by one; more than the bound is as good
    as infinite. A list may have the same text a million times, so this must be known before it is written.
    """
    if isinstance(value, str | bytes):
        return len(value)
    parts: Any
    if isinstance(value, Mapping):
        parts = itertools.chain.from_iterable(value.items())
    elif isinstance(value, list | tuple | set | frozenset | range | MappingView):
        parts = value
    else:
        return MAX_CHARS + 1 if isinstance(value, Namespace) else 1  # nobody writes one of these
    total = 0
    for part in parts:
        total += 1 + depth + _num_chars(part, depth + 1)
        if total > MAX_CHARS:
            break
    return total


def _made(value: Any) -> Any:
    """What a call, a filter or a slice has made, after its size has been counted."""
    if isinstance(value, str | bytes):
        _require_chars(len(value))
    elif isinstance(value, list | tuple):
        _require_chars(len(value) * _ITEM_CHARS)
    return value


def _step(count: int = 1) -> None:
    spent = _spent.get()
    spent.steps += count
    _require(spent.steps <= MAX_STEPS, f"more than {MAX_STEPS:,} loop turns and calls")
    _check_time(spent)


def _check_time(spent: _Spent) -> None:
    _require(time.thread_time() - spent.began <= MAX_SECONDS, f"more than {MAX_SECONDS:g} seconds")


def _require_chars(count: int) -> None:
    _require(count <= MAX_CHARS, f"a text of more than {MAX_CHARS:,} characters")
    spent = _spent.get()
    spent.chars += count
    _require(spent.chars <= MAX_CHARS_IN_ALL, f"texts of more than {MAX_CHARS_IN_ALL:,} characters in all")


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
