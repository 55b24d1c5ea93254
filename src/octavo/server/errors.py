"""Errors as OpenAI's API shapes them. Knows which status an octavo error means; nothing else of HTTP."""

from __future__ import annotations

import msgspec

from octavo.core.errors import EngineDeadError, InvalidRequestError


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An error with its HTTP status, on its way to the client."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """The reply that an exception deserves. One we did not raise on purpose says nothing of our insides."""
        match error:
            case ApiError():
                return error
            case InvalidRequestError():
                return cls(400, str(error), error.param, error.code)
            case EngineDeadError():
                return cls(503, str(error), code="engine_dead")
            case _:
                return cls(500, "octavo failed on this request; the server's log says why", code="internal_error")

    def encode(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return msgspec.json.encode(ErrorReply(ErrorBody(str(self), kind, self.param, self.code)))
