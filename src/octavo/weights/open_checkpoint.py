"""From a path to an open checkpoint: which kind of model files lies there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from octavo.core.errors import ModelFileError
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.gguf import GGUFFile, split_paths

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
SIDE_ENDINGS = (".json", ".jinja", ".model", ".txt")  # of what lies beside the weights


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A GGUF file (of a split model: any part), a folder with safetensors, or a folder with one GGUF model.

    Raises ModelFileError that says what is there instead.
    """
    path = Path(path)
    if not path.is_dir():
        if path.suffix == ".safetensors":
            raise ModelFileError(
                f"{path} has weights only: give the folder that also has config.json and the tokenizer"
            )
        if path.suffix in SIDE_ENDINGS and path.is_file():
            raise ModelFileError(f"{path} is one file of a model: give the folder {path.parent}, or a GGUF file")
        return GGUFFile.open(path)
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        from octavo.weights.safetensors import HFCheckpoint  # 15 ms that a GGUF's start need not wait for

        return HFCheckpoint.open(path)
    models = gguf_models(path.glob("*.gguf"))
    if len(models) == 1:
        return GGUFFile.open(models[0])
    if models:
        names = ", ".join(model.name for model in models)
        raise ModelFileError(f"{path} has {len(models)} GGUF models: give the path of one of them ({names})")
    if any((path / name).exists() for name in PICKLED):
        raise ModelFileError(
            f"{path} has weights only as a PyTorch pickle, which can run code when it is loaded: convert it with "
            "transformers (model.save_pretrained(folder) writes safetensors)"
        )
    raise ModelFileError(f"{path} has neither *.safetensors nor *.gguf: give the path of a model")


def gguf_models(paths: Iterable[Path]) -> list[Path]:
    """The first file of each model among GGUF files, sorted; projectors of images are no models of text."""
    return sorted({split_paths(path)[0] for path in paths if not path.name.startswith("mmproj")})
