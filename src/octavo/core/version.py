"""The version of the installed package, looked up when asked."""

from __future__ import annotations


def version() -> str:
    from importlib import metadata  # takes longer than all of the command line's own imports

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"  # run from a source tree
