"""A real server against many clients that behave in every way there is; then the books are compared.

    python bench/soak.py [--requests 10000] [--clients 48] [--seed 0] [--json FILE]

The built-in model with a pool so small that requests preempt each other. Clients complete, stream, call tools, want
JSON, leave in the middle, send nonsense, too much, or too slowly. At the end every request must have ended once, as its
client saw it and as /metrics counts it; no block may be held; a probe must always have said the same; and neither
process may have grown. Exit code 1 if any of this is not so. Standard library only; it knows nothing of octavo's
insides. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
GREETING = re.compile(r"octavo serves '(?P<model>.+)' at (?P<url>http://\S+)/v1")
MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE = 256, 32, 16
CLIENT_TIMEOUT = 4.0  # the server's, for slow bodies
FLAGS = (
    f"--max-model-len {MAX_MODEL_LEN} --num-gpu-blocks-override {NUM_BLOCKS} --block-size {BLOCK_SIZE} "
    f"--max-num-seqs 16 --max-num-batched-tokens 192 --client-timeout {CLIENT_TIMEOUT} --kv-cache-metrics "
    "--served-model-name soak --enable-auto-tool-choice --tool-call-parser hermes --disable-uvicorn-access-log"
).split()
START_SECONDS = 60
REPLY_SECONDS = 120  # within which whatever was asked must be answered
IDLE_SECONDS = 20  # within which an unused server must have become idle
MAX_DRIFT = 5e6  # bytes that a process may have grown since the warm-up
PARTS = 10  # in which the requests are sent, with a look at the memory after each
WARM_UP = 3  # parts: a heap grows until what large bodies tore into pieces is enough for the next ones
WINDOW = 3  # parts whose median is compared: what a heap holds goes up and down by some megabytes
OVERSIZE = (32 << 20) + 1
LOWEST_ID, HIGHEST_ID = 1_000, 30_000  # ordinary words
PROBE: dict[str, Any] = {
    "prompt": "The lighthouse keeper wrote in his book that",
    "max_tokens": 24,
    "temperature": 0,
    "logprobs": 2,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


class UnexpectedError(Exception):
    """The server did something else than it should."""


@dataclass(slots=True)
class Books:
    """What the clients counted of the requests that the engine took."""

    probe: list[Any]  # the choices that PROBE must always bring
    outcomes: Counter[str] = field(default_factory=Counter)  # by scenario and result
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0  # of those that were answered to the end, like the next two
    generation_tokens: int = 0
    cached_tokens: int = 0
    left: int = 0  # clients that left after their first event, so requests that must end as aborted
    left_early: int = 0  # that left before any reply: the server may have seen a request or not
    left_tokens: int = 0  # events that the former received
    faults: list[str] = field(default_factory=list)

    def answered(self, reasons: list[str], usage: dict[str, Any]) -> None:
        self.reasons.update("stop" if reason == "tool_calls" else reason for reason in reasons)
        self.prompt_tokens += usage["prompt_tokens"]
        self.generation_tokens += usage["completion_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of each event of a stream. Raises UnexpectedError if it does not end with [DONE], once."""
        frames = self.body.split(b"\n\n")
        if frames[-2:] != [b"data: [DONE]", b""] or self.body.count(b"[DONE]") != 1:
            raise UnexpectedError(f"the stream ends with {self.body[-200:]!r}")
        return [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-2]]

    def named_events(self) -> list[Any]:
        """The JSON of each event of a stream whose events have names, as those of Anthropic's API and of responses."""
        return [json.loads(line[6:]) for line in self.body.splitlines() if line.startswith(b"data: {")]


