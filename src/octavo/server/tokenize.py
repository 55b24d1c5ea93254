"""POST /tokenize and /detokenize: the model's tokenizer over HTTP, in vLLM's shapes. No engine takes part."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.server.chat import rendered_prompt
from octavo.server.off_loop import off_loop
from octavo.server.protocol import ChatBody
from octavo.server.reading import read_body
from octavo.server.service import Service, read_limited

MAX_TEXT_CHARACTERS = 2_000_000  # about a second of one core
MAX_TOKENS = 1_000_000
OF_CONVERSATIONS = (  # fields that mean what they mean in a chat request
    *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools"),
    "documents",
)


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # None: with a prompt; a chat template writes its own
    add_generation_prompt: bool | None = None  # None: unless continue_final_message
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    documents: list[dict[str, Any]] = []
    return_token_strs: bool = False

    def check(self) -> None:
        """Raises InvalidRequestError for fields that are wrong together."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send either prompt or messages", "prompt")
        if self.messages is not None and not self.messages:
            raise InvalidRequestError("messages is empty: send at least one", "messages")
        for name in OF_CONVERSATIONS:
            if self.messages is None and getattr(self, name):
                raise InvalidRequestError(f"{name} goes with messages: leave it out with a prompt", name)


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]

    def check(self) -> None:
        """Raises InvalidRequestError."""
        if len(self.tokens) > MAX_TOKENS:
            raise InvalidRequestError(
                f"tokens has {len(self.tokens):,} ids, the limit is {MAX_TOKENS:,}: send several requests", "tokens"
            )


class DetokenizeReply(msgspec.Struct):
    prompt: str


def check_length(text: str, param: str) -> None:
    """Raises InvalidRequestError for a text that would take the tokenizer too long."""
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InvalidRequestError(
            f"{param} has {len(text):,} characters, the limit here is {MAX_TEXT_CHARACTERS:,}: send it in parts", param
        )


async def tokenize(service: Service, http: HttpRequest) -> Response:
    body = read_body(await read_limited(http), TokenizeBody)
    service.check_model(body.model)
    if body.messages is not None:
        param, with_special = "messages", bool(body.add_special_tokens)
        conversation = ChatBody(messages=body.messages, **{name: getattr(body, name) for name in OF_CONVERSATIONS})
        conversation.check()
        text = await rendered_prompt(service, conversation)
    else:
        param, with_special = "prompt", body.add_special_tokens is not False
        text = body.prompt or ""
    check_length(text, param)

    def reply() -> bytes:
        tokens = service.frontend.tokenize(text, add_special_tokens=with_special)
        strings = None
        if body.return_token_strs:
            strings = [service.frontend.token_bytes(token).decode("utf-8", "replace") for token in tokens]
        return msgspec.json.encode(TokenizeReply(len(tokens), service.frontend.info.max_model_len, tokens, strings))

    return Response(await off_loop(reply, len(text)), media_type="application/json")


async def detokenize(service: Service, http: HttpRequest) -> Response:
    body = read_body(await read_limited(http), DetokenizeBody)
    service.check_model(body.model)

    def reply() -> bytes:
        return msgspec.json.encode(DetokenizeReply(service.frontend.detokenize(body.tokens)))

    return Response(await off_loop(reply, len(body.tokens)), media_type="application/json")
