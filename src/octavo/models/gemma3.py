"""Gemma 3 (Gemma Team 2025), the text model: Gemma 2 with norms of queries and keys instead of soft caps; five of six
layers slide and have a rotation of their own. Checkpoints that also see keep the text model's settings in text_config;
their vision tower is left out, for octavo takes no images.
"""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.models.config import DecoderConfig, layer_windows, settings, with_defaults
from octavo.models.decoder import HF_NAMES, Decoder, read_activation
from octavo.models.files import Model, ModelFiles
from octavo.models.gemma2 import HF_NAMES as GEMMA2_NAMES
from octavo.models.gemma2 import query_scale
from octavo.models.rope import RopeFrequencies, plain_rope
from octavo.models.settings import Settings

TEXT_PREFIXES = ("language_model.model.", "model.language_model.")  # before and since transformers 4.52
VISION = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)
GGUF_LAYERS_OF_27B = 62


def gemma3(files: ModelFiles) -> Model:
    names = {**HF_NAMES, **GEMMA2_NAMES}
    unused: tuple[str, ...] = ()
    if files.kind == "hf" and settings(files).has("text_config"):
        settings(files).refuse_unless("tie_word_embeddings", True)
        settings(files).section("text_config").refuse_unless("model_type", "gemma3_text")
        files = replace(files, config=files.config["text_config"])
        prefix = next((p for p in TEXT_PREFIXES if f"{p}embed_tokens.weight" in files.shapes), "model.")
        names = {name: place.replace("model.", prefix, 1) for name, place in names.items()}
        unused = VISION
    files = with_defaults(
        files, vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=131072, sliding_window=4096,
        query_pre_attn_scalar=256,
    )  # fmt: skip
    read = settings(files)
    read.refuse_unless("use_bidirectional_attention", False)
    read.refuse_unless("attn_logit_softcapping", None)
    activation = read_activation(read, "hidden_activation", "gelu_pytorch_tanh")
    c = DecoderConfig.read(files, tied_by_default=True, default_theta=1e6)
    length = read.positive_int("max_position_embeddings", "context_length")  # counts the scaling of full layers already
    period = read.positive_int("sliding_window_pattern", "attention.sliding_window_pattern", default=6)
    windows = layer_windows(read, c.num_layers, slides=lambda layer: (layer + 1) % period != 0)
    c = replace(c, windows=windows, max_position_embeddings=length)
    local, scale = _local_rope(read, c.head_dim), query_scale(files, c, GGUF_LAYERS_OF_27B)
    logit_cap = read.positive_float("final_logit_softcapping") if read.has("final_logit_softcapping") else None
    d = Decoder(files, c, names, hf_norm_offset=1.0)
    x = d.scale(d.embed(), math.sqrt(c.hidden_size))
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        rope = local if c.windows[i] else c.rope
        q, k = d.head_norms(q, k, i)
        a = d.attention(d.rope(q, rope), d.rope(k, rope), v, i, scale=scale)
        a = d.linear(a, f"blk.{i}.attn_output", c.hidden_size)
        x = d.add(x, d.rms_norm(a, f"blk.{i}.post_attention_norm"))
        h = d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i, activation)
        x = d.add(x, d.rms_norm(h, f"blk.{i}.post_ffw_norm"))
    return d.model(d.softcap(d.head(d.rms_norm(d.select(x), "output_norm")), logit_cap), unused)


def _local_rope(read: Settings, head_dim: int) -> RopeFrequencies:
    """Of the layers that slide."""
    here = read.section("rope_parameters").section("sliding_attention")
    here.refuse_unless("rope_type", "default")
    theta = read.positive_float("rope_local_base_freq", "rope.freq_base_swa", default=10000.0)
    return plain_rope(head_dim, here.positive_float("rope_theta", default=theta))
