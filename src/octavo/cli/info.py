"""`octavo info`: versions, processor, memory and the built-in model, for people and for bug reports."""

from __future__ import annotations

import platform

import octavo
from octavo.cli.table import format_table
from octavo.core.errors import ConfigError
from octavo.engine.engine import system_info
from octavo.engine.frontend import resolve_model


def run() -> int:
    try:
        model = resolve_model(None)
    except ConfigError as error:
        model = str(error)
    rows = [("octavo", octavo.__version__), ("Python", platform.python_version()), *system_info()]
    print(format_table([*rows, ("built-in model", model)]))
    return 0
