"""A family's logits against transformers, on a tiny random checkpoint: through safetensors, and through a GGUF that is
written with the `gguf` package's own table of tensor names and the reorderings that llama.cpp's converter does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel

from octavo.models.files import ModelFiles
from octavo.models.registry import build_model
from octavo.weights.open_checkpoint import open_checkpoint
from tests.backends.harness import ISAS
from tests.models.native import NativeModel

Array = NDArray[np.float32]
State = dict[str, Array]
MAX_RELATIVE_ERROR = 1e-4
NUM_TOKENS = 300  # over one partition of the attention


def keep(state: State, config: Any) -> State:
    return state


@dataclass(frozen=True)
class GGUFForm:
    """How a family is written as GGUF. reorder: what the converter does to tensors, which keep Hugging Face's names, or
    get GGUF's. describe: metadata beside what all families have. rms: which of the two keys has the norms' epsilon.
    kv_heads: how many the file says there are.
    """

    architecture: str
    describe: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None
    reorder: Callable[[State, Any], State] = keep
    rms: bool = True
    kv_heads: Callable[[Any], int] = lambda c: getattr(c, "num_key_value_heads", None) or c.num_attention_heads


def old_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 4 wrote it: the rotation lay at the top, rope_type was once called type."""
    old = dict(config)
    old["torch_dtype"] = old.pop("dtype", "float32")
    rope = dict(old.get("rope_parameters") or {})
    if "rope_theta" in rope:
        del old["rope_parameters"]
        old["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type", "default")
        old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return old


def older_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """From before layer_types: which layers slide followed from other entries."""
    old = old_config(config)
    old.pop("layer_types", None)
    return old


@dataclass(frozen=True)
class Case:
    """model: transformers' class. config: of the tiny model. form: None where llama.cpp does not know the family
    or this variant. old_config: makes of today's config.json one of an older kind that means the same. dtype: how
    weights are stored.
    """

    model: type[PreTrainedModel]
    config: PretrainedConfig
    form: GGUFForm | None
    seed: int = 0
    old_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = old_config
    dtype: torch.dtype = torch.float32


