"""Measures a server of our own over HTTP: decode with one stream, prefill, and sixteen streams at once.

    python bench/load.py [flags of octavo serve]

Starts the server on a free port and ends it afterwards. Prompts are random token ids, so that nothing is tokenized and
no prefix is shared. Standard library only; it knows nothing of octavo's insides.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

LOWEST_ID, HIGHEST_ID = 1_000, 30_000  # ordinary words in any vocabulary that is served here
GREETING = re.compile(r"octavo serves '(?P<model>.+)' at (?P<url>http://\S+)/v1")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    streams: int  # at once
    requests: int
    prompt: int  # tokens
    output: int  # tokens


CASES = (
    Case("decode, 1 stream", streams=1, requests=4, prompt=128, output=256),
    Case("prefill 1024", streams=1, requests=5, prompt=1024, output=1),
    Case("16 streams", streams=16, requests=48, prompt=128, output=128),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since some beginning."""

    start: float
    first_token: float
    end: float


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    model: str

    async def complete(self, prompt: list[int], output: int) -> Timing:
        """One streamed completion of exactly `output` tokens. Raises RuntimeError with the server's words."""
        ask = {"model": self.model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        body = json.dumps(ask | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(self.host, self.port)
        start = time.perf_counter()
        writer.write(head.encode() + body)
        status = await reader.readline()
        first = 0.0
        reply = bytearray()
        async for line in reader:
            if not first and line.startswith(b"data:"):
                first = time.perf_counter()
            reply += line
        writer.close()
        if b" 200 " not in status or b"[DONE]" not in reply or b'"error"' in reply:
            raise RuntimeError(f"{status.decode().strip()}: {reply[-400:].decode(errors='replace')}")
        return Timing(start, first, time.perf_counter())

    async def run(self, case: Case, rng: random.Random) -> list[Timing]:
        prompts = [[rng.randint(LOWEST_ID, HIGHEST_ID) for _ in range(case.prompt)] for _ in range(case.requests)]
        timings: list[Timing] = []

        async def stream() -> None:
            while prompts:
                timings.append(await self.complete(prompts.pop(), case.output))

        await asyncio.gather(*(stream() for _ in range(case.streams)))
        return timings


def report(case: Case, timings: list[Timing]) -> str:
    to_first = [t.first_token - t.start for t in timings]
    if case.output == 1:
        rate = f"{case.prompt / statistics.median(to_first):8.0f} prompt tok/s"
    elif case.streams == 1:
        rate = f"{statistics.median((case.output - 1) / (t.end - t.first_token) for t in timings):8.1f} tok/s"
    else:
        wall = max(t.end for t in timings) - min(t.start for t in timings)
        rate = f"{len(timings) * case.output / wall:8.1f} tok/s, prompts included"
    return f"{case.name:18} first token {statistics.median(to_first) * 1e3:7.1f} ms (median)   {rate}"


async def measure(server: Server) -> None:
    rng = random.Random(0)
    await server.run(Case("warm-up", streams=2, requests=4, prompt=64, output=16), rng)
    for case in CASES:
        print(report(case, await server.run(case, rng)), flush=True)


def main(flags: list[str]) -> int:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--disable-uvicorn-access-log", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        greeting = next((found for line in process.stdout if (found := GREETING.search(line))), None)
        if greeting is None:
            return process.wait() or 1  # it has said why
        print(f"{greeting['model']}: ready after {time.perf_counter() - begin:.2f} s")
        url = urlsplit(greeting["url"])
        assert url.hostname
        assert url.port
        asyncio.run(measure(Server(url.hostname, url.port, greeting["model"])))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
