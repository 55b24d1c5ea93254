"""How a server starts, ends, and outlives its engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import openai
import pytest

from tests.server.fake_engine import CRASH, HANG, MODEL_NAME
from tests.server.harness import (
    ENVIRONMENT,
    ROOT,
    ServerProcess,
    children_of,
    fake_server,
    metric,
    openai_client,
    wait_until,
)

USER = [{"role": "user", "content": "hello"}]


def stream_to_its_end(server: ServerProcess) -> tuple[str, str | None]:
    """What a streaming client got: text, and the finish reason or the error."""
    text = ""
    try:
        for chunk in openai_client(server).chat.completions.create(model=MODEL_NAME, messages=USER, stream=True):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason
    except openai.APIError as error:
        return text, error.message
    return text, reason


def finished_by(server: ServerProcess) -> dict[str, float]:
    """How many requests ended, for each reason that there was."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r'octavo:request_success_total{.*finished_reason="(\w+)".*} (.*)', text)
    return {reason: float(number) for reason, number in found if float(number)}


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def has_restarted(server: ServerProcess, times: int) -> bool:
    return metric(server, "engine_restarts_total") == times and httpx.get(f"{server.url}/health").status_code == 200


def first_refusal(server: ServerProcess, route: str, body: dict[str, object] | None = None) -> httpx.Response:
    """Asks until an answer is 503; the engine may be back before whoever looks once has looked."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        reply = httpx.post(server.url + route, json=body) if body else httpx.get(server.url + route)
        if reply.status_code == 503:
            return reply
        time.sleep(0.01)
    raise AssertionError(f"{route} was never refused")


def test_a_killed_engine_is_told_to_every_client_at_once_and_to_health(own_server: ServerProcess) -> None:
    for restarts in (1, 2):  # so that the third has to wait for a second, and we have time to look
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        wait_until(partial(has_restarted, own_server, restarts))
    with ThreadPoolExecutor(13) as pool:
        streams = [pool.submit(stream_to_its_end, own_server) for _ in range(10)]
        whole = pool.submit(
            httpx.post, f"{own_server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 1000}, timeout=20
        )
        wait_until(lambda: metric(own_server, "num_requests_running") == 11)
        wait_until(lambda: metric(own_server, "generation_tokens_total") > 300)
        red = pool.submit(first_refusal, own_server, "/health")
        refused = pool.submit(first_refusal, own_server, "/v1/completions", {"prompt": "abc", "max_tokens": 1})
        killed_at = time.monotonic()
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            text, error = stream.result(20)
            assert text.startswith("user")
            assert error is not None
            assert "engine process ended" in error
        reply = whole.result(20)
        assert time.monotonic() - killed_at < 10
        assert red.result(20).status_code == 503
        late = refused.result(20)
    assert reply.status_code == 500
    assert reply.json()["error"].items() >= {"type": "server_error", "code": "engine_dead"}.items()
    assert late.json()["error"].items() >= {"type": "server_error", "code": "engine_unavailable"}.items()
    assert late.headers["retry-after"] in ("1", "2")
    assert metric(own_server, "num_requests_running") == metric(own_server, "kv_cache_usage_perc") == 0
    assert metric(own_server, "generation_tokens_total") > 300
    wait_until(lambda: httpx.get(f"{own_server.url}/health").status_code == 200)
    assert metric(own_server, "generation_tokens_total") > 300
    assert finished_by(own_server)["error"] == 11
    assert metric(own_server, "engine_restarts_total") == 3
    assert stream_to_its_end(own_server)[1] == "length"
    assert "was killed by SIGKILL" in own_server.log
    assert "11 requests were running" in own_server.log
    assert own_server.end() == 0


def test_an_engine_that_crashes_in_a_step_is_told_to_its_clients(own_server: ServerProcess) -> None:
    reply = httpx.post(f"{own_server.url}/v1/completions", json={"prompt": CRASH.decode()})
    assert reply.status_code == 500
    assert "RuntimeError" in reply.json()["error"]["message"]
    assert httpx.get(f"{own_server.url}/health").status_code == 503
    wait_until(lambda: httpx.get(f"{own_server.url}/health").status_code == 200)
    assert "ended with exit code 1 (RuntimeError: crashed on purpose); 1 requests were running" in own_server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_within_two_seconds_with_code_0_and_no_orphan(
    own_server: ServerProcess, number: signal.Signals
) -> None:
    engine = own_server.engine_pid()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(stream_to_its_end, own_server)
        wait_until(lambda: metric(own_server, "num_requests_running") == 1)
        began = time.monotonic()
        assert own_server.end(number) == 0
        assert time.monotonic() - began < 2
        assert stream.result(5)[1] == "abort"
    assert is_gone(engine)
    assert "Traceback" not in own_server.log
    assert "Error" not in own_server.log


def test_an_idle_server_ends_on_a_signal_even_with_a_connection_open(own_server: ServerProcess) -> None:
    with httpx.Client() as client:
        client.get(f"{own_server.url}/health")
        began = time.monotonic()
        assert own_server.end() == 0
    assert time.monotonic() - began < 2


def test_a_request_that_is_still_coming_when_the_server_ends_is_told_so(own_server: ServerProcess) -> None:
    host, port = own_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert httpx.get(f"{own_server.url}/health").status_code == 200
        own_server.popen.send_signal(signal.SIGTERM)
        reply = b"".join(iter(lambda: sock.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 503")
    assert b"the server is stopping" in reply
    assert own_server.popen.wait(5) == 0
    assert "Traceback" not in own_server.log


@pytest.mark.parametrize("prompt", ["abc", HANG.decode()])
def test_a_killed_server_leaves_no_engine_behind(own_server: ServerProcess, prompt: str) -> None:
    engine = own_server.engine_pid()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{own_server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1000}, timeout=0.3)
    assert own_server.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: is_gone(engine))


def test_an_idle_server_uses_no_cpu(own_server: ServerProcess) -> None:
    pids = (own_server.popen.pid, own_server.engine_pid())

    def ticks_and_switches() -> list[int]:
        values = []
        for pid in pids:
            fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()  # noqa: SIM115
            status = open(f"/proc/{pid}/status").read()  # noqa: SIM115
            values += [int(fields[11]) + int(fields[12]), int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])]
        return values

    time.sleep(0.3)
    before = ticks_and_switches()
    time.sleep(1)
    ticks, wakeups, engine_ticks, engine_wakeups = (b - a for a, b in zip(before, ticks_and_switches(), strict=True))
    assert ticks + engine_ticks == 0
    assert wakeups + engine_wakeups <= 2


def failing_start(port: int, model: str = "echo") -> str:
    """The standard error of a server that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.fake_server", str(port), "0", model],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    return done.stderr


