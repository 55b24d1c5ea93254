"""Starts servers as a user would, in processes of their own, and ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai

from octavo.server.settings import KEY_VARIABLES

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in KEY_VARIABLES},
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
}
START_SECONDS = 30


def fake_engine_command(step_seconds: float = 0.0) -> list[str]:
    return [sys.executable, "-m", "tests.server.fake_engine_process", str(step_seconds)]


@dataclass
class ServerProcess:
    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # of its standard output and error
    url: str = ""

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def engine_pid(self) -> int:
        (pid,) = children_of(self.popen.pid)
        return pid

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Its exit code after a signal."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(10)

    def loop_seconds(self) -> float:
        """Processor time of its main thread, where the event loop runs: what it kept from others."""
        fields = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def server(command: Sequence[str]) -> Iterator[ServerProcess]:
    """A server that has said its URL."""
    popen = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    process = ServerProcess(popen)
    ready = threading.Event()

    def read() -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            process.lines.append(line)
            if match := re.search(r"at ((?:https?://|unix:)[^\s\"]+)/v1", line):
                process.url = match[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_SECONDS), "the server said nothing"
        assert process.url, process.log
        yield process
    finally:
        process.end()
        reader.join(5)
        assert popen.stdout is not None
        popen.stdout.close()


def fake_server(step_seconds: float = 0.0, port: int = 0, flags: Sequence[str] = ()) -> Iterator[ServerProcess]:
    with server(fake_server_command(step_seconds, port, flags)) as process:
        yield process


def fake_server_command(step_seconds: float = 0.0, port: int = 0, flags: Sequence[str] = ()) -> list[str]:
    return [sys.executable, "-m", "tests.server.fake_server", str(port), str(step_seconds), *flags]


def openai_client(process: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=20)


def metric(process: ServerProcess, name: str) -> float:
    """The value of a metric, summed over its labels."""
    with urllib.request.urlopen(f"{process.url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    values = [line.rpartition(" ")[2] for line in lines if re.match(rf"octavo:{name}[{{ ]", line)]
    assert values, f"no metric octavo:{name}"
    return sum(map(float, values))


_CONTENT = json.dumps({"prompt": ["x" * 500] * 40, "max_tokens": 500, "logprobs": 3}).encode()
LONG_REPLY = (  # a request for 20,000 tokens in one reply of megabytes, after which the connection is closed
    b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(_CONTENT) + _CONTENT
)


def read_slowly(sock: socket.socket, bytes_a_second: float = 1.5e6) -> bytes:
    """All that comes until the server closes, at about that speed."""
    received = b""
    while chunk := sock.recv(1 << 16):
        received += chunk
        time.sleep(len(chunk) / bytes_a_second)
    return received


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
