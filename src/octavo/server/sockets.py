"""Where the server listens: a TCP port or a unix socket, with or without TLS. Standard library only.

Knows nothing of HTTP. Everything here can be done, and can fail, before a model is loaded.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    import ssl

BACKLOG = 2048
MAX_SOCKET_PATH_BYTES = 107  # Linux: sun_path with its closing zero
SEND_BUFFER_BYTES = 256 << 10  # otherwise the kernel lets it grow to megabytes for a client that reads nothing
SPARE_FILES = 64  # of the process, beside its connections


@contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """A listening socket; a unix socket's file is gone afterwards. Raises ConfigError."""
    if settings.uds is None:
        with listen(settings.host, settings.port) as sock:
            yield sock
        return
    with _listen_at_path(settings.uds, settings.uds_mode) as sock:
        ours = os.stat(settings.uds)
        try:
            yield sock
        finally:
            with suppress(OSError):
                if os.path.samestat(os.stat(settings.uds), ours):  # nobody has put another one there
                    os.unlink(settings.uds)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError if the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OverflowError:
        raise ConfigError(f"--port is {port}; it must be between 0 and 65535") from None
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                advice = f"port {port} is in use on {host}: stop what uses it, or choose another with --port"
            case errno.EACCES:
                advice = f"port {port} needs privileges that this user does not have: choose one above 1023 with --port"
            case _:
                reason = str(error.strerror).partition(" (while")[0]  # the rest says again what was tried
                advice = f"cannot listen on {host}:{port} ({reason}): check --host and --port"
        raise ConfigError(advice) from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted ones inherit it
    # So with this, which asyncio leaves alone in sockets that it did not make; without it, whatever was written behind
    # a reply's head waited 40 ms for the client's delayed ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _listen_at_path(path: str, mode: int) -> socket.socket:
    length = len(os.fsencode(path))
    if not 0 < length <= MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"--uds has {length} bytes; a socket's path has 1 to {MAX_SOCKET_PATH_BYTES}: choose another")
    _remove_stale_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)  # so that there is no moment in which others may connect
    try:
        sock.bind(path)
        os.chmod(path, mode)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at --uds {path} ({error.strerror}): choose another path") from None
    finally:
        os.umask(before)
    return sock


def _remove_stale_socket(path: str) -> None:
    """Removes a socket file that a killed server left behind; nothing else is ever removed."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"--uds {path} exists and is no socket: remove it, or choose another path")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--uds {path} cannot be used ({error.strerror}): choose another path") from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"--uds {path} cannot be used ({error.strerror}): choose another path") from None
        else:
            raise ConfigError(f"--uds {path} is in use: stop what listens there, or choose another path")


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """None without TLS. Raises ConfigError that names the file that does not do."""
    if settings.ssl_certfile is None:
        return None
    import ssl

    for flag, path in (
        ("--ssl-certfile", settings.ssl_certfile),
        ("--ssl-keyfile", settings.ssl_keyfile),
        ("--ssl-ca-certs", settings.ssl_ca_certs),
    ):
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{flag} {path} cannot be read: check that it is there and that this user may read it")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A password is never asked for: nobody sits at a server's terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=lambda: "")
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"TLS cannot be set up ({error}): --ssl-certfile, --ssl-keyfile and --ssl-ca-certs must be PEM files, the "
            "key unencrypted and the certificate's own"
        ) from None
    if settings.ssl_ciphers is not None:
        try:
            context.set_ciphers(settings.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"--ssl-ciphers is {settings.ssl_ciphers!r}, which selects none: name ciphers as 'openssl ciphers' does"
            ) from None
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    return context


def address(sock: socket.socket, *, tls: bool) -> str:
    """Where clients find a listening socket, as the beginning of a URL, or unix:PATH."""
    if sock.family is socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def connections_with_files(wanted: int) -> int:
    """As many of `wanted` connections as this process may have files for, after asking the system for enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - SPARE_FILES))