def interleave(matrix: Array, heads: int, rotary_dim: int | None = None) -> Array:
    """Rows of q or k from halves (i, i + pairs) to neighbours (2i, 2i + 1), head by head."""
    by_head = matrix.reshape(heads, matrix.shape[0] // heads, *matrix.shape[1:])
    n = rotary_dim or by_head.shape[1]
    turned = by_head[:, :n].reshape(heads, 2, n // 2, *matrix.shape[1:]).swapaxes(1, 2).reshape(by_head[:, :n].shape)
    return np.concatenate([turned, by_head[:, n:]], axis=1).reshape(matrix.shape)


def interleave_q_and_k(state: State, config: Any) -> State:
    """What llama.cpp's converter does for the families whose graph rotates neighbours."""

    def reordered(name: str, value: Array) -> Array:
        if ".q_proj." in name:
            return interleave(value, config.num_attention_heads)
        return interleave(value, config.num_key_value_heads) if ".k_proj." in name else value

    return {name: reordered(name, value) for name, value in state.items()}


def random_model(case: Case) -> PreTrainedModel:
    """Weights such that activations stay near 1 and logits are spread; every vector differs from its default."""
    torch.manual_seed(case.seed)
    # Not every family's other ways of attending know soft caps.
    model = case.model._from_config(case.config, attn_implementation="eager").to(torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=1.5 / p.shape[-1] ** 0.5)
            else:
                p.add_(torch.randn_like(p), alpha=0.2)
            p.copy_(p.to(case.dtype))
    model.tie_weights()
    return model


def hf_files(case: Case) -> ModelFiles:
    """What the case's checkpoint would have, without making one."""
    with torch.device("meta"):
        model = case.model(case.config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return ModelFiles("hf", json.loads(model.config.to_json_string()), shapes, lambda name: [])


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def expected_logits(model: PreTrainedModel, tokens: list[int]) -> Array:
    with torch.no_grad():
        logits: Array = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


GGUF_TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def write_gguf(path: Path, state: State, config: Any, form: GGUFForm, dtype: torch.dtype = torch.float32) -> Path:
    """Metadata as llama.cpp's converter writes them for all families. dtype: of matrices; vectors and norms are
    float32.
    """
    writer = gguf.GGUFWriter(path, form.architecture)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * hidden)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(form.kv_heads(config))
    if head_dim := config.to_dict().get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    eps = next(v for k in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
               if (v := getattr(config, k, None)) is not None)  # fmt: skip
    (writer.add_layer_norm_rms_eps if form.rms else writer.add_layer_norm_eps)(eps)
    _describe_rope(writer, getattr(config, "rope_parameters", None) or {})
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    form.describe(writer, config)
    names = gguf.get_tensor_name_map(_architecture(form.architecture), layers)
    for name, value in form.reorder(dict(state), config).items():
        stem, _, kind = name.rpartition(".")
        new = stem if stem.startswith("blk.") else names.get_name(stem)
        assert new is not None, f"llama.cpp has no name for {name}: give the case no form"
        stored = GGUF_TYPES[dtype] if value.ndim > 1 and not new.endswith("_norm") else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{new}.{kind}", gguf.quants.quantize(np.ascontiguousarray(value), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe_rope(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    """Of Llama 3's scaling the converter makes a tensor."""
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "beta_slow" in rope:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def stack_experts(state: State, config: Any, pattern: str, stacked: str, num_experts: int) -> State:
    """Tensors named by `pattern` ({layer}, {expert}) become one a layer, named `stacked` ({layer})."""
    state = dict(state)
    for layer in range(config.num_hidden_layers):
        names = [pattern.format(layer=layer, expert=e) for e in range(num_experts)]
        if names[0] in state:
            state[stacked.format(layer=layer)] = np.stack([state.pop(name) for name in names])
    return state


def stored_state(folder: Path) -> State:
    """All tensors of the safetensors files in a folder."""
    state: State = {}
    for file in folder.glob("*.safetensors"):
        state |= {name: tensor.float().numpy() for name, tensor in load_file(file).items()}
    return state


def assert_logits_equal(path: Path, want: Array, tokens: list[int], context: int) -> None:
    """Every instruction set, in one prefill; and the same bits in chunks and single tokens."""
    scale = np.abs(want).max()
    for isa in ISAS:
        whole = NativeModel(path, isa=isa, max_tokens=512, context=context).logits(tokens)
        error = np.abs(whole - want).max() / scale
        assert error < MAX_RELATIVE_ERROR, f"{isa}: relative error {error:.2e}"
    n = len(tokens)
    chunks = [100, 1, 17, 128, n - 266] + [1] * 20
    chunked = NativeModel(path, isa=ISAS[0], context=context).logits(tokens, chunks)
    assert np.array_equal(chunked, NativeModel(path, isa=ISAS[0], max_tokens=512, context=context).logits(tokens))


def assert_old_config_gives_the_same_graph(folder: Path, make_old: Callable[[Mapping[str, Any]], Any]) -> None:
    checkpoint = open_checkpoint(folder)
    files = ModelFiles("hf", checkpoint.config, checkpoint.shapes, lambda name: [])
    checkpoint.close()
    old = make_old(checkpoint.config)
    assert old != checkpoint.config
    new_model, old_model = build_model(files), build_model(replace(files, config=old))
    assert old_model == new_model


def check_family(case: Case, tmp_path: Path) -> Mapping[str, Path]:
    """Both forms of the checkpoint against transformers; returns their paths."""
    model = random_model(case)
    config = model.config.get_text_config()
    tokens = np.random.default_rng(case.seed).integers(0, config.vocab_size, NUM_TOKENS).tolist()
    want = expected_logits(model, tokens)
    assert want.std() > 0.05, "logits are spread, so that a wrong model cannot pass"
    folder = tmp_path / "hf"
    model.to(case.dtype).save_pretrained(folder)
    context = min(config.max_position_embeddings, 512)
    assert_logits_equal(folder, want, tokens, context)
    assert_old_config_gives_the_same_graph(folder, case.old_config)
    paths = {"hf": folder}
    if case.form is not None:
        paths["gguf"] = write_gguf(tmp_path / "model.gguf", stored_state(folder), config, case.form, case.dtype)
        assert_logits_equal(paths["gguf"], want, tokens, context)
    return paths
