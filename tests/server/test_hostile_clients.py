"""Clients that send too much, too slowly, or never read: each is cut off, and nobody else notices."""

from __future__ import annotations

import json
import random
import resource
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from octavo.server.connection import MAX_PIPELINED
from octavo.server.errors import ApiError
from octavo.server.service import BodyMemory
from tests.server.harness import LONG_REPLY, ServerProcess, fake_server, metric, read_slowly, wait_until

TIMEOUT = 0.8  # seconds that this server gives a client
CONNECTIONS = 40
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def strict_server() -> Iterator[ServerProcess]:
    flags = ["--client-timeout", str(TIMEOUT), "--limit-concurrency", str(CONNECTIONS)]
    flags += ["--h11-max-incomplete-event-size", "4096", "--h11-max-header-count", "20"]
    yield from fake_server(0.0, flags=flags)


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def rest(sock: socket.socket) -> bytes:
    """All that still comes until the server closes."""
    received = b""
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def bytes_taken(sock: socket.socket, chunk: bytes, pause: float = 0.0) -> int:
    """How many bytes the server takes, chunk by chunk, before it closes."""
    sent = 0
    try:
        while sent < 64 << 20:
            sock.sendall(chunk)
            sent += len(chunk)
            time.sleep(pause)
    except ConnectionError:
        pass
    return sent


def refusal(sock: socket.socket) -> tuple[int, str]:
    """Status and message of the error that the server sends before it closes."""
    head, _, body = rest(sock).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["message"]


def is_served(server: ServerProcess) -> bool:
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}, timeout=5)
    return reply.status_code == 200 and reply.json()["choices"][0]["text"] == "abc"


def memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET /health HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nnot a size\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_a_400_as_json(strict_server: ServerProcess, rubbish: bytes) -> None:
    with connect(strict_server) as sock:
        sock.sendall(rubbish)
        status, message = refusal(sock)
    assert status == 400
    assert "not valid HTTP" in message


@pytest.mark.parametrize(
    ("head", "limit"),
    [
        (b"GET /health HTTP/1.1\r\nA: " + b"x" * 5000 + b"\r\n\r\n", "4,096 bytes"),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", "4,096 bytes"),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 21 + b"\r\n", "20 headers"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"A: b\r\n" * 21 + b"\r\n", "20 headers"),
    ],
)
def test_headers_beyond_a_limit_get_a_431_that_says_it(strict_server: ServerProcess, head: bytes, limit: str) -> None:
    with connect(strict_server) as sock:
        sock.sendall(head)
        status, message = refusal(sock)
    assert status == 431
    assert limit in message


def test_a_header_without_an_end_is_not_collected(strict_server: ServerProcess) -> None:
    before = memory_of(strict_server.popen.pid)
    with connect(strict_server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nA: ")
        assert bytes_taken(sock, b"x" * 65536) < 16 << 20
    assert memory_of(strict_server.popen.pid) - before < 8 << 20
    assert is_served(strict_server)


def test_heads_that_trickle_are_cut_off_while_others_are_served(strict_server: ServerProcess) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(strict_server)) for _ in range(20)]
        began = time.monotonic()
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert is_served(strict_server)
        while time.monotonic() - began < 0.7 * TIMEOUT:
            for sock in socks:
                sock.sendall(b"A: b\r\n")
            time.sleep(TIMEOUT / 10)
        for sock in socks:
            status, message = refusal(sock)
            assert status == 408
            assert "0.8 s" in message
        assert time.monotonic() - began < 3 * TIMEOUT
    assert is_served(strict_server)


def test_a_connection_that_says_nothing_is_closed_without_a_word(strict_server: ServerProcess) -> None:
    with connect(strict_server) as sock:
        began = time.monotonic()
        assert rest(sock) == b""
        assert TIMEOUT * 0.8 < time.monotonic() - began < 3 * TIMEOUT


