"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of q, k and v, whose upper layers can attend to a window."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import DecoderConfig, layer_windows, settings, with_defaults
from octavo.models.files import Model, ModelFiles
from octavo.models.llama import llama_graph
from octavo.models.settings import Settings


def qwen2(files: ModelFiles) -> Model:
    return llama_graph(files, read_qwen(files))


def qwen_settings(files: ModelFiles) -> Settings:
    """Of all models of the second and the third generation."""
    read = settings(with_defaults(files, use_sliding_window=False, sliding_window=4096))
    read.refuse_unless("hidden_act", "silu")
    return read


def read_qwen(files: ModelFiles) -> DecoderConfig:
    """Of the dense ones."""
    read = qwen_settings(files)
    c = DecoderConfig.read(files)
    first = read.whole("max_window_layers", default=28)
    return replace(c, windows=layer_windows(read, c.num_layers, lambda layer: layer >= first))