def test_warnings_of_both_processes_are_said_at_the_start(quick_server: ServerProcess) -> None:
    for warning in ("this tokenizer only knows bytes", "this engine only echoes"):
        assert f"octavo: warning: {warning}\n" in quick_server.log


def test_a_port_in_use_is_one_clear_line_before_any_model_is_loaded(quick_server: ServerProcess) -> None:
    port = int(quick_server.url.rpartition(":")[2])
    error = failing_start(port, "x.broken")
    assert error == f"octavo: port {port} is in use on 127.0.0.1: stop what uses it, or choose another with --port\n"


def test_a_model_that_cannot_be_loaded_is_one_clear_line() -> None:
    assert failing_start(0, "x.broken") == "octavo: x.broken is not a GGUF file: its first bytes are 'NOPE'\n"


def test_a_port_that_cannot_be_is_one_clear_line() -> None:
    assert "between 0 and 65535" in failing_start(70000)


def test_a_signal_while_the_model_loads_ends_the_server_cleanly() -> None:
    slow_start = [sys.executable, "-m", "tests.server.fake_server", "0", "0", "echo.slow"]
    popen = subprocess.Popen(slow_start, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: bool(children_of(popen.pid)))
    (engine,) = children_of(popen.pid)
    time.sleep(0.7)  # the handlers are in place by now, and the model takes a minute
    popen.send_signal(signal.SIGTERM)
    output, _ = popen.communicate(timeout=5)
    assert popen.returncode == 0
    assert output == b""
    assert is_gone(engine)


def test_a_server_that_may_not_restart_its_engine_ends_with_it() -> None:
    for server in fake_server(flags=["--max-engine-restarts", "0"]):
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": CRASH.decode()}).status_code == 500
        assert server.popen.wait(5) == 1
        assert "the engine failed 1 times in a row: the server ends" in server.log