def test_blank_lines_do_not_keep_a_used_connection_open(strict_server: ServerProcess) -> None:
    with connect(strict_server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        bytes_taken(sock, b"\r\n", pause=TIMEOUT / 10)
        assert time.monotonic() - began < 3 * TIMEOUT


@pytest.mark.parametrize("framing", [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_body_that_trickles_is_cut_off(strict_server: ServerProcess, framing: bytes) -> None:
    piece = b"1\r\na\r\n" if b"chunked" in framing else b"a"
    with connect(strict_server) as sock:
        began = time.monotonic()
        sock.sendall(POST + framing)
        while time.monotonic() - began < 0.7 * TIMEOUT:
            sock.sendall(piece)
            time.sleep(TIMEOUT / 10)
        status, message = refusal(sock)
    assert status == 408
    assert "body" in message
    assert time.monotonic() - began < 3 * TIMEOUT
    assert "Traceback" not in strict_server.log


def test_a_large_body_may_take_long_if_it_keeps_coming(strict_server: ServerProcess) -> None:
    content = json.dumps({"prompt": "abc", "max_tokens": 3}).encode() + b" " * 4_000_000

    def pieces() -> Iterator[bytes]:
        step = len(content) // 8 + 1
        for start in range(0, len(content), step):
            time.sleep(TIMEOUT / 3)
            yield content[start : start + step]

    assert httpx.post(f"{strict_server.url}/v1/completions", content=pieces(), timeout=10).status_code == 200


def test_a_client_that_never_reads_its_stream_is_cut_off_and_its_request_ended(strict_server: ServerProcess) -> None:
    # Each token brings its prompt's ids in no chunk but the first; many prompts make a stream that no buffer holds.
    body = {"prompt": ["x" * 500] * 64, "max_tokens": 500, "stream": True, "logprobs": 3, "return_token_ids": True}
    content = json.dumps(body).encode()
    before = memory_of(strict_server.popen.pid)
    with connect(strict_server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        wait_until(lambda: "did not read its reply" in strict_server.log)
        assert memory_of(strict_server.popen.pid) - before < 100 << 20
        assert is_served(strict_server)
        wait_until(lambda: metric(strict_server, "num_requests_running") == 0)
        wait_until(lambda: httpx.get(f"{strict_server.url}/load").json() == {"server_load": 0})
    assert "Traceback" not in strict_server.log


def test_a_slow_reader_of_a_whole_reply_is_waited_for_as_long_as_it_reads(strict_server: ServerProcess) -> None:
    began = time.monotonic()
    with connect(strict_server) as sock:
        sock.sendall(LONG_REPLY)
        head, _, reply = read_slowly(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(reply)["usage"]["completion_tokens"] == 20_000
    assert time.monotonic() - began > TIMEOUT


@pytest.fixture
def small_server() -> Iterator[ServerProcess]:
    """Four connections, steps of 10 ms."""
    yield from fake_server(0.01, flags=["--limit-concurrency", "4"])


def test_idle_connections_beyond_the_limit_make_room_for_new_ones(small_server: ServerProcess) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(small_server)) for _ in range(10)]
        assert is_served(small_server)
        began = time.monotonic()
        assert rest(idle[0]) == b""  # the oldest had to go
        assert time.monotonic() - began < 5  # long before its time was over
        assert len(select.select(idle, [], [], 0)[0]) >= 7


def test_beyond_the_limit_of_busy_connections_a_client_is_told_to_come_again(small_server: ServerProcess) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 1000, "stream": True}).encode()
    with ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(connect(small_server))
            sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
        reply = httpx.get(f"{small_server.url}/health")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "overloaded"
        assert reply.headers["retry-after"] == "1"
    wait_until(lambda: httpx.get(f"{small_server.url}/health").status_code == 200)


def test_a_client_that_sends_request_upon_request_without_reading_is_cut_off(strict_server: ServerProcess) -> None:
    with connect(strict_server) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * (MAX_PIPELINED + 10))
        assert rest(sock).count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1
    assert is_served(strict_server)


def test_a_few_requests_in_one_go_are_all_answered_in_order(strict_server: ServerProcess) -> None:
    with connect(strict_server) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 4 + b"GET /load HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while b"server_load" not in received:
            received += sock.recv(4096)
    assert received.count(b'{"version"') == 4