class Connection:
    """One client's connection, kept from request to request until somebody closes it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 24)
        return self._streams

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def ask(self, path: str, body: object | bytes, method: str = "POST") -> Reply:
        """The whole reply."""
        reader, writer = await self.open()
        writer.write(message(path, body, method))
        return await self.read(reader)

    async def read(self, reader: asyncio.StreamReader) -> Reply:
        status, headers = await read_head(reader)
        if headers.get("transfer-encoding") == "chunked":
            content = bytearray()
            while size := int(await reader.readline(), 16):
                content += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            content = bytearray(await reader.readexactly(int(headers["content-length"])))
        if headers.get("connection") == "close":
            self.close()
        return Reply(status, bytes(content))


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), {name.lower(): value for name, value in pairs}


def message(path: str, body: object | bytes, method: str = "POST") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@dataclass(frozen=True, slots=True)
class Client:
    """One of many: does one thing after the other on its own connection."""

    connection: Connection
    rng: random.Random
    books: Books

    def prompt(self, most: int = 100) -> list[int]:
        """Token ids; every third prompt begins like some others."""
        ids = [self.rng.randint(LOWEST_ID, HIGHEST_ID) for _ in range(self.rng.randint(1, most))]
        return [LOWEST_ID + self.rng.randint(0, 5)] * 48 + ids[:50] if self.rng.random() < 0.33 else ids

    def options(self) -> dict[str, Any]:
        some: dict[str, Any] = {
            "temperature": self.rng.choice([0, 0.7, 1, 2]),
            "top_p": self.rng.choice([1, 0.9]),
            "seed": self.rng.randint(0, 1000),
            "stop": self.rng.choice([None, "\n", [" the", "e "]]),
            "frequency_penalty": self.rng.choice([0, 0.5]),
            "min_p": self.rng.choice([0, 0.05]),
        }
        return {name: value for name, value in some.items() if self.rng.random() < 0.4}

    def messages(self) -> list[dict[str, str]]:
        word = "".join(self.rng.choices("abcdefghij", k=self.rng.randint(1, 30)))
        return [{"role": "user", "content": f"Say {word} \N{SNOWMAN}"}]

    async def answer(self, path: str, body: dict[str, Any], stream: bool) -> list[Any]:
        """The choices of a reply, or those of a stream's chunks; either is entered in the books."""
        if not stream:
            reply = self.expect(await self.connection.ask(path, body), 200).json()
            self.books.answered([choice["finish_reason"] for choice in reply["choices"]], reply["usage"])
            return list(reply["choices"])
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        events = self.expect(await self.connection.ask(path, body), 200).events()
        choices = [choice for event in events for choice in event["choices"]]
        ends = Counter(choice["index"] for choice in choices if choice["finish_reason"])
        if set(ends) != {choice["index"] for choice in choices} or set(ends.values()) != {1}:
            raise UnexpectedError(f"choices end so often: {ends}")
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        self.books.answered(reasons, events[-1]["usage"])
        return choices

    def expect(self, reply: Reply, *statuses: int) -> Reply:
        if reply.status not in statuses:
            raise UnexpectedError(f"{reply.status} where {statuses} was due: {reply.body[:300]!r}")
        if reply.status >= 400 and not reply.json()["error"]["message"]:
            raise UnexpectedError("an error without words")
        return reply

    # What clients do; each returns a word for what came of it

    async def complete(self) -> str:
        num_prompts = self.rng.choice([1, 1, 1, 2, 4])
        prompts = [self.prompt() for _ in range(num_prompts)]
        body = {"prompt": prompts if num_prompts > 1 else prompts[0], "max_tokens": self.rng.randint(1, 24)}
        if self.rng.random() < 0.2:
            body["logprobs"] = self.rng.randint(0, 5)
        stream = self.rng.random() < 0.6
        choices = await self.answer("/v1/completions", body | self.options(), stream)
        if {choice["index"] for choice in choices} != set(range(num_prompts)):
            raise UnexpectedError(f"{num_prompts} prompts were answered by {len(choices)} choices")
        return "stream" if stream else "whole"

    async def chat(self) -> str:
        body = {"messages": self.messages(), "max_tokens": self.rng.randint(1, 24), **self.options()}
        stream = self.rng.random() < 0.6
        await self.answer("/v1/chat/completions", body, stream)
        return "stream" if stream else "whole"

    async def call_tools(self) -> str:
        body = {"messages": self.messages(), "max_tokens": 16, "tools": TOOLS, "temperature": 1}
        await self.answer("/v1/chat/completions", body, self.rng.random() < 0.6)
        return "answered"

    async def want_json(self) -> str:
        shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        body = {"messages": self.messages(), "max_tokens": 60, "temperature": 1, "response_format": shape}
        (choice,) = await self.answer("/v1/chat/completions", body, stream=False)
        if choice["finish_reason"] != "stop":
            return "cut"
        if set(json.loads(choice["message"]["content"])) != {"ok", "kind"}:
            raise UnexpectedError(f"not of the schema: {choice['message']['content']}")
        return "valid"

    async def respond(self) -> str:
        body = {"input": self.messages()[0]["content"], "max_output_tokens": 16, "store": self.rng.random() < 0.3}
        if self.rng.random() < 0.5:
            reply = self.expect(await self.connection.ask("/v1/responses", body), 200).json()
        else:
            answer = self.expect(await self.connection.ask("/v1/responses", body | {"stream": True}), 200)
            reply = answer.named_events()[-1]["response"]
        usage = reply["usage"]
        self.books.answered(
            ["stop" if reply["status"] == "completed" else "length"],
            {
                "prompt_tokens": usage["input_tokens"],
                "completion_tokens": usage["output_tokens"],
                "prompt_tokens_details": usage["input_tokens_details"],
            },
        )
        return str(reply["status"])

    async def message(self) -> str:
        body = {"model": "soak", "messages": self.messages(), "max_tokens": 16, "stream": self.rng.random() < 0.5}
        answer = self.expect(await self.connection.ask("/v1/messages", body), 200)
        if body["stream"]:
            ending, last = answer.named_events()[-2:]
            if last != {"type": "message_stop"}:
                raise UnexpectedError(f"the stream ends with {last}")
            reply = ending["delta"] | ending
        else:
            reply = answer.json()
        usage = reply["usage"]
        cached = usage.get("cache_read_input_tokens") or 0
        self.books.answered(
            ["length" if reply["stop_reason"] == "max_tokens" else "stop"],
            {
                "prompt_tokens": usage["input_tokens"] + cached,
                "completion_tokens": usage["output_tokens"],
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        )
        return str(reply["stop_reason"])

    async def probe(self) -> str:
        """The same request, the same bytes, whatever else is running."""
        choices = await self.answer("/v1/completions", PROBE, stream=False)
        if choices != self.books.probe:
            raise UnexpectedError(f"{choices} in company, {self.books.probe} alone")
        return "same"

    async def leave(self) -> str:
        """Read some events of an endless answer, then go."""
        body = {"prompt": self.prompt(40), "max_tokens": 150, "ignore_eos": True, "stream": True}
        reader, writer = await self.connection.open()
        writer.write(message("/v1/completions", body))
        status, _ = await read_head(reader)
        if status != 200:
            raise UnexpectedError(f"{status} for a stream")
        events = 0
        wanted = self.rng.randint(1, 8)
        while events < wanted:
            events += (await reader.readline()).startswith(b"data: ")
        self.connection.close()
        self.books.left += 1
        self.books.left_tokens += events
        return "left"

    async def hang_up(self) -> str:
        """Go before any reply."""
        body = {"prompt": self.prompt(40), "max_tokens": 150, "ignore_eos": True}
        _, writer = await self.connection.open()
        writer.write(message("/v1/completions", body))
        await asyncio.sleep(self.rng.choice([0, 0.001, 0.02]))
        self.connection.close()
        self.books.left_early += 1
        return "left"

    async def ask_wrongly(self) -> str:
        path, body, statuses = self.rng.choice(WRONG)
        self.expect(await self.connection.ask(path, body), *statuses)
        return "refused"

    async def send_no_http(self) -> str:
        """The server says 400 if it can, and closes."""
        reader, writer = await self.connection.open()
        writer.write(self.rng.choice(NO_HTTP))
        received = await reader.read()
        self.connection.close()
        if not re.match(rb"HTTP/1.1 4\d\d ", received):
            raise UnexpectedError(f"nonsense was answered by {received[:100]!r}")
        return "refused"

    async def send_too_much(self) -> str:
        """A body beyond the limit, which is read and refused."""
        content = b'{"prompt": "' + b"x" * OVERSIZE
        self.expect(await self.connection.ask("/v1/completions", content), 413)
        return "refused"

    async def send_slowly(self) -> str:
        """In pieces, but in time; or never the last one, which is a 408."""
        body = {"prompt": self.prompt(), "max_tokens": 4}
        whole = message("/v1/completions", body)
        reader, writer = await self.connection.open()
        pieces = self.rng.randint(2, 5)
        size = len(whole) // pieces
        stalls = self.rng.random() < 0.3
        for first in range(0, len(whole) - (size if stalls else 0), size):
            writer.write(whole[first : min(first + size, len(whole) - stalls)])
            await asyncio.sleep(CLIENT_TIMEOUT / 20)
        reply = self.expect(await self.connection.read(reader), 408 if stalls else 200).json()
        if stalls:
            self.connection.close()
            return "cut off"
        self.books.answered([choice["finish_reason"] for choice in reply["choices"]], reply["usage"])
        return "whole"

    async def look_around(self) -> str:
        path, body, method = self.rng.choice(OTHERS)
        self.expect(await self.connection.ask(path, body, method), 200)
        return "200"


CHAT = [{"role": "user", "content": "x"}]
WRONG: list[tuple[str, object, tuple[int, ...]]] = [
    ("/v1/completions", {"prompt": "x", "temperature": 5}, (400,)),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, (400,)),
    ("/v1/completions", {"prompt": "x", "max_tokens": MAX_MODEL_LEN}, (400,)),
    ("/v1/completions", {"prompt": [LOWEST_ID] * (MAX_MODEL_LEN + 1)}, (400,)),
    ("/v1/completions", {"prompt": "word " * 100_000}, (400,)),
    ("/v1/completions", {"prompt": ["x", "y", [10**9]]}, (400,)),
    ("/v1/completions", {"prompt": []}, (400,)),
    ("/v1/completions", {"prompt": {"a": 1}}, (400,)),
    ("/v1/completions", {"prompt": "x", "top_p": 0}, (400,)),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, (400,)),
    ("/v1/completions", {"prompt": "x", "logprobs": 100_000}, (400,)),
    ("/v1/completions", {"prompt": "x", "stream": "yes"}, (400,)),
    ("/v1/completions", {"prompt": "x", "model": "another"}, (404,)),
    ("/v1/completions", b'{"prompt": "x"', (400,)),
    ("/v1/completions", b'{"prompt": "\xff\xfe"}', (400,)),
    ("/v1/completions", b"[" * 50_000, (400,)),
    ("/v1/completions", b"", (400,)),
    ("/v1/chat/completions", {"messages": "x"}, (400,)),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 1e40}, (400,)),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"deep": 1}}]}, (400,)),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, (400,)),
    ("/nowhere", {}, (404,)),
    ("/health", {}, (405,)),
]
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 is this TLS?\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"x" * 70_000,
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
]
OTHERS: list[tuple[str, object, str]] = [
    ("/tokenize", {"prompt": "some words, some more"}, "POST"),
    ("/detokenize", {"tokens": [1000, 2000]}, "POST"),
    ("/v1/models", b"", "GET"),
    ("/metrics", b"", "GET"),
    ("/health", b"", "GET"),
    ("/load", b"", "GET"),
]
# With weights; what is in NEEDS only where the server has it.
SCENARIOS: dict[str, tuple[Callable[[Client], Awaitable[str]], float]] = {
    "complete": (Client.complete, 320),
    "chat": (Client.chat, 200),
    "call_tools": (Client.call_tools, 50),
    "want_json": (Client.want_json, 30),
    "leave": (Client.leave, 120),
    "hang_up": (Client.hang_up, 40),
    "ask_wrongly": (Client.ask_wrongly, 90),
    "send_no_http": (Client.send_no_http, 30),
    "send_too_much": (Client.send_too_much, 2),
    "send_slowly": (Client.send_slowly, 20),
    "look_around": (Client.look_around, 30),
    "probe": (Client.probe, 20),
    "respond": (Client.respond, 40),
    "message": (Client.message, 40),
}
NEEDS = {  # what a server that has the scenario answers with 200
    "want_json": ("/v1/completions", {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}}),
    "respond": ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
    "message": ("/v1/messages", {"model": "soak", "messages": CHAT, "max_tokens": 1}),
}


