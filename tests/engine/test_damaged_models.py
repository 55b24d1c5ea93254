"""Damaged model files through the whole engine: refused with an error that is meant for people, or harmless."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.quantization.formats import WeightType
from tests.tiny_folder import write_tiny_folder
from tests.tiny_models import TinyLlama, write_tiny_llama

NUM_EACH = 60


def outcome(path: Path) -> str:
    try:
        with LLM(str(path), max_model_len=32, threads=1, kv_cache_memory_bytes=1 << 20) as llm:
            llm.generate([1, 2, 3, 4], SamplingParams(max_tokens=3))
    except (ModelFileError, ConfigError, InvalidRequestError) as error:
        return "refused" if str(error) else "refused without a word"
    return "harmless"


@pytest.mark.timeout(120)
def test_damaged_gguf_files_never_crash_the_engine(tmp_path: Path) -> None:
    specs = [
        TinyLlama(type=WeightType.Q4_0, num_layers=1),
        TinyLlama(num_layers=1, num_experts=2),
        TinyLlama(hidden_size=256, intermediate_size=256, num_layers=1, type=WeightType.Q4_K),
    ]
    originals = [write_tiny_llama(tmp_path / f"{i}.gguf", spec).read_bytes() for i, spec in enumerate(specs)]
    rng, outcomes = random.Random(0), Counter[str]()
    for i in range(NUM_EACH):
        data = bytearray(originals[i % len(originals)])
        where = data.find(b"tokenizer.ggml.tokens")  # settings lie before, tensors far behind
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(8, where)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        if rng.random() < 0.2:
            del data[rng.randrange(24, len(data)) :]
        path = tmp_path / "damaged.gguf"
        path.write_bytes(data)
        outcomes[outcome(path)] += 1
    assert outcomes["refused"] > NUM_EACH // 3, outcomes
    assert not outcomes["refused without a word"]


@pytest.mark.timeout(120)
def test_damaged_folders_never_crash_the_engine(tmp_path: Path) -> None:
    original = write_tiny_folder(tmp_path / "original", num_hidden_layers=1)
    config = json.loads((original / "config.json").read_text())
    rng, outcomes = random.Random(1), Counter[str]()
    evil = [None, 0, -1, 1, 3, 2**31, 1e300, "x", [], {}, True, [1, 2], {"rope_type": "yarn"}]
    for _ in range(NUM_EACH):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        kind = rng.choice(["setting", "setting", "weights", "tokenizer", "text"])
        if kind == "setting":
            changed = {**config, **{rng.choice(sorted(config)): rng.choice(evil) for _ in range(rng.choice([1, 2]))}}
            (folder / "config.json").write_text(json.dumps(changed))
        else:
            names = {"weights": "model.safetensors", "tokenizer": "tokenizer.json", "text": "tokenizer_config.json"}
            path = folder / names[kind]
            data = bytearray(path.read_bytes())
            header = min(len(data), 2000)
            for _ in range(rng.choice([1, 3])):
                data[rng.randrange(header)] = rng.randrange(256)
            path.write_bytes(data)
        outcomes[outcome(folder)] += 1
    assert outcomes["refused"] > NUM_EACH // 4, outcomes
    assert not outcomes["refused without a word"]
