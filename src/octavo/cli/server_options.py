"""The flags of `octavo serve` that are about HTTP, turned into ServerSettings. Names are vLLM's where it has them."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli.options import add_answer_flags, answer_parsers
from octavo.cli.values import human_int, json_object, number, whole_number
from octavo.core.config import CONTENT_FORMATS
from octavo.server.settings import (
    KEY_VARIABLES,
    LOG_FORMATS,
    LOG_LEVELS,
    ServerSettings,
    read_api_keys,
    read_chat_template,
    split_names,
)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    security = parser.add_argument_group("security", "who may ask")
    limits = parser.add_argument_group("limits")
    logs = parser.add_argument_group("logs")
    ends = parser.add_argument_group("end", "when the server ends, or the engine dies")

    def flag(group: Any, name: str, text: str, **options: Any) -> None:
        group.add_argument(name, help=text, **options)

    default = ServerSettings()
    flag(
        server, "--host", "address to listen on; the default is this machine only, 0.0.0.0 is all", default=default.host
    )
    flag(
        server,
        "--port",
        f"port to listen on, 0 for any free one ({default.port})",
        type=whole_number,
        default=default.port,
    )
    flag(server, "--uds", "listen on a unix socket instead of host and port", metavar="PATH")
    flag(
        server,
        "--uds-mode",
        f"who may connect to it, in octal ({default.uds_mode:o})",
        type=_octal,
        metavar="MODE",
        default=default.uds_mode,
    )
    flag(
        server,
        "--root-path",
        "the prefix under which a proxy shows this server, as /llm",
        default=default.root_path,
        metavar="PREFIX",
    )
    flag(
        server,
        "--stream-interval",
        f"tokens that a chunk of a stream waits for; the first and the last do not ({default.stream_interval})",
        type=human_int,
        default=default.stream_interval,
        metavar="N",
    )
    flag(server, "--disable-fastapi-docs", "no page at /docs", action="store_true")
    add_chat_flags(parser)
    flag(
        security,
        "--api-key",
        f"a key that requests must bring; several: again, or with commas; also {' or '.join(KEY_VARIABLES)}",
        action="append",
        default=[],
        metavar="KEY",
    )
    flag(security, "--api-key-file", "a file of keys, one a line", metavar="FILE")
    flag(security, "--ssl-certfile", "serve https with this certificate (PEM)", metavar="FILE")
    flag(security, "--ssl-keyfile", "its key; default: in the certificate's file", metavar="FILE")
    flag(security, "--ssl-ca-certs", "whose certificates clients may bring (PEM)", metavar="FILE")
    flag(
        security,
        "--ssl-ciphers",
        "the ciphers of TLS 1.2, as OpenSSL lists them; default: what Python holds safe",
        metavar="LIST",
    )
    flag(
        security,
        "--ssl-cert-reqs",
        f"must clients bring one: 0 no, 1 if they have one, 2 yes ({default.ssl_cert_reqs})",
        type=whole_number,
        default=default.ssl_cert_reqs,
        metavar="N",
    )
    names = {"type": _names, "metavar": "LIST"}
    flag(security, "--allowed-origins", "web sites whose pages may ask, as a JSON list; default: none", **names)
    flag(security, "--allowed-methods", 'the methods that they may use (["*"])', **names)
    flag(security, "--allowed-headers", 'the headers that they may send (["*"])', **names)
    flag(security, "--allow-credentials", "they may send cookies and the like", action="store_true")
    flag(
        limits,
        "--limit-concurrency",
        f"connections at once ({default.limit_concurrency})",
        type=human_int,
        default=default.limit_concurrency,
        metavar="N",
    )
    flag(
        limits,
        "--max-num-queued-reqs",
        "requests that run or wait; more get a 503; default: no limit",
        type=human_int,
        metavar="N",
    )
    flag(
        limits,
        "--client-timeout",
        f"seconds in which a client must get on with sending or reading ({default.client_timeout:g})",
        type=number,
        default=default.client_timeout,
        metavar="SECONDS",
    )
    flag(
        limits,
        "--h11-max-incomplete-event-size",
        f"bytes of a request's line and headers ({default.max_header_bytes})",
        type=human_int,
        default=default.max_header_bytes,
        metavar="N",
    )
    flag(
        limits,
        "--h11-max-header-count",
        f"headers of a request ({default.max_headers})",
        type=human_int,
        default=default.max_headers,
        metavar="N",
    )
    flag(
        limits,
        "--responses-store-size",
        f"responses of /v1/responses that are kept, 0 for none ({default.responses_store_size})",
        type=human_int,
        default=default.responses_store_size,
        metavar="N",
    )
    flag(
        limits,
        "--responses-store-bytes",
        f"bytes that they may take together ({default.responses_store_bytes})",
        type=human_int,
        default=default.responses_store_bytes,
        metavar="N",
    )
    flag(
        logs,
        "--enable-request-id-headers",
        "X-Request-Id in every reply, not only where the client sent one (on)",
        action=argparse.BooleanOptionalAction,
        default=default.request_id_headers,
    )
    flag(
        server,
        "--metrics-prefix",
        f"of the names at /metrics; vllm for dashboards made for it ({default.metrics_prefix})",
        default=default.metrics_prefix,
        metavar="NAME",
    )
    flag(
        logs,
        "--disable-log-stats",
        "no line every ten seconds about throughput, queue and cache, while there is work",
        action="store_true",
    )
    flag(
        logs,
        "--uvicorn-log-level",
        f"the least that the lines of requests must have; above info there are none ({default.access_log_level})",
        choices=LOG_LEVELS,
        default=default.access_log_level,
    )
    flag(
        logs,
        "--log-format",
        f"of the server's log lines ({default.log_format})",
        choices=LOG_FORMATS,
        default=default.log_format,
    )
    flag(logs, "--disable-uvicorn-access-log", "no line for each request", action="store_true")
    flag(
        logs,
        "--disable-access-log-for-endpoints",
        "nor for these paths, as /health,/metrics",
        type=_names,
        metavar="LIST",
    )
    flag(logs, "--enable-log-requests", "prompts and parameters in the log", action="store_true")
    flag(
        logs,
        "--max-log-len",
        "characters and token ids of a prompt in the log, at most; default: all",
        type=human_int,
        metavar="N",
    )
    flag(
        ends,
        "--shutdown-timeout",
        f"on ctrl-C or SIGTERM, running requests have so long to end ({default.shutdown_timeout:g}: none)",
        type=float,
        default=default.shutdown_timeout,
        metavar="SECONDS",
    )
    flag(
        ends,
        "--engine-timeout",
        f"an engine that gets nothing done for so long is restarted; 0: never ({default.engine_timeout:g})",
        type=float,
        default=default.engine_timeout,
        metavar="SECONDS",
    )
    flag(
        ends,
        "--max-engine-restarts",
        "restarts of a dying engine in a row before the server ends; default: it never gives up",
        type=int,
        metavar="N",
    )


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """How conversations become prompts, and answers are taken apart."""
    default = ServerSettings()

    chat = parser.add_argument_group("chat", "chat templates")

    def flag(name: str, text: str, **options: Any) -> None:
        chat.add_argument(name, help=text, **options)

    flag(
        "--chat-template",
        "a file with the chat template, or the template itself, instead of the model's own",
        metavar="FILE",
    )
    flag(
        "--chat-template-content-format",
        "how it gets the content of messages: as text, as a list of parts (openai), or as it reads them "
        f"({default.chat_template_content_format})",
        choices=CONTENT_FORMATS,
        default=default.chat_template_content_format,
    )
    flag(
        "--default-chat-template-kwargs",
        'variables for it where a request sets no others, as {"enable_thinking": false}',
        type=json_object,
        default={},
        metavar="JSON",
    )
    flag(
        "--trust-request-chat-template",
        "requests may bring a chat template of their own",
        action="store_true",
    )
    flag(
        "--response-role",
        f"of the messages that the model writes ({default.response_role})",
        default=default.response_role,
        metavar="ROLE",
    )
    add_answer_flags(parser.add_argument_group("tools", "tool calls and reasoning"))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """Raises ConfigError."""
    default = ServerSettings()
    return ServerSettings(
        host=args.host,
        port=args.port,
        uds=args.uds,
        uds_mode=args.uds_mode,
        root_path=args.root_path,
        api_keys=read_api_keys(args.api_key, args.api_key_file),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        allowed_origins=args.allowed_origins or default.allowed_origins,
        allowed_methods=args.allowed_methods or default.allowed_methods,
        allowed_headers=args.allowed_headers or default.allowed_headers,
        allow_credentials=args.allow_credentials,
        max_header_bytes=args.h11_max_incomplete_event_size,
        max_headers=args.h11_max_header_count,
        limit_concurrency=args.limit_concurrency,
        client_timeout=args.client_timeout,
        request_id_headers=args.enable_request_id_headers,
        access_log=not args.disable_uvicorn_access_log,
        unlogged_paths=frozenset(args.disable_access_log_for_endpoints or ()),
        max_num_queued_reqs=args.max_num_queued_reqs,
        stream_interval=args.stream_interval,
        log_stats=not args.disable_log_stats,
        access_log_level=args.uvicorn_log_level,
        log_format=args.log_format,
        log_requests=args.enable_log_requests,
        max_log_len=args.max_log_len,
        docs=not args.disable_fastapi_docs,
        metrics_prefix=args.metrics_prefix,
        chat_template=None if args.chat_template is None else read_chat_template(args.chat_template),
        chat_template_content_format=args.chat_template_content_format,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        trust_request_chat_template=args.trust_request_chat_template,
        response_role=args.response_role,
        responses_store_size=args.responses_store_size,
        responses_store_bytes=args.responses_store_bytes,
        parsers=answer_parsers(args),
        shutdown_timeout=args.shutdown_timeout,
        engine_timeout=args.engine_timeout,
        max_engine_restarts=args.max_engine_restarts,
    )


def chat_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerSettings that the flags of `add_chat_flags` name. Raises ConfigError."""
    return {
        "chat_template": None if args.chat_template is None else read_chat_template(args.chat_template),
        "chat_template_content_format": args.chat_template_content_format,
        "default_chat_template_kwargs": args.default_chat_template_kwargs,
        "trust_request_chat_template": args.trust_request_chat_template,
        "response_role": args.response_role,
        "parsers": answer_parsers(args),
    }


def _names(text: str) -> tuple[str, ...]:
    try:
        return split_names(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a JSON list of texts nor names with commas") from None


def _octal(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an octal number like 660") from None
