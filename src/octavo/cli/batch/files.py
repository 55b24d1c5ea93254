"""OpenAI's batch files: requests are read and checked, replies are written so that a killed run can go on.

One JSON object a line in both. Knows nothing of how a request is answered.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Self

from octavo.core.errors import ConfigError, shorten

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_SHOWN = 5  # bad lines that an error names
MAX_LINE_BYTES = 64 << 20  # twice the largest body that the routes take
RETRIED_STATUS = 500  # a reply from here on was no answer to the request: it is asked again when a run goes on


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a batch."""

    custom_id: str
    route: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    request_id: str
    body: Any


def read_entries(path: str) -> Iterator[Entry]:
    """The requests of a file that `check_entries` has been through."""
    with open(path, "rb") as file:
        for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            if line.strip():
                yield _entry(line)


def check_entries(path: str) -> set[str]:
    """The custom_ids of all requests. Raises ConfigError that names the lines that are wrong, if any is."""
    seen: dict[str, int] = {}
    wrong: list[str] = []
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"the input {path} is no regular file, and it is read more than once: name a file")
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
                if len(line) == MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes: send less at a time"
                    )
                if not line.strip():
                    continue
                try:
                    entry = _entry(line)
                    if entry.custom_id in seen:
                        raise ValueError(
                            f"custom_id {shorten(entry.custom_id)!r} is that of line {seen[entry.custom_id]}"
                        )
                    seen[entry.custom_id] = number
                except ValueError as error:
                    wrong.append(f"line {number}: {error}")
    except OSError as error:
        raise ConfigError(f"the input {path} cannot be read: {error.strerror}") from None
    if wrong:
        more = f"; and {len(wrong) - MAX_SHOWN:,} more" if len(wrong) > MAX_SHOWN else ""
        raise ConfigError(f"{path} has {len(wrong):,} bad lines: {'; '.join(wrong[:MAX_SHOWN])}{more}")
    if not seen:
        raise ConfigError(f"the input {path} is empty: it must have a request a line")
    return set(seen)


def _entry(line: bytes) -> Entry:
    """Raises ValueError that says what is wrong."""
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    custom_id, method, route, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id is missing: it must be a text")
    if not custom_id.isprintable():
        raise ValueError(f"custom_id is {shorten(ascii(custom_id))}; it must have printable characters only")
    if method != "POST":
        raise ValueError(f"method is {shorten(repr(method))}; it must be POST")
    if route not in ROUTES:
        raise ValueError(f"url is {shorten(repr(route))}; it must be one of {', '.join(ROUTES)}")
    if not isinstance(body, dict):
        raise ValueError("body is missing: it must be a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream is set, but a reply in a file comes whole: leave it out")
    return Entry(custom_id, route, body)


class ReplyFile:
    """The output: replies are appended as they come, each in one write, and those of an earlier run are kept.

    done: custom_ids that have their reply. A line that a killed run has left unfinished is dropped, and so are replies
    that were no answers (status 500 and above), so that they are asked again. Raises ConfigError if another run
    writes the file, or if it is not of this batch.
    """

    def __init__(self, path: str, custom_ids: Collection[str]) -> None:
        self.done: set[str] = set()
        try:
            self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - held until close
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(f"the output {path} is no regular file: name one, so that a run can go on")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._keep_what_is_good(path, custom_ids)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"another run writes {path}: wait for it, or name another output") from None
        except OSError as error:
            self._file.close()
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: Entry, reply: Reply) -> None:
        line = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": entry.custom_id,
            "response": {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body},
            "error": None,
        }
        rest = memoryview(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)  # or a reply that still fits would go on in the line of this one
            raise ConfigError(f"the output cannot be written ({error.strerror}): mend that and run it again") from None
        self.done.add(entry.custom_id)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_what_is_good(self, path: str, custom_ids: Collection[str]) -> None:
        if os.fstat(self._file.fileno()).st_ino != os.stat(path).st_ino:  # another run has just put a new file there
            raise BlockingIOError
        dropped: set[int] = set()
        with open(path, "rb") as file:  # buffered, as our own is not
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    dropped.add(number)
                    continue
                custom_id, status = _read_reply(line, f"{path}, line {number}")
                if custom_id not in custom_ids:
                    raise ConfigError(
                        f"{path} has a reply to {shorten(custom_id)!r}, which the input does not have: name another "
                        "output"
                    )
                if status < RETRIED_STATUS:
                    self.done.add(custom_id)
                else:
                    dropped.add(number)
        if dropped:
            self._drop(os.path.realpath(path), dropped)

    def _drop(self, path: str, numbers: Collection[int]) -> None:
        """Whatever kills this, either the old file or the new one is there, whole."""
        beside = f"{path}.{os.getpid()}.tmp"
        new: BinaryIO = open(beside, "a+b", buffering=0)  # noqa: SIM115 - becomes the file
        try:
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
            fcntl.flock(new, fcntl.LOCK_EX)
            with open(path, "rb") as old, open(beside, "wb") as buffered:
                buffered.writelines(line for number, line in enumerate(old, 1) if number not in numbers)
            os.fsync(new.fileno())
            os.replace(beside, path)
        except BaseException:
            new.close()
            os.unlink(beside)
            raise
        self._file.close()
        self._file = new


def _read_reply(line: bytes, where: str) -> tuple[str, int]:
    """The custom_id and status of a line of an output."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    match reply:
        case {"custom_id": str(custom_id), "response": {"status_code": int(status)}}:
            return custom_id, status
    raise ConfigError(f"{where} is no reply of a batch: name another output")
