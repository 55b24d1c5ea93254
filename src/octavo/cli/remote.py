"""A model behind a running server with the OpenAI API, asked over HTTP with the standard library alone."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from octavo.cli.text_models import Piece
from octavo.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from octavo.core.records import SamplingParams

TIMEOUT_SECONDS = 600  # without a word from the server
# Sent only where they differ from the default, for not every server knows all of them.
OPTIONAL_FIELDS = (
    *("top_k", "min_p", "min_tokens", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
DEFAULTS = SamplingParams()


class RemoteModel:
    """The text side of one server. Its methods raise ConfigError if it cannot be reached."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        """model: to ask for; None: the first that the server lists."""
        try:
            parts = urllib.parse.urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # no address, or no number as the port
            good = False
        if not good:
            raise ConfigError(f"--url is {url!r}; it must look like http://127.0.0.1:8000")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has characters that no header can have: look for a line break at its end")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._netloc = parts.netloc
        self._base = urllib.parse.quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%")

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Generator[Piece]:
        """The continuation of a prompt, piece by piece."""
        with closing(self._choices("/v1/completions", {"prompt": prompt}, sampling_params)) as choices:
            for choice in choices:
                yield Piece(choice["text"] or "")

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams) -> Generator[Piece]:
        """The answer to a conversation, piece by piece."""
        with closing(self._choices("/v1/chat/completions", {"messages": messages}, sampling_params)) as choices:
            for choice in choices:
                delta = choice.get("delta") or {}
                if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield Piece(reasoning, is_reasoning=True)
                if content := delta.get("content"):
                    yield Piece(content)

    def close(self) -> None:
        """Nothing is kept open between two questions."""

    @property
    def name(self) -> str:
        """The model that is asked for. Raises ConfigError if nobody answers."""
        if self._model is None:
            with self._answering() as connection:
                connection.request("GET", self._base + "/v1/models", headers=self._headers)
                reply = connection.getresponse()
                content = reply.read()
                if reply.status != 200:
                    raise _refusal(reply.status, content)
                self._model = str(json.loads(content)["data"][0]["id"])
        return self._model

    def _choices(self, route: str, ask: dict[str, Any], params: SamplingParams) -> Generator[dict[str, Any]]:
        body = {"model": self.name, "stream": True, "temperature": params.temperature, "top_p": params.top_p, **ask}
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        for name in OPTIONAL_FIELDS:
            if (value := getattr(params, name)) != getattr(DEFAULTS, name):
                body[name] = value
        # What was no UTF-8 in the terminal is a lone surrogate here, which JSON should not have.
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        headers = {"Content-Type": "application/json", **self._headers}
        with self._answering() as connection:
            connection.request("POST", self._base + route, content, headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise _refusal(reply.status, reply.read())
            finished = False
            for line in reply:
                field, _, data = line.partition(b":")
                if field != b"data":  # names of events, and comments that keep a connection open
                    continue
                if data.strip() == b"[DONE]":
                    return
                chunk = json.loads(data)
                if error := chunk.get("error"):
                    raise EngineDeadError(str(error["message"]))
                for choice in chunk.get("choices") or ():
                    finished |= choice.get("finish_reason") is not None
                    yield choice
            if not finished:
                raise EngineDeadError("the server broke the answer off: its log may say why")

    @contextmanager
    def _answering(self) -> Iterator[http.client.HTTPConnection]:
        """A connection; what goes wrong with it, or with what is read from it, becomes a ConfigError."""
        with closing(self._connect(self._netloc, timeout=TIMEOUT_SECONDS)) as connection:
            try:
                yield connection
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self._url} answers, but not as an OpenAI-compatible server does") from error
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(f"no answer from {self._url} ({error}): is the server running there?") from error


def _refusal(status: int, content: bytes) -> Exception:
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with status {status}"
    return InvalidRequestError(message) if 400 <= status < 500 else EngineDeadError(message)
