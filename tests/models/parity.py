"""A family's logits against transformers, on a tiny random checkpoint: through safetensors, and through a GGUF that is
written with the `gguf` package's own table of tensor names and the reorderings that llama.cpp's converter does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

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
    """How a family is written as GGUF. reorder: what the converter does to tensors, which keep Hugging Face's names.
    describe: metadata beside what all families have. rms: which of the two keys has the norms' epsilon.
    """

    architecture: str
    describe: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None
    reorder: Callable[[State, Any], State] = keep
    rms: bool = True


@dataclass(frozen=True)
class Case:
    """model: transformers' class. config: of the tiny model. form: None where llama.cpp does not know the family."""

    model: type[PreTrainedModel]
    config: PretrainedConfig
    form: GGUFForm | None
    seed: int = 0


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
    model = case.model(case.config).to(torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=1.5 / p.shape[-1] ** 0.5)
            else:
                p.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    model.tie_weights()
    return model


def expected_logits(model: PreTrainedModel, tokens: list[int]) -> Array:
    with torch.no_grad():
        logits: Array = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def write_gguf(path: Path, state: State, config: Any, form: GGUFForm) -> Path:
    """float32 throughout."""
    writer = gguf.GGUFWriter(path, form.architecture)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    hidden = config.hidden_size
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    if getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    eps = next(v for k in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
               if (v := getattr(config, k, None)) is not None)  # fmt: skip
    (writer.add_layer_norm_rms_eps if form.rms else writer.add_layer_norm_eps)(eps)
    form.describe(writer, config)
    names = gguf.get_tensor_name_map(_architecture(form.architecture), layers)
    for name, value in form.reorder(dict(state), config).items():
        stem, _, kind = name.rpartition(".")
        new = names.get_name(stem)
        assert new is not None, f"the gguf package has no name for {name}"
        writer.add_tensor(f"{new}.{kind}", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    from safetensors.numpy import load_file

    state: State = {}
    for file in folder.glob("*.safetensors"):
        state |= load_file(file)
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


def check_family(case: Case, tmp_path: Path) -> Mapping[str, Path]:
    """Both forms of the checkpoint against transformers; returns their paths."""
    model = random_model(case)
    config = model.config
    tokens = np.random.default_rng(case.seed).integers(0, config.vocab_size, NUM_TOKENS).tolist()
    want = expected_logits(model, tokens)
    assert want.std() > 0.05, "logits are spread, so that a wrong model cannot pass"
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    context = min(config.max_position_embeddings, 512)
    assert_logits_equal(folder, want, tokens, context)
    paths = {"hf": folder}
    if case.form is not None:
        paths["gguf"] = write_gguf(tmp_path / "model.gguf", stored_state(folder), config, case.form)
        assert_logits_equal(paths["gguf"], want, tokens, context)
    return paths
