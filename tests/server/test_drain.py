"""How a server ends: what runs has some time, what is new goes elsewhere, and a second signal does not wait."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.server.harness import LONG_REPLY, ServerProcess, children_of, fake_server, metric, read_slowly, wait_until

TWO_SECONDS = 600  # tokens of 3 ms
FOR_EVER = 1000


@pytest.fixture
def patient_server() -> Iterator[ServerProcess]:
    yield from fake_server(0.003, flags=["--shutdown-timeout", "20"])


@pytest.fixture
def hasty_server() -> Iterator[ServerProcess]:
    yield from fake_server(0.005, flags=["--shutdown-timeout", "0.3"])


def ask(server: ServerProcess, max_tokens: int) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": max_tokens}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def reason(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["finish_reason"])


@contextmanager
def running(server: ServerProcess, *lengths: int) -> Iterator[list[Future[httpx.Response]]]:
    """Requests for so many tokens, all of them running; the first signal has been sent."""
    with ThreadPoolExecutor(len(lengths)) as pool:
        replies = [pool.submit(ask, server, length) for length in lengths]
        wait_until(lambda: metric(server, "num_requests_running") == len(lengths))
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: "have" in server.log and "s to end" in server.log)
        yield replies


def test_running_requests_end_by_themselves_and_new_ones_are_sent_elsewhere(patient_server: ServerProcess) -> None:
    with running(patient_server, TWO_SECONDS, TWO_SECONDS) as replies:
        for path in ("/health", "/ready", "/ping"):
            assert httpx.get(patient_server.url + path).status_code == 503
        late = ask(patient_server, 1)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "stopping"
        assert late.headers["connection"] == "close"
        assert httpx.get(f"{patient_server.url}/metrics").status_code == 200
        assert [reason(reply.result(10)) for reply in replies] == ["length", "length"]
    assert patient_server.popen.wait(5) == 0
    assert "2 running requests have 20 s to end" in patient_server.log
    assert "aborted" not in patient_server.log
    assert "Traceback" not in patient_server.log


def test_what_has_not_ended_in_time_is_aborted(hasty_server: ServerProcess) -> None:
    began = time.monotonic()
    with running(hasty_server, FOR_EVER, FOR_EVER) as replies:
        assert [reason(reply.result(10)) for reply in replies] == ["abort", "abort"]
    assert hasty_server.popen.wait(5) == 0
    assert 0.3 <= time.monotonic() - began < 10
    assert "2 running requests are aborted" in hasty_server.log


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(patient_server: ServerProcess, second: signal.Signals) -> None:
    (engine,) = children_of(patient_server.popen.pid)
    with running(patient_server, FOR_EVER) as (reply,):
        began = time.monotonic()
        patient_server.popen.send_signal(second)
        assert reason(reply.result(10)) == "abort"
    assert patient_server.popen.wait(5) == 0
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_an_engine_that_dies_ends_the_wait_and_is_not_started_again(patient_server: ServerProcess) -> None:
    with running(patient_server, FOR_EVER) as (reply,):
        os.kill(patient_server.engine_pid(), signal.SIGKILL)
        assert reply.result(10).status_code == 500
    assert patient_server.popen.wait(5) == 0
    assert "SIGKILL" in patient_server.log
    assert "started again" not in patient_server.log


def test_an_idle_server_does_not_wait(patient_server: ServerProcess) -> None:
    began = time.monotonic()
    assert patient_server.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 10


def test_a_reply_that_is_read_slowly_has_its_time_too(patient_server: ServerProcess) -> None:
    host, port = patient_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(LONG_REPLY)
        wait_until(lambda: metric(patient_server, "generation_tokens_total") == 20_000)
        patient_server.popen.send_signal(signal.SIGTERM)
        began = time.monotonic()
        head, _, body = read_slowly(sock, 4e5).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert patient_server.popen.wait(5) == 0
    assert time.monotonic() - began > 1.5  # without a drain there is one second


def test_a_second_signal_does_not_wait_for_a_client_that_reads_nothing(patient_server: ServerProcess) -> None:
    host, port = patient_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(LONG_REPLY)
        wait_until(lambda: metric(patient_server, "generation_tokens_total") == 20_000)
        patient_server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert patient_server.popen.poll() is None
        assert patient_server.end(signal.SIGTERM) == 0
