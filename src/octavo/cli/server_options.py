"""The flags of `octavo serve` that are about HTTP, turned into ServerSettings. Names are vLLM's where it has them."""

from __future__ import annotations

import argparse
from functools import partial
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

_DEFAULT = ServerSettings()


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    _add_address_flags(parser.add_argument_group("server"))
    _add_security_flags(parser.add_argument_group("security", "who may ask"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_log_flags(parser.add_argument_group("logs"))
    _add_end_flags(parser.add_argument_group("end", "when the server ends, or the engine dies"))
    add_chat_flags(parser)


def _add_address_flags(group: Any) -> None:
    flag = partial(_add, group)
    flag("--host", "address to listen on; the default is this machine only, 0.0.0.0 is all", default=_DEFAULT.host)
    flag(
        "--port",
        f"port to listen on, 0 for any free one ({_DEFAULT.port})",
        type=whole_number,
        default=_DEFAULT.port,
    )
    flag("--uds", "listen on a unix socket instead of host and port", metavar="PATH")
    flag(
        "--uds-mode",
        f"who may connect to it, in octal ({_DEFAULT.uds_mode:o})",
        type=_octal,
        metavar="MODE",
        default=_DEFAULT.uds_mode,
    )
    flag(
        "--root-path",
        "the prefix under which a proxy shows this server, as /llm",
        default=_DEFAULT.root_path,
        metavar="PREFIX",
    )
    flag(
        "--stream-interval",
        f"tokens that a chunk of a stream waits for; the first and the last do not ({_DEFAULT.stream_interval})",
        type=human_int,
        default=_DEFAULT.stream_interval,
        metavar="N",
    )
    flag("--disable-fastapi-docs", "no page at /docs", action="store_true")
    flag(
        "--metrics-prefix",
        f"of the names at /metrics; vllm for dashboards made for it ({_DEFAULT.metrics_prefix})",
        default=_DEFAULT.metrics_prefix,
        metavar="NAME",
    )


def _add_security_flags(group: Any) -> None:
    flag = partial(_add, group)
    names = {"type": _names, "metavar": "LIST"}
    flag(
        "--api-key",
        f"a key that requests must bring; several: again, or with commas; also {' or '.join(KEY_VARIABLES)}",
        action="append",
        default=[],
        metavar="KEY",
    )
    flag("--api-key-file", "a file of keys, one a line", metavar="FILE")
    flag("--ssl-certfile", "serve https with this certificate (PEM)", metavar="FILE")
    flag("--ssl-keyfile", "its key; default: in the certificate's file", metavar="FILE")
    flag("--ssl-ca-certs", "whose certificates clients may bring (PEM)", metavar="FILE")
    flag(
        "--ssl-ciphers",
        "the ciphers of TLS 1.2, as OpenSSL lists them; default: what Python holds safe",
        metavar="LIST",
    )
    flag(
        "--ssl-cert-reqs",
        f"must clients bring one: 0 no, 1 if they have one, 2 yes ({_DEFAULT.ssl_cert_reqs})",
        type=whole_number,
        default=_DEFAULT.ssl_cert_reqs,
        metavar="N",
    )
    flag("--allowed-origins", "web sites whose pages may ask, as a JSON list; default: none", **names)
    flag("--allowed-methods", 'the methods that they may use (["*"])', **names)
    flag("--allowed-headers", 'the headers that they may send (["*"])', **names)
    flag("--allow-credentials", "they may send cookies and the like", action="store_true")


def _add_limit_flags(group: Any) -> None:
    flag = partial(_add, group)
    flag(
        "--limit-concurrency",
        f"connections at once ({_DEFAULT.limit_concurrency})",
        type=human_int,
        default=_DEFAULT.limit_concurrency,
        metavar="N",
    )
    flag(
        "--max-num-queued-reqs",
        "requests that run or wait; more get a 503; default: no limit",
        type=human_int,
        metavar="N",
    )
    flag(
        "--client-timeout",
        f"seconds in which a client must get on with sending or reading ({_DEFAULT.client_timeout:g})",
        type=number,
        default=_DEFAULT.client_timeout,
        metavar="SECONDS",
    )
    flag(
        "--h11-max-incomplete-event-size",
        f"bytes of a request's line and headers ({_DEFAULT.max_header_bytes})",
        type=human_int,
        default=_DEFAULT.max_header_bytes,
        metavar="N",
    )
    flag(
        "--h11-max-header-count",
        f"headers of a request ({_DEFAULT.max_headers})",
        type=human_int,
        default=_DEFAULT.max_headers,
        metavar="N",
    )
    flag(
        "--responses-store-size",
        f"responses of /v1/responses that are kept, 0 for none ({_DEFAULT.responses_store_size})",
        type=human_int,
        default=_DEFAULT.responses_store_size,
        metavar="N",
    )
    flag(
        "--responses-store-bytes",
        f"bytes that they may take together ({_DEFAULT.responses_store_bytes})",
        type=human_int,
        default=_DEFAULT.responses_store_bytes,
        metavar="N",
    )


def _add_log_flags(group: Any) -> None:
    flag = partial(_add, group)
    flag(
        "--enable-request-id-headers",
        "X-Request-Id in every reply, not only where the client sent one (on)",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULT.request_id_headers,
    )
    flag(
        "--disable-log-stats",
        "no line every ten seconds about throughput, queue and cache, while there is work",
        action="store_true",
    )
    flag(
        "--uvicorn-log-level",
        f"the least that the lines of requests must have; above info there are none ({_DEFAULT.access_log_level})",
        choices=LOG_LEVELS,
        default=_DEFAULT.access_log_level,
    )
    flag(
        "--log-format",
        f"of the server's log lines ({_DEFAULT.log_format})",
        choices=LOG_FORMATS,
        default=_DEFAULT.log_format,
    )
    flag("--disable-uvicorn-access-log", "no line for each request", action="store_true")
    flag(
        "--disable-access-log-for-endpoints",
        "nor for these paths, as /health,/metrics",
        type=_names,
        metavar="LIST",
    )
    flag("--enable-log-requests", "prompts and parameters in the log", action="store_true")
    flag(
        "--max-log-len",
        "characters and token ids of a prompt in the log, at most; default: all",
        type=human_int,
        metavar="N",
    )


def _add_end_flags(group: Any) -> None:
    flag = partial(_add, group)
    flag(
        "--shutdown-timeout",
        f"on ctrl-C or SIGTERM, running requests have so long to end ({_DEFAULT.shutdown_timeout:g}: none)",
        type=float,
        default=_DEFAULT.shutdown_timeout,
        metavar="SECONDS",
    )
    flag(
        "--engine-timeout",
        f"an engine that gets nothing done for so long is restarted; 0: never ({_DEFAULT.engine_timeout:g})",
        type=float,
        default=_DEFAULT.engine_timeout,
        metavar="SECONDS",
    )
    flag(
        "--max-engine-restarts",
        "restarts of a dying engine in a row before the server ends; default: it never gives up",
        type=int,
        metavar="N",
    )


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """How conversations become prompts, and answers are taken apart."""
    flag = partial(_add, parser.add_argument_group("chat", "chat templates"))
    flag(
        "--chat-template",
        "a file with the chat template, or the template itself, instead of the model's own",
        metavar="FILE",
    )
    flag(
        "--chat-template-content-format",
        "how it gets the content of messages: as text, as a list of parts (openai), or as it reads them "
        f"({_DEFAULT.chat_template_content_format})",
        choices=CONTENT_FORMATS,
        default=_DEFAULT.chat_template_content_format,
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
        f"of the messages that the model writes ({_DEFAULT.response_role})",
        default=_DEFAULT.response_role,
        metavar="ROLE",
    )
    add_answer_flags(parser.add_argument_group("tools", "tool calls and reasoning"))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """Raises ConfigError."""
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
        allowed_origins=args.allowed_origins or _DEFAULT.allowed_origins,
        allowed_methods=args.allowed_methods or _DEFAULT.allowed_methods,
        allowed_headers=args.allowed_headers or _DEFAULT.allowed_headers,
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


def _add(group: Any, name: str, text: str, **options: Any) -> None:
    group.add_argument(name, help=text, **options)


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
