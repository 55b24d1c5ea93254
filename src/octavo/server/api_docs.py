"""GET /docs: a page about the API, made from the tables that the server itself goes by. Loads nothing from anywhere."""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.server.reading import UNSUPPORTED
from octavo.server.responses import body as responses_body

if TYPE_CHECKING:
    from octavo.server.service import Service

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, p, td { overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .25rem; font-size: 1.1rem; }
h2 b { display: inline-block; min-width: 3.5rem; margin-right: .5rem; }
code, pre, td:first-child, h2 { font-family: ui-monospace, monospace; }
pre { overflow-x: auto; padding: .75rem; background: rgb(127 127 127 / 15%); border-radius: .4rem; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; font-size: .9rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid rgb(127 127 127 / 30%); }
td { vertical-align: top; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
"""


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """A route as the router and the page know it."""

    path: str
    methods: tuple[str, ...]
    endpoint: Callable[[Service, HttpRequest], Awaitable[Response]]
    summary: str
    body: type[Any] | None = None  # a Struct
    generates: bool = False
    open: bool = False  # needs no key


def render(
    entries: Sequence[RouteEntry], *, model: str, version: str, url: str, root_path: str, needs_key: bool
) -> str:
    """The page, as HTML. url: scheme and host by which the reader found the server."""
    escape = html.escape
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    example = (
        f"curl {url}{root_path}/v1/chat/completions \\\n"
        f"     {key}-H 'Content-Type: application/json' \\\n"
        f'     -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello."}}]}}\''
    )
    keys = (
        "Every route wants the header <code>Authorization: Bearer KEY</code> or <code>X-Api-Key: KEY</code>, but for "
        "those marked open."
        if needs_key
        else "This server asks for no key."
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>octavo: {escape(model)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>octavo</h1>
<p>Serves <code>{escape(model)}</code>, version {escape(version)}. {keys}</p>
<pre>{escape(example)}</pre>
<p>Errors of <code>/v1/messages</code> have Anthropic's shape, others OpenAI's:
<code>{{"error": {{"message", "type", "param", "code"}}}}</code>; <code>param</code>
names the field. Each reply has its request's id in the header <code>X-Request-Id</code>; send one of 1 to 128 visible
ASCII characters to choose it.</p>
{"".join(_section(entry, root_path, needs_key) for entry in entries)}
<h2>Not supported yet</h2>
<p>These fields of the OpenAI API and of vLLM are refused by name where no table above has them, unless their value
asks for nothing:
{", ".join(f"<code>{escape(name)}</code>" for name in sorted(UNSUPPORTED | responses_body.UNSUPPORTED))}.</p>
</body>
</html>
"""


def _section(entry: RouteEntry, root_path: str, needs_key: bool) -> str:
    mark = " (open)" if needs_key and entry.open else ""
    path = html.escape(root_path + entry.path.replace(":path", ""))
    title = f"<h2><b>{' '.join(entry.methods)}</b> {path}{mark}</h2>\n<p>{html.escape(entry.summary)}</p>\n"
    if entry.body is None:
        return title
    rows = "".join(
        f"<tr><td>{html.escape(field.encode_name)}</td><td>{html.escape(_type_name(field.type))}</td>"
        f"<td>{html.escape(_default(field))}</td></tr>\n"
        for field in sorted(msgspec.structs.fields(entry.body), key=lambda f: (not f.required, f.encode_name))
    )
    head = "<tr><th>field</th><th>type</th><th>default</th></tr>\n"
    return f"{title}<details><summary>fields of the body</summary>\n<table>\n{head}{rows}</table></details>\n"


def _type_name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if isinstance(kind, type) and not hasattr(kind, "__args__"):
        return kind.__name__
    return re.sub(rf"typing\.|{re.escape(__package__)}\.[\w.]*\.", "", str(kind)).replace("None", "null")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(value).decode()
