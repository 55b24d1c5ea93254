"""A model behind a running server with the OpenAI API, asked over HTTP with the standard library alone."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from octavo.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from octavo.core.records import SamplingParams

TIMEOUT_SECONDS = 600  # without a word from the server


class RemoteModel:
    """The text side of one server. Raises ConfigError if it cannot be reached."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # no address, or no number as the port
            good = False
        if not good:
            raise ConfigError(f"--url is {url!r}; it must look like http://127.0.0.1:8000")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._netloc = parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Generator[str]:
        """The continuation of a prompt, piece by piece."""
        for choice in self._choices("/v1/completions", {"prompt": prompt}, sampling_params):
            yield choice["text"]

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams) -> Generator[str]:
        """The answer to a conversation, piece by piece."""
        for choice in self._choices("/v1/chat/completions", {"messages": messages}, sampling_params):
            yield choice["delta"].get("content") or ""

    def close(self) -> None:
        """Nothing is kept open between two questions."""

    def _choices(self, route: str, ask: dict[str, Any], params: SamplingParams) -> Generator[dict[str, Any]]:
        with closing(self._connect(self._netloc, timeout=TIMEOUT_SECONDS)) as connection:
            try:
                model = self._get_model(connection)
                body = {"model": model, "stream": True, "temperature": params.temperature, "top_p": params.top_p, **ask}
                if params.max_tokens is not None:
                    body["max_tokens"] = params.max_tokens
                # What was no UTF-8 in the terminal is a lone surrogate here, which JSON should not have.
                content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
                headers = {"Content-Type": "application/json", **self._headers}
                connection.request("POST", self._base + route, content, headers)
                reply = connection.getresponse()
                if reply.status != 200:
                    raise _refusal(reply.status, reply.read())
                for line in reply:
                    data = line.strip().removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    if data:
                        chunk = json.loads(data)
                        if "error" in chunk:
                            raise EngineDeadError(chunk["error"]["message"])
                        yield from chunk["choices"]
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(f"{self._url} answers, but not as an OpenAI-compatible server does") from error
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(f"no answer from {self._url} ({error}): is the server running there?") from error

    def _get_model(self, connection: http.client.HTTPConnection) -> str:
        connection.request("GET", self._base + "/v1/models", headers=self._headers)
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise _refusal(reply.status, content)
        return str(json.loads(content)["data"][0]["id"])


def _refusal(status: int, content: bytes) -> Exception:
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with status {status}"
    return InvalidRequestError(message) if 400 <= status < 500 else EngineDeadError(message)
