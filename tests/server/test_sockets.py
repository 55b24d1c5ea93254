"""TLS and unix sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from octavo.core.errors import ConfigError
from octavo.server.settings import ServerSettings
from octavo.server.sockets import address, listen, listening, tls_context
from tests.server.harness import (
    ENVIRONMENT,
    LONG_REPLY,
    ROOT,
    ServerProcess,
    fake_server,
    fake_server_command,
    read_slowly,
    server,
    wait_until,
)


@dataclass(frozen=True)
class Certificates:
    """Of an authority, and signed by it: the server's and a client's. Paths of PEM files."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2"]
    openssl(*new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
        openssl(*new, *signed, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    openssl("ec", "-in", "server.key", "-out", "locked.key", "-aes128", "-passout", "pass:sesame")
    return Certificates(folder)


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[ServerProcess]:
    """Knows its clients by their certificates."""
    flags = ["--ssl-certfile", certificates.path("server.pem"), "--ssl-keyfile", certificates.path("server.key")]
    flags += ["--ssl-ca-certs", certificates.path("ca.pem"), "--ssl-cert-reqs", "2", "--client-timeout", "0.8"]
    yield from fake_server(flags=flags)


@pytest.fixture(scope="module")
def trusting(certificates: Certificates) -> ssl.SSLContext:
    """A client's context that knows the authority and has a certificate of it."""
    context = ssl.create_default_context(cafile=certificates.path("ca.pem"))
    context.load_cert_chain(certificates.path("client.pem"), certificates.path("client.key"))
    return context


def test_a_client_with_a_certificate_is_served_over_https(tls_server: ServerProcess, trusting: ssl.SSLContext) -> None:
    assert tls_server.url.startswith("https://127.0.0.1:")
    with httpx.Client(verify=trusting) as client:
        body = {"prompt": "abc", "max_tokens": 6}
        reply = client.post(f"{tls_server.url}/v1/completions", json=body)
        assert reply.json()["choices"][0]["text"] == "abcabc"
        streamed = client.post(f"{tls_server.url}/v1/completions", json={**body, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_client_without_one_and_one_without_tls_are_not(
    tls_server: ServerProcess, certificates: Certificates
) -> None:
    stranger = ssl.create_default_context(cafile=certificates.path("ca.pem"))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{tls_server.url}/health", verify=stranger)
    with pytest.raises(httpx.TransportError):
        httpx.get(tls_server.url.replace("https", "http") + "/health")
    assert "Traceback" not in tls_server.log


def test_a_handshake_that_never_comes_is_cut_off(tls_server: ServerProcess) -> None:
    host, port = tls_server.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        began = time.monotonic()
        assert sock.recv(100) == b""
        assert time.monotonic() - began < 3


def test_what_is_no_http_inside_tls_gets_a_400_too(tls_server: ServerProcess, trusting: ssl.SSLContext) -> None:
    host, port = tls_server.url.removeprefix("https://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        trusting.wrap_socket(plain, server_hostname=host) as sock,
    ):
        sock.sendall(b"\x00\x01\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 400")
    assert "Traceback" not in tls_server.log


def test_over_tls_too_a_client_that_never_reads_is_cut_off(tls_server: ServerProcess, trusting: ssl.SSLContext) -> None:
    host, port = tls_server.url.removeprefix("https://").split(":")
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect((host, int(port)))
        with trusting.wrap_socket(plain, server_hostname=host) as sock:
            sock.sendall(LONG_REPLY)
            wait_until(lambda: "did not read its reply" in tls_server.log)
    assert "Traceback" not in tls_server.log


def test_over_tls_too_a_slow_reader_is_waited_for(tls_server: ServerProcess, trusting: ssl.SSLContext) -> None:
    host, port = tls_server.url.removeprefix("https://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        trusting.wrap_socket(plain, server_hostname=host) as sock,
    ):
        sock.sendall(LONG_REPLY)
        assert json.loads(read_slowly(sock).partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 20_000


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("missing.pem", "server.key", "--ssl-certfile .*missing.pem cannot be read"),
        ("server.pem", "missing.key", "--ssl-keyfile .*missing.key cannot be read"),
        ("server.pem", "client.key", "certificate's own"),
        ("server.pem", "locked.key", "unencrypted"),
        ("server.key", None, "must be PEM files"),
    ],
)
def test_files_that_make_no_tls_are_refused_by_name(
    certificates: Certificates, cert: str, key: str | None, words: str
) -> None:
    keyfile = None if key is None else certificates.path(key)
    with pytest.raises(ConfigError, match=words):
        tls_context(ServerSettings(ssl_certfile=certificates.path(cert), ssl_keyfile=keyfile))


def test_ciphers_are_those_that_were_chosen(certificates: Certificates) -> None:
    files = {"ssl_certfile": certificates.path("server.pem"), "ssl_keyfile": certificates.path("server.key")}
    context = tls_context(ServerSettings(**files, ssl_ciphers="ECDHE-ECDSA-AES256-GCM-SHA384"))  # type: ignore[arg-type]
    assert context is not None
    older = [cipher["name"] for cipher in context.get_ciphers() if not cipher["name"].startswith("TLS_")]
    assert older == ["ECDHE-ECDSA-AES256-GCM-SHA384"]
    with pytest.raises(ConfigError, match="--ssl-ciphers is 'nothing'"):
        tls_context(ServerSettings(**files, ssl_ciphers="nothing"))  # type: ignore[arg-type]


def ask(path: Path, route: str = "/health") -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        return client.get(f"http://octavo{route}")


def test_a_unix_socket_is_served_has_its_mode_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    with server(fake_server_command(flags=["--uds", str(path), "--uds-mode", "660"])) as process:
        assert process.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert ask(path, "/v1/models").json()["data"][0]["id"] == "echo"
        wait_until(lambda: "unix socket GET /v1/models 200" in process.log)
        assert process.end() == 0
        assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    command = fake_server_command(flags=["--uds", str(path)])
    with server(command) as process:
        process.end(signal.SIGKILL)
    assert path.exists()
    with server(command):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(path).status_code == 200
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2
        assert done.stderr == f"octavo: --uds {path} is in use: stop what listens there, or choose another path\n"
        assert ask(path).status_code == 200


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("words")
    with pytest.raises(ConfigError, match="is no socket"), listening(ServerSettings(uds=str(path))):
        pass
    assert path.read_text() == "words"


def test_a_socket_that_somebody_else_put_there_meanwhile_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(ServerSettings(uds=str(path))):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


@pytest.mark.parametrize("name", ["x" * 200, "missing/s", ""])
def test_a_path_that_can_be_no_socket_is_refused(tmp_path: Path, name: str) -> None:
    path = os.path.join(tmp_path, name) if name else ""
    with pytest.raises(ConfigError, match="--uds"), listening(ServerSettings(uds=path)):
        pass


def test_no_reply_waits_for_an_ack() -> None:
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_addresses_are_written_as_urls() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert address(sock, tls=True) == f"https://127.0.0.1:{sock.getsockname()[1]}"
    with listen("::1", 0) as sock:
        assert address(sock, tls=False).startswith("http://[::1]:")