def test_who_leaves_after_sending_several_requests_leaves_none_running(steady_server: ServerProcess) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 1000, "stream": True}).encode()
    with connect(steady_server) as sock:
        sock.sendall((POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 3)
        assert sock.recv(20).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    wait_until(lambda: httpx.get(f"{steady_server.url}/load").json() == {"server_load": 0})
    assert metric(steady_server, "num_requests_running") == 0
    assert time.monotonic() - began < 3  # it would run for five


def test_rubbish_behind_a_request_never_mixes_with_its_reply(strict_server: ServerProcess) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    with connect(strict_server) as sock:
        sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"\x00\x01\r\n\r\n")
        assert b"HTTP/1.1 400" not in rest(sock)
    assert is_served(strict_server)


def test_a_broken_body_gets_one_reply_though_its_route_needs_none(strict_server: ServerProcess) -> None:
    with connect(strict_server) as sock:
        sock.sendall(b"POST /ping HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n")
        status, _ = refusal(sock)
    assert status == 400
    wait_until(lambda: "POST /ping" in strict_server.log)
    assert is_served(strict_server)
    assert "Traceback" not in strict_server.log


def test_an_upgrade_that_nobody_offers_is_answered_as_plain_http(strict_server: ServerProcess) -> None:
    ask = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
    with connect(strict_server) as sock:
        sock.sendall(ask)
        received = rest(sock)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in received


def test_many_large_bodies_at_once_are_bounded_together_and_small_ones_always_pass(quick_server: ServerProcess) -> None:
    before = memory_of(quick_server.popen.pid)
    size = 30 << 20
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(quick_server)) for _ in range(12)]  # 360 MiB, of which 256 may stay
        for sock in socks:
            sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % size + b" " * (size - 10))
        wait_until(lambda: len(select.select(socks, [], [], 0)[0]) >= 4)
        assert memory_of(quick_server.popen.pid) - before < 330 << 20
        assert is_served(quick_server)
        refused = select.select(socks, [], [], 0)[0]
        assert [sock.recv(12) for sock in refused] == [b"HTTP/1.1 503"] * 4
    large = b'{"prompt": "abc", "max_tokens": 3}' + b" " * size
    wait_until(lambda: httpx.post(f"{quick_server.url}/v1/completions", content=large, timeout=20).status_code == 200)


def test_body_memory_is_given_back() -> None:
    memory = BodyMemory(100)
    memory.take(60)
    with pytest.raises(ApiError, match="60 bytes, the limit is 100"):
        memory.take(50)
    memory.give_back(60)
    memory.take(100)


def test_thirty_hostile_clients_do_not_keep_others_waiting(strict_server: ServerProcess) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        for number in range(30):
            sock = stack.enter_context(connect(strict_server))
            sock.sendall((POST + b"Content-Length: 100\r\n\r\n{", b"GET /hea", b"", b"\x00")[number % 4])
        began = time.monotonic()
        assert all(pool.map(lambda _: is_served(strict_server), range(12)))
        assert time.monotonic() - began < 5
    assert metric(strict_server, "num_requests_running") == 0
    assert "Traceback" not in strict_server.log


def test_hundreds_of_random_hostile_connections_leave_nothing_behind(strict_server: ServerProcess) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 50, "stream": True}).encode()
    good = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    kinds = [
        *(good, good * 20, good[:-5], good + b"\x00", good.replace(b"POST", b"GET ")),
        *(b"", b"\r\n\r\n", b"GET /hea", b"GET / HTTP/1.1\r\nA: " + b"x" * 9000),
        POST + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n" + b"x" * 30_000,
    ]
    num_connections = 400
    rng = random.Random(7)
    pid = strict_server.popen.pid
    before, lines_before = memory_of(pid), len(strict_server.lines)
    with ExitStack() as stack:
        for number in range(num_connections):
            sock = stack.enter_context(connect(strict_server))
            with suppress(OSError):
                sock.sendall(rng.choice(kinds))
            if number % 50 == 49:
                stack.pop_all().close()
    wait_until(lambda: httpx.get(f"{strict_server.url}/load").json() == {"server_load": 0})
    wait_until(lambda: metric(strict_server, "num_requests_running") == 0)
    wait_until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) < 20)
    assert is_served(strict_server)
    assert memory_of(pid) - before < 16 << 20
    assert "Traceback" not in strict_server.log
    assert len(strict_server.lines) - lines_before < 5 * num_connections  # nobody can fill the log
