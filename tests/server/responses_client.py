"""/v1/responses asked over plain HTTP, and everything that comes back held against the `openai` package's own types."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import Any, get_args

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from tests.server.fake_engine import END, SAY
from tests.server.harness import ServerProcess

EVENT_TYPES = {get_args(t.model_fields["type"].annotation)[0]: t for t in get_args(get_args(ResponseStreamEvent)[0])}
# What OpenAI sends and its package's types leave out.
KNOWN_EXTRAS = {"response.store", "store", "logprobs.bytes", "top_logprobs.bytes"}


def validated(data: dict[str, Any], kind: type[BaseModel] = Response) -> Any:
    """`data` as the package's type has it, after a strict check that has found nothing amiss or unknown."""
    value = kind.model_validate(data, strict=True)
    assert set(_extras(value, "")) <= KNOWN_EXTRAS, data
    return value


def say(text: str) -> str:
    """An input that makes the fake engine answer `text`."""
    return f"{SAY.decode()}{text}{END.decode()}"


def frames(
    server: ServerProcess, method: str, path: str, body: Any = None, **options: Any
) -> Generator[Any, None, None]:
    """The validated events of a stream, as they come."""
    number = options.pop("first", 0)
    with httpx.stream(method, server.url + path, json=body, timeout=20, **options) as reply:
        if reply.status_code != 200:
            reply.read()
            raise AssertionError(reply.text)
        assert reply.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in reply.iter_lines():
            field, _, value = line.partition(": ")
            match field:
                case "event":
                    name = value
                case "data":
                    data = json.loads(value)
                    assert data["type"] == name
                    assert data["sequence_number"] == number
                    number += 1
                    yield validated(data, EVENT_TYPES[name])
                case _:
                    assert line == ""


def streamed(server: ServerProcess, **body: Any) -> list[Any]:
    return list(frames(server, "POST", "/v1/responses", {**body, "stream": True}))


def whole(server: ServerProcess, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}/v1/responses", json=body, timeout=20)
    assert reply.status_code == 200, reply.text
    return validated(reply.json())


def _extras(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{where}.{name}".lstrip(".") for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name), name)
    elif isinstance(value, list):
        for item in value:
            yield from _extras(item, where)
