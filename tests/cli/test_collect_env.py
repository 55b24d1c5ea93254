from __future__ import annotations

import json
from importlib import metadata

import pytest

from octavo.cli.main import main


def test_the_report_has_machine_packages_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "hush-hush")
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hush-hush@mirror:8443/hub")
    monkeypatch.setenv("OCTAVO_HEADER", "Authorization=Bearer hush-hush")
    monkeypatch.setenv("OCTAVO_ISA", "")
    assert main(["collect-env", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "hush-hush" not in shown
    report = json.loads(shown)
    assert "instruction sets" in report["octavo"]
    assert report["machine"]["Python"].startswith("3.")
    assert report["environment"]["OCTAVO_API_KEY"] == "(set, not shown)"
    assert report["environment"]["HF_ENDPOINT"] == "https://(not shown)@mirror:8443/hub"
    assert report["environment"]["OCTAVO_ISA"] == ""
    assert main(["collect-env"]) == 0
    table = capsys.readouterr().out
    assert "hush-hush" not in table
    assert all(name in table for name in ("packages", "kernel", "caches", "OCTAVO_API_KEY"))


def test_every_package_that_octavo_needs_is_named_with_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["collect-env", "--json"])
    packages = json.loads(capsys.readouterr().out)["packages"]
    assert packages["jinja2"] == metadata.version("jinja2")
    assert "MISSING" not in packages.values()
