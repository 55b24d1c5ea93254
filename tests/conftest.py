"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _signals_as_in_a_terminal() -> None:
    """What runs in the background of a shell, or under nohup, is told to ignore these; tests send them to us."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
