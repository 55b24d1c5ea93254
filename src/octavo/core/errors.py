"""Every error that octavo raises on purpose. A message has the value, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Iterator


def shorten(text: str, limit: int = 60) -> str:
    """What came from outside, cut to a length that is fit for a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short_repr(value: object, limit: int = 60) -> str:
    """`repr` of what JSON may hold, cut to a length that is fit for a message, without writing the rest of it."""
    text = ""
    for piece in _repr_pieces(value, limit):
        text += piece
        if len(text) > limit:
            break
    return shorten(text, limit)


def _repr_pieces(value: object, limit: int) -> Iterator[str]:
    match value:
        case str() | bytes():
            yield repr(value[: limit + 1])
        case list():
            yield "["
            for i, item in enumerate(value):
                yield ", " if i else ""
                yield from _repr_pieces(item, limit)
            yield "]"
        case dict():
            yield "{"
            for i, (key, item) in enumerate(value.items()):
                yield ", " if i else ""
                yield from _repr_pieces(key, limit)
                yield ": "
                yield from _repr_pieces(item, limit)
            yield "}"
        case _:
            yield repr(value)


class OctavoError(Exception):
    """Base of all errors raised on purpose; its text is fit for a user's eyes."""


class ConfigError(OctavoError):
    """A flag, a combination of flags, or this machine does not allow what was asked."""


class ModelFileError(OctavoError):
    """A model file is malformed, truncated, or of a kind that octavo does not support."""


class InvalidRequestError(OctavoError):
    """A request is refused at the door (HTTP 400).

    `param` names the offending request field, or is None; `code` is a short machine-readable word.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestFailedError(OctavoError):
    """An accepted request could not be finished in the form that it asks for; all other requests go on (HTTP 400)."""


class OverloadedError(OctavoError):
    """There is too much work of one kind already; later it may go (HTTP 503)."""


class EngineDeadError(OctavoError):
    """The engine failed on what it was doing, or its process ended meanwhile; every request that ran gets this."""


class EngineUnavailableError(OctavoError):
    """No request is taken at the moment.

    retry_after: seconds after which it may help to ask again; None if this server is going to end.
    """

    def __init__(self, message: str, retry_after: int | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