class Server:
    """The server under test, seen from outside."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = popen
        self.log = log
        greeting = self._wait_for_greeting()
        url = urlsplit(greeting["url"])
        assert url.hostname
        assert url.port
        self.host, self.port = url.hostname, url.port

    def _wait_for_greeting(self) -> re.Match[str]:
        deadline = time.monotonic() + START_SECONDS
        while (found := GREETING.search(self.log.read_text())) is None:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise UnexpectedError(f"the server did not start: {self.log.read_text()}")
            time.sleep(0.05)
        return found

    def processes(self) -> dict[str, int]:
        """By name: that of the HTTP process, and the modules that its children run."""
        pid = self.popen.pid
        processes = {"http": pid}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            processes[words[words.index("-m") + 1]] = int(child)
        return processes

    def memory(self) -> dict[str, int]:
        """Bytes of memory that a process has filled itself; of files it counts only what neighbours cannot change."""
        sizes = {}
        for name, pid in self.processes().items():
            (line,) = (
                x for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if x.startswith("Anonymous:")
            )
            sizes[name] = int(line.split()[1]) << 10
        return sizes

    def connect(self) -> Connection:
        return Connection(self.host, self.port)

    async def ask(self, path: str, body: object, method: str = "POST") -> Reply:
        connection = self.connect()
        try:
            return await asyncio.wait_for(connection.ask(path, body, method), REPLY_SECONDS)
        finally:
            connection.close()

    async def metrics(self) -> dict[str, float]:
        """Samples of octavo's own, by name and reason, without histograms' buckets."""
        values = {}
        for line in (await self.ask("/metrics", b"", "GET")).body.decode().splitlines():
            if found := re.match(r"octavo:(\w+){(?!.*le=)(?:.*finished_reason=\"(\w+)\")?.*} (\S+)$", line):
                values[found[1] + (f" {found[2]}" if found[2] else "")] = float(found[3])
        return values

    async def settle(self) -> dict[str, float]:
        """The metrics once nothing runs. Raises UnexpectedError if that does not come."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            seen = await self.metrics()
            if seen["num_requests_running"] == seen["num_requests_waiting"] == 0:
                return seen
            if time.monotonic() > deadline:
                raise UnexpectedError(f"{seen['num_requests_running']} requests run though nobody waits for them")
            await asyncio.sleep(0.1)


