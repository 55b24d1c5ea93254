"""The server's log lines: on standard error, as text or as one JSON object a line, each with its request's id.

Knows the id through a context variable that the gate sets; nothing else of HTTP.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from octavo.core.records import Request

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

requests_logger = logging.getLogger("octavo.requests")


def configure_logs(log_format: str, access_log_level: str = "info") -> None:
    """From now on all records of this process go to standard error, ours from INFO, others from WARNING.

    access_log_level: the least for the lines of requests and for uvicorn's own, as uvicorn calls it.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("octavo").setLevel(logging.INFO)
    level = max(logging.INFO, getattr(logging, access_log_level.upper(), logging.INFO))
    logging.getLogger("octavo.access").setLevel(level)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, level))


class TextFormatter(logging.Formatter):
    """2026-11-29 21:04:05.123 INFO octavo.access: message [request id]"""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        name = request_id.get()
        mark = f" [{name}]" if name else ""
        text = f"{when} {record.levelname} {record.name}: {record.getMessage()}{mark}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, request_id, exception, and the record's own `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (name := request_id.get()) is not None:
            line["request_id"] = name
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_request(request: Request, prompt: str, max_len: int | None, labels: Mapping[str, Any]) -> None:
    """What a client asked, prompt and all; `max_len` characters and token ids of it, and what the client calls it."""
    token_ids = request.prompt_token_ids
    params = {field: getattr(request.params, field) for field in request.params.__struct_fields__}
    requests_logger.info(
        "request %s: %d prompt tokens, prompt %r, token ids %s, %s%s",
        request.request_id,
        len(token_ids),
        prompt[:max_len],
        token_ids[:max_len],
        request.params,
        f", {dict(labels)}" if labels else "",
        extra={
            "fields": {
                "engine_request_id": request.request_id,
                "num_prompt_tokens": len(token_ids),
                "prompt": prompt[:max_len],
                "prompt_token_ids": token_ids[:max_len],
                "params": params,
                **labels,
            }
        },
    )
