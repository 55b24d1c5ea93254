from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelFileError
from octavo.engine import model_location
from octavo.engine.model_location import locate_model


def test_a_missing_model_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match="does not exist: give the path"):
        locate_model(EngineConfig(str(tmp_path / "nothing.gguf")))
    monkeypatch.setattr(model_location, "find_builtin_model", lambda: None)
    with pytest.raises(ConfigError, match="pip install"):
        locate_model(EngineConfig())


@pytest.mark.parametrize(
    ("given", "name"), [("tiny.gguf", "tiny"), ("big-00001-of-00003.gguf", "big"), ("folder/", "folder")]
)
def test_a_model_is_served_under_its_files_name(tmp_path: Path, given: str, name: str) -> None:
    path = tmp_path / given
    path.mkdir() if given.endswith("/") else path.touch()
    located = locate_model(EngineConfig(str(path)))
    assert (located.model, located.served_model_name) == (str(path), name)
    assert locate_model(located) == located
    assert locate_model(EngineConfig(str(path), served_model_name="mine")).served_model_name == "mine"