async def scenarios_of(server: Server) -> dict[str, float]:
    """Names and weights of the scenarios that this server has."""
    found = {}
    for name, (_, weight) in SCENARIOS.items():
        if name not in NEEDS or (await server.ask(*NEEDS[name])).status == 200:
            found[name] = weight
    return found


async def run_clients(
    server: Server, weights: dict[str, float], count: int, clients: int, seed: int, books: Books
) -> None:
    """`count` requests by `clients` clients, each with its own random choices."""
    names = iter(random.Random(seed).choices(list(weights), list(weights.values()), k=count))

    async def work(i: int) -> None:
        client = Client(server.connect(), random.Random(f"{seed} {i}"), books)
        for name in names:
            try:
                came = await asyncio.wait_for(SCENARIOS[name][0](client), REPLY_SECONDS)
                books.outcomes[f"{name}: {came}"] += 1
            except Exception as error:
                books.outcomes[f"{name}: FAULT"] += 1
                books.faults.append(f"{name}: {type(error).__name__}: {error}")
                client.connection.close()
        client.connection.close()

    await asyncio.gather(*(work(i) for i in range(clients)))


def compare(books: Books, before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
    """Whatever the server counted in another way than the clients."""

    def check(name: str, low: float, high: float | None = None) -> Iterator[str]:
        value = after[name] - before.get(name, 0)
        if not low <= value <= (low if high is None else high):
            yield f"{name} grew by {value:g}, the clients counted {low:g}" + (f" to {high:g}" if high else "")

    requests = books.reasons.total()
    for reason in ("stop", "length"):
        yield from check(f"request_success_total {reason}", books.reasons[reason])
    yield from check("request_success_total abort", books.left, books.left + books.left_early)
    yield from check("request_success_total error", 0)
    everybody = after["request_prompt_tokens_count"] - before["request_prompt_tokens_count"]
    for name in ("request_generation_tokens", "e2e_request_latency_seconds", "request_params_max_tokens"):
        yield from check(f"{name}_count", everybody)
    yield from check(
        "time_to_first_token_seconds_count", requests + books.left, requests + books.left + books.left_early
    )
    tokens = after["generation_tokens_total"] - before["generation_tokens_total"]
    yield from check("request_generation_tokens_sum", tokens)
    first_tokens = after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"]
    yield from check("inter_token_latency_seconds_count", tokens - first_tokens)
    most = 150 * (books.left + books.left_early)  # tokens of those who left, had they stayed
    yield from check(
        "generation_tokens_total", books.generation_tokens + books.left_tokens, books.generation_tokens + most
    )
    most = 100 * (books.left + books.left_early)  # of their prompts
    yield from check("prompt_tokens_total", books.prompt_tokens, books.prompt_tokens + most)
    yield from check("prompt_tokens_cached_total", books.cached_tokens, books.cached_tokens + most)
    for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
        if after[name] != 0:
            yield f"{name} is {after[name]:g} on an idle server"


async def faults_of_pool(server: Server) -> list[str]:
    """As many requests of full length as the pool holds, at once: they fit only if every block is free."""
    before = await server.settle()
    fit = NUM_BLOCKS * BLOCK_SIZE // MAX_MODEL_LEN
    prompts = [[LOWEST_ID + i] * (MAX_MODEL_LEN - 20) for i in range(fit)]
    body = {"prompt": prompts, "max_tokens": 20, "ignore_eos": True}
    reply = await server.ask("/v1/completions", body)
    after = await server.settle()
    faults = []
    if reply.status != 200 or [c["finish_reason"] for c in reply.json()["choices"]] != ["length"] * fit:
        faults.append(f"{fit} requests of full length were not answered: {reply.body[:200]!r}")
    if after["num_preemptions_total"] != before["num_preemptions_total"]:
        faults.append(f"{fit} requests of full length did not fit into the pool: blocks are lost")
    return faults


async def warm_up(server: Server, rng: random.Random) -> None:
    """What a process takes once must not look like a leak later.

    The tokenizer remembers 10,000 words, some 4 MB; each thread that tokenizes has some memory of its own; and the heap
    is once as large as large bodies make it.
    """
    await server.ask("/v1/completions", b"x" * OVERSIZE)
    words = ("".join(rng.choices("abcdefghij", k=10)) for _ in range(12_000))
    await server.ask("/tokenize", {"prompt": " ".join(words)})


async def soak(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """All of it; returns what there is to tell. `faults` is empty if all is well."""
    weights = await scenarios_of(server)
    await asyncio.gather(*(warm_up(server, random.Random(i)) for i in range(7)))
    books = Books((await server.ask("/v1/completions", PROBE)).json()["choices"])
    before = await server.settle()
    began = time.monotonic()
    memory = []
    for part in range(PARTS):
        count = args.requests * (part + 1) // PARTS - args.requests * part // PARTS
        await run_clients(server, weights, count, args.clients, PARTS * args.seed + part, books)
        after = await server.settle()
        memory.append(server.memory())
    seconds = time.monotonic() - began

    faults = [*books.faults, *compare(books, before, after), *await faults_of_pool(server)]
    drift = {name: drift_of([sizes[name] for sizes in memory if name in sizes]) for name in memory[-1]}
    faults += [f"process {name} grew by {grown / 1e6:.1f} MB" for name, grown in drift.items() if grown > MAX_DRIFT]
    if after["num_preemptions_total"] == before["num_preemptions_total"]:
        faults.append("no request was ever preempted: the pool is too large for this test")
    if books.outcomes.total() != args.requests:
        faults.append(f"{args.requests - books.outcomes.total()} requests came to no end")
    if "Traceback" in (log := server.log.read_text()):
        faults.append("there is a traceback in the log: " + log[log.index("Traceback") :][:2000])
    counted = {name: after[name] - before.get(name, 0) for name in after if re.search(r"_total( |$)", name)}
    return {
        "requests": args.requests,
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(books.outcomes.items())),
        "metrics": counted,
        "memory": memory,
        "drift": drift,
        "faults": faults,
    }


def drift_of(sizes: list[int]) -> float:
    """By how many bytes a process grew from the first parts after the warm-up to the last ones."""
    if len(sizes) < WARM_UP + WINDOW:
        return 0.0
    return statistics.median(sizes[-WINDOW:]) - statistics.median(sizes[WARM_UP : WARM_UP + WINDOW])


def show(report: dict[str, Any]) -> None:
    print(f"{report['requests']:,} requests of {report['clients']} clients in {report['seconds']:.0f} s")
    for title in ("outcomes", "metrics"):
        print(f"\n{title}")
        for name, value in report[title].items():
            print(f"  {name:40} {value:12,.0f}")
    print(f"\nmemory in MB, after each of {PARTS} parts")
    for name in report["memory"][-1]:
        print(f"  {name:26}" + "".join(f"{sizes.get(name, 0) / 1e6:7.1f}" for sizes in report["memory"]), end="")
        print(f"; grew by {report['drift'][name] / 1e6:.1f}")
    print(f"\n{len(report['faults'])} faults")
    for fault in report["faults"][:20]:
        print(f"  {fault}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=48, help="at once (48)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *FLAGS]
            popen = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            report = asyncio.run(soak(Server(popen, log), args))
        finally:
            popen.send_signal(signal.SIGINT)
            popen.wait(30)
    show(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
