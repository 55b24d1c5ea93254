"""Two columns of text."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
