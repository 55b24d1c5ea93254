"""`octavo models`: the models that are on this machine."""

from __future__ import annotations

import argparse

from octavo.cli.table import format_table


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--download-dir", metavar="DIR", help="cache to look into instead of the hub's (HF_HOME)")


def run(args: argparse.Namespace) -> int:
    from octavo.engine.model_store import local_models

    models = local_models(args.download_dir)
    if not models:
        print("no models here; 'octavo pull org/name' downloads one of the hub")
        return 0
    sizes = [f"{model.num_bytes / (1 << 20):,.1f} MiB" for model in models]
    revisions = [", ".join(model.revisions) for model in models]
    # Columns after the name, each as wide as its longest.
    texts = [
        f"{revision:<{max(map(len, revisions))}}  {size:>{max(map(len, sizes))}}  {model.num_files} "
        f"{'file' if model.num_files == 1 else 'files'}"
        for model, size, revision in zip(models, sizes, revisions, strict=True)
    ]
    print(format_table([(model.name, text) for model, text in zip(models, texts, strict=True)]))
    return 0
