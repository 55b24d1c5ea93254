"""Errors as OpenAI's API shapes them, and Anthropic's on its routes.

Knows which status an octavo error means; nothing else of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from octavo.core.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from octavo.server.logs import request_id

ANTHROPIC_PATH = "/v1/messages"  # and what is below it
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct, frozen=True):
    error: AnthropicErrorBody
    request_id: str | None
    type: str = "error"


class ApiError(Exception):
    """An error with its HTTP status and headers, on its way to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """The reply that an exception deserves. One we did not raise on purpose says nothing of our insides."""
        match error:
            case ApiError():
                return error
            case InvalidRequestError():
                return cls(400, str(error), error.param, error.code)
            case RequestFailedError():
                # Not the server's fault, and the same again if it were tried again, as clients do after a 500.
                return cls(400, str(error), code="grammar_too_complex")
            case OverloadedError():
                return cls(503, str(error), code="overloaded")
            case EngineDeadError():
                return cls(500, str(error), code="engine_dead")
            case EngineUnavailableError(retry_after=None):
                return cls(503, str(error), code="stopping", headers={"Connection": "close"})
            case EngineUnavailableError(retry_after=seconds):
                return cls(503, str(error), code="engine_unavailable", headers={"Retry-After": str(seconds)})
            case _:
                return cls(500, "octavo failed on this request; the server's log says why", code="internal_error")

    def encode(self, path: str = "") -> bytes:
        """The body of the reply, in the shape that clients of the route at `path` know."""
        if is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return msgspec.json.encode(AnthropicErrorReply(AnthropicErrorBody(kind, str(self)), request_id.get()))
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return msgspec.json.encode(ErrorReply(ErrorBody(str(self), kind, self.param, self.code)))


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
