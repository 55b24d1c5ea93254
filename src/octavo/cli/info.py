"""`octavo info`: versions, processor, memory and the built-in model, for people and for bug reports."""

from __future__ import annotations

import platform

from octavo.cli.table import format_table
from octavo.core.errors import ConfigError
from octavo.core.version import version
from octavo.engine.engine import system_info
from octavo.engine.model_location import builtin_model


def run() -> int:
    try:
        model = str(builtin_model())
    except ConfigError as error:
        model = str(error)
    rows = [("octavo", version()), ("Python", platform.python_version()), *system_info()]
    print(format_table([*rows, ("built-in model", model)]))
    return 0
