"""How a model's float weights are to be kept: as they come, in another float type, or quantized while they load.

Decides by a weight's name and shape; the formats themselves are `quantization`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.quantization.formats import FLOATS, FORMATS, WeightType
from octavo.weights.checkpoint import StoredTensor

DTYPES = {
    "float32": WeightType.F32,
    "float": WeightType.F32,
    "float16": WeightType.F16,
    "half": WeightType.F16,
    "bfloat16": WeightType.BF16,
}
TYPES = {
    "q8_0": WeightType.Q8_0,
    "q4_0": WeightType.Q4_0,
    "q4_1": WeightType.Q4_1,
    "q4_k": WeightType.Q4_K,
    "int8": WeightType.INT8,
}
# A router decides between experts on small differences, and is small.
NEVER_QUANTIZED = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight")
# Each token is looked up or compared with these, and no later layer evens their errors out.
AT_LEAST_8_BITS = ("token_embd.weight", "output.weight")


def packed(tensors: Mapping[str, StoredTensor], config: EngineConfig, method: str | None) -> dict[str, StoredTensor]:
    """The tensors by name as --dtype and --quantization want them, still not read.

    method: how the checkpoint is quantized already, by the name that its maker gives, or None.
    Raises ConfigError if that does not go together.
    """
    out = dict(tensors)
    if config.dtype != "auto":
        out = {name: _as_float(t, DTYPES[config.dtype]) for name, t in out.items()}
    wanted = config.quantization
    if wanted is None or wanted == method:
        return out
    kind = TYPES.get(wanted)
    if kind is None:
        has = "is not quantized" if method is None else f"is quantized by {method!r}"
        raise ConfigError(
            f"--quantization is {wanted!r}, but this checkpoint {has}; float weights can become {', '.join(TYPES)}"
        )
    matrices = {name for name, t in out.items() if len(t.shape) > 1 and not name.endswith(NEVER_QUANTIZED)}
    if not any(out[name].type in FLOATS for name in matrices):
        found = sorted({out[name].type.name for name in matrices})
        raise ConfigError(
            f"--quantization is {wanted!r}, but the weights are packed already ({', '.join(found)}): leave it out"
        )
    for name in matrices:
        if out[name].type in FLOATS:
            out[name] = _quantized(out[name], WeightType.Q8_0 if name in AT_LEAST_8_BITS else kind)
    return out


def _quantized(t: StoredTensor, kind: WeightType) -> StoredTensor:
    """In 8 bits where rows are not whole blocks of the type, and as it is where they are not of that either."""
    for each in (kind, WeightType.Q8_0):
        if t.shape[-1] % FORMATS[each].block_length == 0:
            return _encoded(t, each)
    return t


def _as_float(t: StoredTensor, kind: WeightType) -> StoredTensor:
    return t if t.type not in FLOATS or t.type is kind or len(t.shape) == 1 else _encoded(t, kind)


def _encoded(t: StoredTensor, kind: WeightType) -> StoredTensor:
    from octavo.quantization.encode import quantized  # a start that packs nothing need not wait for it

    return quantized(t, kind)
