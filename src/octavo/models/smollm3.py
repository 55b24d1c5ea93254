"""SmolLM3 (Hugging Face 2025): Llama, where q and k of every fourth layer are not rotated (Yang et al. 2025, NoPE)."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import DecoderConfig, layer_windows, settings, with_defaults
from octavo.models.decoder import Decoder
from octavo.models.files import Model, ModelFiles


def smollm3(files: ModelFiles) -> Model:
    read = settings(with_defaults(files, use_sliding_window=False))
    read.refuse_unless("hidden_act", "silu")
    c = DecoderConfig.read(files, interleaved_in_gguf=True, tied_by_default=True, default_theta=2e6)
    step = read.positive_int("no_rope_layer_interval", default=4)
    rotates = [(i + 1) % step != 0 for i in range(c.num_layers)]
    if read.has("no_rope_layers"):  # 1 for layers that are rotated
        rotates = [bool(flag) for flag in read.items("no_rope_layers", length=c.num_layers)]
    windows = layer_windows(read, c.num_layers, lambda i: not rotates[i])
    d = Decoder(files, replace(c, windows=windows))
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        if rotates[i]:
            q, k = d.rope(q), d.rope(k)
        x = d.add(x, d.linear(d.attention(q, k, v, i), f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
