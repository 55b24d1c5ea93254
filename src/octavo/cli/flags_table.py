"""Writes the tables of docs/flags.md anew: `python -m octavo.cli.flags_table docs/flags.md`.

They come from the parser of `octavo serve` and the table of vLLM's flags; the words around them are the page's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from octavo.cli.main import make_parser
from octavo.cli.parser import names_of
from octavo.core.vllm_flags import NOTE, REFUSED, SILENT, WORKS, VllmFlag, vllm_flags

VERDICTS = {SILENT: "accepted", NOTE: "with a note", REFUSED: "refused"}


def renewed(page: str) -> str:
    """The page with what is between its marks, <!-- serve --> or <!-- vllm --> and <!-- end -->, made anew."""
    for mark, tables in (("serve", _own_flags()), ("vllm", _vllm_table())):
        begin = f"<!-- {mark} -->\n"
        before, _, rest = page.partition(begin)
        _, end, after = rest.partition("<!-- end -->")
        page = "".join([before, begin, "\n", *(f"{table}\n" for table in tables), end, after])
    return page


def _own_flags() -> Iterator[str]:
    works = set(WORKS.split())
    for group in make_parser("serve")._action_groups:
        rows = [_row(action, works) for action in group._group_actions if names_of(action) or not action.option_strings]
        if rows:
            title = "the model" if group.title == "positional arguments" else str(group.title)
            yield f"### {title.capitalize()}\n\n| Flag | | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(action: argparse.Action, works: set[str]) -> str:
    spellings = [s for s in action.option_strings if not s.startswith("--no-")] or [str(action.metavar)]
    value = "" if action.nargs == 0 or not action.option_strings else f" {_value(action)}"
    flags = ", ".join(f"`{spelling}`" for spelling in [*spellings[:-1], f"{spellings[-1]}{value}"])
    return f"| {flags} | {'vLLM' if works & set(names_of(action)) else ''} | {_cell(str(action.help))} |"


def _value(action: argparse.Action) -> str:
    text = str(action.metavar or action.dest.upper())
    if action.choices is not None and action.metavar is None:
        text = "\\|".join(map(str, action.choices))
    return f"{text} ..." if action.nargs == "+" else text


def _vllm_table() -> Iterator[str]:
    for title, flags in groupby(sorted(vllm_flags().values(), key=_order), key=lambda flag: flag.group):
        rows = []
        for (verdict, text), same in groupby(flags, key=lambda flag: (flag.verdict, flag.text)):
            rows.append(f"| {VERDICTS[verdict]} | {', '.join(map(_named, same))} | {_cell(text)} |")
        yield f"### {title.capitalize()}\n\n| | Flags | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _order(flag: VllmFlag) -> tuple[int, int, int]:
    """As in the table: by group, then by what is said."""
    flags = list(vllm_flags().values())
    return (
        next(i for i, other in enumerate(flags) if other.group == flag.group),
        next(i for i, other in enumerate(flags) if (other.verdict, other.text) == (flag.verdict, flag.text)),
        flags.index(flag),
    )


def _named(flag: VllmFlag) -> str:
    values = ", ".join(f"`{value}`" for value in flag.silent_values if value != "true")
    spellings = ", ".join(f"`{spelling}`" for spelling in flag.spellings)
    return f"{spellings} ({values})" if values else spellings


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
