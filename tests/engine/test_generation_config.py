from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelFileError
from octavo.engine.generation_config import load_generation_defaults

VALUES = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 40,
    "eos_token_id": [7, 9],
    "max_new_tokens": 99,
    "do_sample": True,
}


def folder(tmp_path: Path, values: Any) -> str:
    (tmp_path / "generation_config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return str(tmp_path)


def test_what_lies_beside_the_model_counts_unless_vllm_is_asked_for(tmp_path: Path) -> None:
    model = folder(tmp_path, VALUES)
    found = load_generation_defaults(EngineConfig(model))
    assert found.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_tokens": 99}
    assert found.eos_token_ids == {7, 9}
    assert found.params().top_k == 40
    nothing = load_generation_defaults(EngineConfig(model, generation_config="vllm"))
    assert (nothing.sampling, nothing.eos_token_ids) == ({}, frozenset())


def test_overrides_win_over_the_file_and_need_none(tmp_path: Path) -> None:
    overrides = {"temperature": 0.1, "eos_token_id": 3}
    found = load_generation_defaults(EngineConfig(folder(tmp_path, VALUES), override_generation_config=overrides))
    assert (found.sampling["temperature"], found.sampling["top_p"], found.eos_token_ids) == (0.1, 0.9, {3})
    alone = load_generation_defaults(EngineConfig("model.gguf", override_generation_config=overrides))
    assert (alone.sampling, alone.eos_token_ids) == ({"temperature": 0.1}, {3})


def test_a_file_can_be_taken_from_elsewhere(tmp_path: Path) -> None:
    elsewhere = folder(tmp_path, VALUES)
    for named in (elsewhere, str(tmp_path / "generation_config.json")):
        assert load_generation_defaults(EngineConfig("m.gguf", generation_config=named)).sampling["top_k"] == 40
    with pytest.raises(ConfigError, match="--generation-config is"):
        load_generation_defaults(EngineConfig("m.gguf", generation_config=str(tmp_path / "no")))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ("{", ModelFileError, "cannot read .*: mend it"),
        ("[]", ModelFileError, "is not a JSON object"),
        ({"temperature": -1}, ConfigError, "temperature is -1; it must be between 0 and 2"),
        ({"top_k": "x"}, ConfigError, "top_k is 'x'; it must be a whole number"),
        ({"eos_token_id": "x"}, ConfigError, "eos_token_id is"),
    ],
)
def test_a_damaged_file_is_refused_with_the_way_out(
    tmp_path: Path, values: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_generation_defaults(EngineConfig(folder(tmp_path, values)))


def test_a_file_that_cannot_be_one_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.symlink_to("nowhere")
    with pytest.raises(ModelFileError, match="no regular file, or a link to nothing"):
        load_generation_defaults(EngineConfig(str(tmp_path)))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match="no regular file, or a link to nothing"):
        load_generation_defaults(EngineConfig(str(tmp_path)))
    assert load_generation_defaults(EngineConfig(str(tmp_path), generation_config="vllm")).sampling == {}


def test_an_override_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match="has 'temprature'; it can have temperature"):
        load_generation_defaults(EngineConfig("m.gguf", override_generation_config={"temprature": 1}))
