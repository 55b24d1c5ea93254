"""A GGUF model in other weight formats: which tensor gets which, and writing them. Metadata is kept byte for byte.

Follows llama.cpp's choices, so that a name such as q4_k_m means the same: vectors, norms, routers and position tables
stay as they are, and in the mixed types the tensors that matter most for the result get more bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.core.errors import ConfigError
from octavo.quantization.encode import quantized
from octavo.quantization.formats import FORMATS, WeightType
from octavo.quantization.stored_tensor import StoredTensor
from octavo.weights.gguf import DEFAULT_ALIGNMENT, GGUFFile
from octavo.weights.gguf_writer import uint32_entry, write_gguf

FILE_TYPE, VERSION_KEY = "general.file_type", "general.quantization_version"
QUANTIZATION_VERSION = 2  # of GGML's block layouts since 2023
T = WeightType


@dataclass(frozen=True, slots=True)
class Mix:
    """file_type: llama.cpp's number of it. base: of a matrix of which nothing else is said. head: of the output matrix,
    and of the embedding where it is the output too. always: by the part of a tensor's name. in_some_layers: the same,
    in the first and last eighth of the layers and in each third between.
    """

    file_type: int
    base: WeightType
    head: WeightType
    always: Mapping[str, WeightType] = field(default_factory=dict)
    in_some_layers: Mapping[str, WeightType] = field(default_factory=dict)


MIXES = {
    "f32": Mix(0, T.F32, T.F32),
    "f16": Mix(1, T.F16, T.F16),
    "bf16": Mix(32, T.BF16, T.BF16),
    "q8_0": Mix(7, T.Q8_0, T.Q8_0),
    "q4_0": Mix(2, T.Q4_0, T.Q6_K),
    "q4_1": Mix(3, T.Q4_1, T.Q6_K),
    "q5_0": Mix(8, T.Q5_0, T.Q6_K),
    "q5_1": Mix(9, T.Q5_1, T.Q6_K),
    "iq4_nl": Mix(25, T.IQ4_NL, T.Q6_K),
    "q2_k": Mix(10, T.Q2_K, T.Q6_K, {"attn_v": T.Q3_K, "attn_output": T.Q3_K, "ffn_down": T.Q3_K}),
    "q3_k": Mix(11, T.Q3_K, T.Q6_K),
    "q3_k_m": Mix(12, T.Q3_K, T.Q6_K, {"attn_v": T.Q4_K, "attn_output": T.Q4_K}, {"ffn_down": T.Q4_K}),
    "q4_k": Mix(14, T.Q4_K, T.Q6_K),
    "q4_k_m": Mix(15, T.Q4_K, T.Q6_K, {}, {"attn_v": T.Q6_K, "ffn_down": T.Q6_K}),
    "q5_k": Mix(16, T.Q5_K, T.Q6_K),
    "q5_k_m": Mix(17, T.Q5_K, T.Q6_K, {}, {"attn_v": T.Q6_K, "ffn_down": T.Q6_K}),
    "q6_k": Mix(18, T.Q6_K, T.Q6_K),
}
# What takes the place of a type of 256 elements a block where rows are not whole blocks of it.
NARROWER = {T.Q2_K: T.IQ4_NL, T.Q3_K: T.IQ4_NL, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}
KEPT = re.compile(r".*_norm\.weight|.*ffn_gate_inp\w*\.weight|(position_embd|token_types)\.weight|.*(?<!\.weight)")
LAYER = re.compile(r"blk\.(\d+)\.")


def mix_of(name: str) -> Mix:
    """Raises ConfigError for a name that there is not."""
    mix = MIXES.get(name.lower())
    if mix is None:
        raise ConfigError(f"--type is {name!r}; it must be one of {', '.join(MIXES)}")
    return mix


def target_types(file: GGUFFile, mix: Mix) -> dict[str, WeightType]:
    """What each tensor of the file becomes."""
    layers = [int(m[1]) for name in file.shapes if (m := LAYER.match(name))]
    num_layers = max(layers, default=0) + 1
    tied = "output.weight" not in file.shapes
    types = {}
    for name, shape in file.shapes.items():
        kind = file.tensor(name).type
        if len(shape) > 1 and not KEPT.fullmatch(name):
            kind = _fitting(_wanted(name, mix, num_layers, tied), shape[-1])
        types[name] = kind
    return types


def _wanted(name: str, mix: Mix, num_layers: int, tied: bool) -> WeightType:
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return mix.head
    match = LAYER.match(name)
    if match is not None:
        for part, kind in mix.in_some_layers.items():
            if part in name and _gets_more_bits(int(match[1]), num_layers):
                return kind
        for part, kind in mix.always.items():
            if part in name:
                return kind
    return mix.base


def _gets_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _fitting(kind: WeightType, row_length: int) -> WeightType:
    for each in (kind, NARROWER.get(kind, kind)):
        if row_length % FORMATS[each].block_length == 0:
            return each
    return WeightType.F16


def quantize_gguf(
    file: GGUFFile, path: Path, mix: Mix, wrote: Callable[[str, StoredTensor], None]
) -> dict[str, WeightType]:
    """Write the model to `path`, over what is there, and give the types. wrote: called after each tensor.

    Raises ModelFileError if it cannot be read or written, or a weight cannot be quantized.
    """
    types = target_types(file, mix)
    entries = [
        file.metadata_entry(key)
        for key in file.config
        if key not in (FILE_TYPE, VERSION_KEY) and not key.startswith("split.")
    ]
    entries += [uint32_entry(FILE_TYPE, mix.file_type), uint32_entry(VERSION_KEY, QUANTIZATION_VERSION)]
    # Copies: this lasts long, and a look at the mapping of a file that somebody truncates meanwhile ends the process.
    tensors = {name: quantized(file.copied_tensor(name), kind) for name, kind in types.items()}
    alignment = file.config.get("general.alignment", DEFAULT_ALIGNMENT)
    write_gguf(path, entries, tensors, alignment=alignment, wrote=wrote)
    return types
