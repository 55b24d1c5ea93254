"""A tiny Llama as a Hugging Face folder: config, safetensors, a byte-level tokenizer, a template, sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.tokenizer.token_table import byte_alphabet

EOS_TEXT = "<|endoftext|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_tiny_folder(path: Path, seed: int = 0, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    """config: what differs from a Llama of 2 layers and width 64."""
    torch.manual_seed(seed)
    dimensions = {
        "vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
        "eos_token_id": 256,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**dimensions, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    vocabulary = {text: i for i, text in enumerate([*byte_alphabet(), EOS_TEXT])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TEXT])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS_TEXT, "chat_template": TEMPLATE}))
    (path / "generation_config.json").write_text(json.dumps(generation or {"eos_token_id": 256}))
    return path
