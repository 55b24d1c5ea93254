"""`octavo pull`: download a model of the hub, so that serving it starts at once."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="org/name, or org/name:Q4_K_M for one of several GGUF models")
    parser.add_argument("--revision", metavar="REV", help="a branch, tag or commit (main)")
    parser.add_argument("--download-dir", metavar="DIR", help="cache to use instead of the hub's (HF_HOME)")


def run(args: argparse.Namespace) -> int:
    from octavo.engine.model_store import pull

    print(pull(args.name, args.revision, args.download_dir))
    return 0
