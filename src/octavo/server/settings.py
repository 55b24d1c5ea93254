"""What a user can choose about the HTTP side, as one frozen record. Field names are the flags' names.

Knows no HTTP library, so that a command line is checked before anything heavy is imported.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.core.config import CONTENT_FORMATS
from octavo.core.errors import ConfigError, shorten
from octavo.engine.frontend import RESERVED_TEMPLATE_NAMES
from octavo.server.parsers import AnswerParsers

ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s?#@]+")
METRICS_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")  # the first that is set counts
MAX_KEY_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Raises ConfigError with value, limit and remedy."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a unix socket's path, instead of host and port
    uds_mode: int = 0o600
    root_path: str = ""  # the prefix under which a proxy shows this server
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everybody may ask
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_ciphers: str | None = None  # as OpenSSL names them, for TLS 1.2
    ssl_cert_reqs: int = 0  # of clients, as the ssl module numbers it: 0 none, 1 if they have one, 2 required
    allowed_origins: tuple[str, ...] = ()  # none: no CORS
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_header_bytes: int = 64 << 10  # --h11-max-incomplete-event-size: request line and headers together
    max_headers: int = 256  # --h11-max-header-count
    limit_concurrency: int = 2048  # connections
    client_timeout: float = 20.0  # seconds in which a client that we wait for must get on
    max_num_queued_reqs: int | None = None  # requests that run or wait; None: no limit
    stream_interval: int = 1  # tokens that a chunk of a stream waits for
    request_id_headers: bool = True
    access_log: bool = True
    unlogged_paths: frozenset[str] = frozenset()
    log_format: str = "text"
    access_log_level: str = "info"  # --uvicorn-log-level: the least that access lines and uvicorn's own must have
    log_stats: bool = True
    log_requests: bool = False
    max_log_len: int | None = None  # characters of a prompt, and token ids of it, in the log; None: all
    docs: bool = True
    metrics_prefix: str = "octavo"  # vllm, for dashboards that are there already
    chat_template: str | None = None  # its source, instead of the model's own
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    response_role: str = "assistant"
    responses_store_size: int = 1000  # of /v1/responses; 0: none are stored
    responses_store_bytes: int = 64 << 20
    parsers: AnswerParsers = field(default_factory=AnswerParsers)
    shutdown_timeout: float = 0.0  # seconds that running requests have to end when the server shall
    engine_timeout: float = 60.0  # seconds without any progress after which an engine is taken for hung; 0: never
    max_engine_restarts: int | None = None  # in a row; None: always again

    def __post_init__(self) -> None:
        def at_least(flag: str, value: float, low: float) -> None:
            if not low <= value < math.inf:
                bound = f"at least {low}" if value != math.inf else "a number that ends"
                raise ConfigError(f"{flag} is {value}; it must be {bound}")

        if not self.host:  # which would mean every address of this machine
            raise ConfigError("--host is empty: name an address, such as 127.0.0.1 (this machine) or 0.0.0.0 (all)")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be between 0 and 65535")
        if not 0 <= self.uds_mode <= 0o777:
            raise ConfigError(f"--uds-mode is {self.uds_mode:o}; it must be an octal number up to 777")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"--root-path is {self.root_path!r}; it must begin with a slash and not end with one, like /llm"
            )
        if self.access_log_level not in LOG_LEVELS:
            raise ConfigError(
                f"--uvicorn-log-level is {self.access_log_level!r}; it must be one of {', '.join(LOG_LEVELS)}"
            )
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"--log-format is {self.log_format!r}; it must be one of {', '.join(LOG_FORMATS)}")
        if not METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix is {shorten(self.metrics_prefix)!r}; it must be letters, digits and underscores, no "
                "digit first, like vllm"
            )
        if self.chat_template_content_format not in CONTENT_FORMATS:
            raise ConfigError(
                f"--chat-template-content-format is {self.chat_template_content_format!r}; it must be one of "
                f"{', '.join(CONTENT_FORMATS)}"
            )
        for name in set(RESERVED_TEMPLATE_NAMES) & set(self.default_chat_template_kwargs):
            raise ConfigError(f"--default-chat-template-kwargs sets {name!r}, which each request sets: remove it")
        if not self.response_role:
            raise ConfigError("--response-role is empty: name a role, such as assistant")
        at_least("--h11-max-incomplete-event-size", self.max_header_bytes, 1024)
        at_least("--h11-max-header-count", self.max_headers, 8)
        at_least("--limit-concurrency", self.limit_concurrency, 1)
        at_least("--stream-interval", self.stream_interval, 1)
        if self.max_num_queued_reqs is not None:
            at_least("--max-num-queued-reqs", self.max_num_queued_reqs, 1)
        at_least("--client-timeout", self.client_timeout, 0.1)
        at_least("--responses-store-size", self.responses_store_size, 0)
        at_least("--responses-store-bytes", self.responses_store_bytes, 65536)
        at_least("--shutdown-timeout", self.shutdown_timeout, 0)
        at_least("--engine-timeout", self.engine_timeout, 0)
        if self.max_engine_restarts is not None:
            at_least("--max-engine-restarts", self.max_engine_restarts, 0)
        if self.max_log_len is not None:
            at_least("--max-log-len", self.max_log_len, 0)
            if not self.log_requests:
                raise ConfigError("--max-log-len shortens what --enable-log-requests logs: give that too")
        self._check_tls()
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins has {shorten(origin)!r}, which no browser sends; it must look like "
                    "https://chat.example.com, scheme and host without a path, or be *"
                )
        for path in sorted(self.unlogged_paths):
            if not path.startswith("/"):
                raise ConfigError(
                    f"--disable-access-log-for-endpoints has {shorten(path)!r}; it must be a path, like /health"
                )
        if not self.allowed_origins and (
            self.allow_credentials or self.allowed_methods != ("*",) or self.allowed_headers != ("*",)
        ):
            raise ConfigError("the CORS flags need --allowed-origins: without it no other site's pages may ask")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials with the origin * would let every site act in its visitors' names: name the "
                "origins"
            )

    def _check_tls(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile is given without --ssl-certfile: name the certificate too")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs is {self.ssl_cert_reqs}; it must be 0 (none), 1 (optional) or 2")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs or self.ssl_ciphers):
            raise ConfigError(
                "--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need --ssl-certfile: name the server's certificate"
            )
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs is {self.ssl_cert_reqs}: --ssl-ca-certs must say whose certificates count"
            )

    @property
    def tls(self) -> bool:
        return self.ssl_certfile is not None


def read_api_keys(
    flags: Sequence[str], key_file: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The keys of `flags` (each a comma list) and of the file (one a line); if neither is given, of the environment.

    Raises ConfigError if one was meant to be there and is not: a server must not be open by mistake.
    """
    keys: list[str] = []
    for value in flags:
        keys += _split_keys(value.split(","), "--api-key")
    if key_file is not None:
        try:
            with open(key_file, encoding="utf-8") as file:
                lines = file.read(MAX_KEY_FILE_BYTES).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {key_file} cannot be read ({error}): name a text file") from None
        keys += _split_keys([line for line in lines if line.strip()], f"--api-key-file {key_file}")
    if keys:
        return tuple(keys)
    for name in KEY_VARIABLES:
        if environment.get(name):
            return _split_keys(environment[name].split(","), name)
    return ()


def read_chat_template(value: str) -> str:
    """The template in the file `value`, or `value` itself where it is a template. Raises ConfigError."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {shorten(value)} cannot be read ({error}): name a text file, or give the template itself"
        ) from None


def _split_keys(parts: Sequence[str], source: str) -> tuple[str, ...]:
    keys = tuple(part.strip() for part in parts)
    if not keys or not all(keys):
        raise ConfigError(f"{source} has an empty key: give at least one character, or leave it out")
    for number, key in enumerate(keys, 1):
        if not all("!" <= character <= "~" for character in key):
            raise ConfigError(f"{source}: key {number} has a space or a character that no HTTP header can carry")
    return keys


def split_names(text: str) -> tuple[str, ...]:
    """A list of names, as JSON (vLLM's way) or with commas. Raises ValueError."""
    import json

    if not text.lstrip().startswith("["):
        return tuple(filter(None, (name.strip() for name in text.split(","))))
    names = json.loads(text)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{shorten(text)} is no list of texts")
    return tuple(names)
