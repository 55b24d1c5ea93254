"""Measures what the HTTP process of octavo spends on a token: its own CPU time for each 1,000 streamed tokens.

    python bench/overhead.py [--streams 32] [--tokens 100] [--rounds 5] [--real] [--json FILE]

The engine is the tests' echo, whose steps sleep, so that other work on the machine hardly matters; --real takes
`octavo serve` with its built-in model. Linux only: the time is the scheduler's own, in nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
GREETING = re.compile(r" at (?P<url>http://\S+)/v1")
STEP_SECONDS = 0.02
IDLE_SECONDS = 2
ROUTES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "overhead of a completion " * 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "overhead of a chat " * 8}]},
}


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def stream(host: str, port: int, path: str, tokens: int) -> int:
    """One streamed answer; returns the number of its events with text. Raises RuntimeError if it is not whole."""
    ask = ROUTES[path] | {"max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body = json.dumps(ask).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    reply = await reader.read()
    writer.close()
    if b"200 OK" not in reply[:40] or b"data: [DONE]" not in reply:
        raise RuntimeError(reply[-400:].decode(errors="replace"))
    return reply.count(b"data: {")


async def measure(host: str, port: int, pid: int, args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds per 1,000 tokens by route, and the share of a core that an idle server takes."""
    figures = {}
    for path in ROUTES:
        await asyncio.gather(*(stream(host, port, path, 20) for _ in range(args.streams)))  # warm-up
        costs = []
        for _ in range(args.rounds):
            cpu, wall = cpu_seconds(pid), time.perf_counter()
            await asyncio.gather(*(stream(host, port, path, args.tokens) for _ in range(args.streams)))
            wall = time.perf_counter() - wall
            costs.append((cpu_seconds(pid) - cpu) / (args.streams * args.tokens) * 1000)
        figures[path] = statistics.median(costs)
        rate = args.streams * args.tokens / wall
        spread = f"{min(costs):.3f} to {max(costs):.3f}"
        print(
            f"{path:22} {args.streams} streams, {rate:5.0f} tok/s: {figures[path]:.3f} CPU s "
            f"per 1,000 tokens (median of {args.rounds}, {spread})",
            flush=True,
        )
    cpu = cpu_seconds(pid)
    await asyncio.sleep(IDLE_SECONDS)
    figures["idle"] = (cpu_seconds(pid) - cpu) / IDLE_SECONDS
    print(f"idle: {figures['idle']:.2%} of a core")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream (100)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--real", action="store_true", help="octavo's own engine instead of the echo")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    fake = ["-m", "tests.server.fake_server", "0", str(STEP_SECONDS)]
    real = ["-m", "octavo", "serve", "--port", "0"]
    command = [sys.executable, *(real if args.real else fake), "--disable-uvicorn-access-log"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        greeting = next((found for line in process.stdout if (found := GREETING.search(line))), None)
        if greeting is None:
            return process.wait() or 1  # it has said why
        url = urlsplit(greeting["url"])
        assert url.hostname
        assert url.port
        figures = asyncio.run(measure(url.hostname, url.port, process.pid, args))
        if args.json:
            Path(args.json).write_text(json.dumps(figures))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
