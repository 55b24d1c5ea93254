"""The real engine dies in real ways under load: everybody is told at once, and soon it serves again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.harness import ServerProcess, children_of, server, wait_until

NUM_STREAMS = 16
ANSWER_SECONDS = 8  # far less than the streams would take, and than a client's patience


@contextmanager
def faulty_server(fault: str = "", *flags: str) -> Iterator[ServerProcess]:
    """The built-in model; `fault`: OCTAVO_FAULT."""
    command = ["env", f"OCTAVO_FAULT={fault}", sys.executable, "-m", "octavo", "serve", "--port", "0", *flags]
    with server(command) as process:
        yield process


def ask(process: ServerProcess, *, stream: bool, max_tokens: int) -> tuple[int, str]:
    body = {"prompt": "Once", "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    reply = httpx.post(f"{process.url}/v1/completions", json=body, timeout=30)
    return reply.status_code, reply.text


def num_ended(process: ServerProcess) -> dict[str, int]:
    """How many requests ended, for each reason that there was."""
    counts: Counter[str] = Counter()
    for line in httpx.get(f"{process.url}/metrics").text.splitlines():
        if line.startswith("octavo:request_success_total") and not line.endswith(" 0.0"):
            counts[line.partition('finished_reason="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return dict(counts)


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def check_that_all_are_told_and_it_serves_again(process: ServerProcess, kill: signal.Signals | None = None) -> None:
    pid, engine, files = process.popen.pid, process.engine_pid(), num_files(process.popen.pid)
    with ThreadPoolExecutor(NUM_STREAMS + 1) as pool:
        replies = [pool.submit(ask, process, stream=i % 4 > 0, max_tokens=2000) for i in range(NUM_STREAMS)]
        if kill is not None:
            wait_until(lambda: httpx.get(f"{process.url}/load").json()["server_load"] == NUM_STREAMS)
            time.sleep(0.2)
            os.kill(engine, kill)
        num_late = 0
        for i, reply in enumerate(replies):
            status, text = reply.result(ANSWER_SECONDS)
            if status == 503:  # it came when the fault had struck
                num_late += 1
                continue
            assert status == (200 if i % 4 > 0 and "data: " in text else 500)
            assert '"code":"engine_dead"' in text
            assert text.count("data: [DONE]") == (status == 200)
    num_lost = NUM_STREAMS - num_late
    assert num_lost > (0 if kill is None else NUM_STREAMS - 1)
    assert httpx.get(f"{process.url}/health").status_code == 503
    wait_until(lambda: httpx.get(f"{process.url}/health").status_code == 200)
    assert ask(process, stream=False, max_tokens=3)[0] == 200
    assert num_ended(process) == {"error": num_lost, "length": 1}
    assert children_of(pid) != [engine]
    assert len(children_of(pid)) == 1
    wait_until(lambda: num_files(pid) <= files)
    assert f"{num_lost} requests were running" in process.log


def test_a_killed_engine() -> None:
    with faulty_server() as process:
        check_that_all_are_told_and_it_serves_again(process, signal.SIGKILL)
        assert "was killed by SIGKILL" in process.log


def test_a_stopped_engine() -> None:
    with faulty_server() as process:
        check_that_all_are_told_and_it_serves_again(process, signal.SIGSTOP)
        assert "was stopped by a signal and was killed" in process.log


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("segv@40", "was killed by SIGSEGV"),
        ("abort@40", "was killed by SIGABRT"),
        ("hang@40", "got nothing done for 1 s and was killed"),
        ("throw@40", "ended with exit code 1 (RuntimeError: a fault on purpose)"),
    ],
)
def test_a_fault_in_a_kernel(fault: str, why: str) -> None:
    with faulty_server(fault, "--engine-timeout", "1", "--log-format", "json") as process:
        check_that_all_are_told_and_it_serves_again(process)
        assert why in process.log
        assert "in run_loop" in process.log  # where the threads were
        assert all(line.startswith('{"time": ') for line in process.lines)
        assert "Once" not in process.log


def test_an_unknown_fault_ends_the_start() -> None:
    with pytest.raises(AssertionError, match=r"it must be {segv\|abort\|hang\|throw}@STEP"), faulty_server("fire@1"):
        pass
