"""Which families there are. A new one is a file beside this, a line here and a parity test."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.errors import ModelFileError
from octavo.core.tensor_source import TensorSource
from octavo.models.cohere import cohere
from octavo.models.falcon import falcon
from octavo.models.files import Model, ModelFiles
from octavo.models.gemma import gemma
from octavo.models.gemma2 import gemma2
from octavo.models.gemma3 import gemma3
from octavo.models.gpt2 import gpt2
from octavo.models.gpt_neox import gpt_neox
from octavo.models.granite import granite
from octavo.models.llama import llama
from octavo.models.mixtral import mixtral
from octavo.models.olmo2 import olmo2
from octavo.models.olmoe import olmoe
from octavo.models.opt import opt
from octavo.models.phi3 import phi3
from octavo.models.qwen2 import qwen2
from octavo.models.qwen2_moe import qwen2_moe
from octavo.models.qwen3 import qwen3
from octavo.models.qwen3_moe import qwen3_moe
from octavo.models.smollm3 import smollm3
from octavo.models.stablelm import stablelm
from octavo.models.starcoder2 import starcoder2


@dataclass(frozen=True, slots=True)
class Family:
    """name: for people. gguf: values of general.architecture. hf: values of config.json's model_type."""

    name: str
    build: Callable[[ModelFiles], Model]
    gguf: tuple[str, ...] = ()
    hf: tuple[str, ...] = ()


FAMILIES = (
    Family("Llama, Mistral, Ministral", llama, gguf=("llama",), hf=("llama", "mistral", "ministral")),
    Family("Mixtral", mixtral, hf=("mixtral",)),
    Family("Qwen2, Qwen2.5", qwen2, gguf=("qwen2",), hf=("qwen2",)),
    Family("Qwen3", qwen3, gguf=("qwen3",), hf=("qwen3",)),
    Family("Qwen1.5-MoE, Qwen2-MoE", qwen2_moe, gguf=("qwen2moe",), hf=("qwen2_moe",)),
    Family("Qwen3-MoE", qwen3_moe, gguf=("qwen3moe",), hf=("qwen3_moe",)),
    Family("OLMo 2", olmo2, gguf=("olmo2",), hf=("olmo2",)),
    Family("OLMoE", olmoe, gguf=("olmoe",), hf=("olmoe",)),
    Family("SmolLM3", smollm3, gguf=("smollm3",), hf=("smollm3",)),
    Family("Gemma", gemma, gguf=("gemma",), hf=("gemma",)),
    Family("Gemma 2", gemma2, gguf=("gemma2",), hf=("gemma2",)),
    Family("Gemma 3", gemma3, gguf=("gemma3",), hf=("gemma3_text", "gemma3")),
    Family("Phi-3, Phi-4", phi3, gguf=("phi3",), hf=("phi3",)),
    Family("StableLM", stablelm, gguf=("stablelm",), hf=("stablelm",)),
    Family("GPT-2", gpt2, gguf=("gpt2",), hf=("gpt2",)),
    Family("GPT-NeoX, Pythia", gpt_neox, gguf=("gptneox",), hf=("gpt_neox",)),
    Family("OPT", opt, hf=("opt",)),
    Family("StarCoder2", starcoder2, gguf=("starcoder2",), hf=("starcoder2",)),
    Family("Falcon", falcon, gguf=("falcon",), hf=("falcon",)),
    Family("Granite 3", granite, gguf=("granite",), hf=("granite",)),
    Family("Command R, Aya", cohere, gguf=("command-r",), hf=("cohere",)),
)


def build_model(files: ModelFiles) -> Model:
    """The graph of a checkpoint from its settings and tensor shapes. Raises ModelFileError."""
    key = "general.architecture" if files.kind == "gguf" else "model_type"
    name = files.config.get(key)
    by_name = {known: f for f in FAMILIES for known in (f.gguf if files.kind == "gguf" else f.hf)}
    if not isinstance(name, str) or name not in by_name:
        raise ModelFileError(f"{key} is {name!r}, which is not supported; supported: {', '.join(sorted(by_name))}")
    try:
        model = by_name[name].build(files)
        weights = model.graph.weights
    except (ValueError, OverflowError) as e:
        what = re.sub(r"^shape: (.*?): (\w+)\(.*", r"\1 (\2)", str(e), flags=re.DOTALL)
        raise ModelFileError(f"the model's dimensions do not fit each other: {what}") from e
    for weight_name, weight in weights.items():
        _check_source(files, weight_name, weight.shape, model.sources[weight_name])
    used = {stored for source in model.sources.values() for stored in source.names}
    may_be_left_out = re.compile("|".join(model.unused) or "(?!)")
    unknown = [stored for stored in files.shapes if stored not in used and not may_be_left_out.fullmatch(stored)]
    if unknown:  # to leave one out would be to compute another model
        raise ModelFileError(
            f"the model has {len(unknown)} tensors that octavo's {name} does not know, the first is {unknown[0]}: "
            "this variant of the architecture is not supported yet"
        )
    return model


def _check_source(files: ModelFiles, name: str, shape: tuple[int, ...], source: TensorSource) -> None:
    """That what lies at a source is what the graph needs."""
    for stored in source.names:
        found = files.shapes[stored]
        needed = source.shape or (shape if len(source.names) == 1 else shape[1:])
        rows_at = -2 if len(needed) > 1 else -1
        if source.transposed:
            needed = (*needed[:-2], needed[-1], needed[-2])
            rows_at = -1
        if source.rows is not None and len(found) == len(needed):
            whole = list(needed)
            whole[rows_at] = found[rows_at]
            if source.rows.num_rows == needed[rows_at] and source.rows.end <= found[rows_at]:
                needed = tuple(whole)
        squeezed = needed[1:] if needed[0] == 1 else needed  # by converters of 2024: Qwen2-MoE's gate of one row
        if found not in (needed, squeezed):
            where = "" if stored == name else f" (for {name})"
            raise ModelFileError(f"tensor {stored}{where} has shape {list(found)}; {list(needed)} is needed")
