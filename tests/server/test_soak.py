"""The long measurements of bench/, short: what they find in thousands of requests begins with what they find in few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.server.harness import ENVIRONMENT, ROOT


def run(script: str, tmp_path: Path, *flags: str) -> tuple[int, str, Any]:
    """Exit code, what it said, and its figures."""
    command = [sys.executable, f"bench/{script}", *flags, "--json", str(tmp_path / "figures")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr, json.loads((tmp_path / "figures").read_text())


def test_two_hundred_requests_of_every_kind_end_once_and_leave_nothing_behind(tmp_path: Path) -> None:
    code, said, figures = run("soak.py", tmp_path, "--requests", "200", "--clients", "24", "--seed", "1")
    assert code == 0, said
    assert figures["faults"] == []
    assert sum(figures["outcomes"].values()) == 200
    assert len({outcome.partition(":")[0] for outcome in figures["outcomes"]}) >= 11


def test_a_streamed_token_costs_the_http_process_little_and_idleness_nothing(tmp_path: Path) -> None:
    code, said, figures = run("overhead.py", tmp_path, "--rounds", "3", "--tokens", "50")
    assert code == 0, said
    assert max(figures["/v1/completions"], figures["/v1/chat/completions"]) < 0.12  # CPU s for 1,000 tokens, so 12%
    assert figures["idle"] < 0.01
