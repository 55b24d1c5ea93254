from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelFileError
from octavo.engine import model_location
from octavo.engine.model_location import locate_model
from octavo.engine.text_side import load_text_side
from octavo.weights import hub


def test_a_missing_model_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match="does not exist: give the path"):
        locate_model(EngineConfig(str(tmp_path / "nothing.gguf")))
    monkeypatch.setattr(model_location, "find_builtin_model", lambda: None)
    with pytest.raises(ConfigError, match="pip install"):
        locate_model(EngineConfig())


def test_the_name_of_the_built_in_model_is_told_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_location, "find_builtin_model", lambda: Path("/models/Tiny-Q4_1.gguf"))
    with pytest.raises(ModelFileError, match="'Tiny-Q4_1' is what the built-in model is called"):
        locate_model(EngineConfig("Tiny-Q4_1"))


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


def test_a_revision_of_what_is_here_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--revision is 'v2', but .* is on this machine and has none: leave it out"):
        locate_model(EngineConfig(str(tmp_path), revision="v2"))


def test_a_tokenizer_of_the_hub_has_a_revision_of_its_own_and_needs_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(name: str, revision: str | None, folder: str | None, *, tokenizer_only: bool) -> Path:
        asked.append((name, revision, tokenizer_only))
        return tmp_path / name

    monkeypatch.setattr(hub, "fetch", fetch)
    located = locate_model(EngineConfig("a/model", tokenizer="b/tokenizer", revision="v2"))
    assert asked == [("a/model", "v2", False), ("b/tokenizer", None, True)]
    assert (located.model, located.tokenizer) == (str(tmp_path / "a/model"), str(tmp_path / "b/tokenizer"))


def test_a_tokenizer_may_have_a_revision_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def fetch(name: str, revision: str | None, folder: str | None, *, tokenizer_only: bool) -> Path:
        asked.append((name, revision, tokenizer_only))
        return tmp_path

    monkeypatch.setattr(hub, "fetch", fetch)
    located = locate_model(EngineConfig("a/model", revision="v2", tokenizer_revision="v3"))
    assert asked == [("a/model", "v2", False), ("a/model", "v3", True)]
    assert (located.tokenizer, located.tokenizer_revision) == (str(tmp_path), None)
    asked.clear()
    locate_model(EngineConfig("a/model", tokenizer="b/other", tokenizer_revision="v3"))
    assert asked == [("a/model", None, False), ("b/other", "v3", True)]
    asked.clear()
    locate_model(EngineConfig("a/model", revision="v2", tokenizer_revision="v2"))
    assert asked == [("a/model", "v2", False)]
    for model in (str(tmp_path), None):
        with pytest.raises(ConfigError, match="leave --tokenizer-revision out"):
            locate_model(EngineConfig(model, tokenizer_revision="v3"))


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model", ""])
def test_a_path_that_cannot_be_is_one_clear_line(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"check the path|does not exist"):
        locate_model(EngineConfig(name))


def test_a_name_that_is_not_utf8_is_refused_in_one_line(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/n\xff.gguf")
    Path(path).touch()
    with pytest.raises(ModelFileError, match=r"is not UTF-8.*rename it"):
        locate_model(EngineConfig(path))


def test_files_that_may_not_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, whom nothing is denied
    with pytest.raises(ModelFileError, match=r"cannot read the folder .*permission denied"):
        locate_model(EngineConfig(str(tmp_path)))
    monkeypatch.setattr(Path, "is_file", deny)
    with pytest.raises(ModelFileError, match=r"cannot read .*tokenizer.json: Permission denied: check who may read it"):
        load_text_side(EngineConfig(str(tmp_path)))


def test_a_path_that_reads_as_a_hub_name_is_said_to_be_missing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object, **__: object) -> Path:
        raise ConfigError("not on the hub")

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^not on the hub"):
        locate_model(EngineConfig("models/Llama"))
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match="no file or folder models/Llama, and as a name of the hub: not on the hub"):
        locate_model(EngineConfig("models/Llama"))
    with pytest.raises(ModelFileError, match="'models/meta/Llama' does not exist"):
        locate_model(EngineConfig("models/meta/Llama"))


def test_a_missing_tokenizer_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^--tokenizer: '/nope' does not exist.*\(org/name\)$"):
        locate_model(EngineConfig(str(tmp_path), tokenizer="/nope"))
