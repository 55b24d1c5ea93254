"""Log-probabilities in the two shapes of OpenAI's API. Pure functions of token ids, numbers and token bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.records import TokenLogprobs
from octavo.server.replies import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API uses the same floor

TokenBytes = Callable[[int], bytes]


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> ChatLogprobs:
    """One entry for each of `token_ids`, with its alternatives, best first."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                *_token(token_bytes(token_id), entry.logprob),
                [
                    TokenLogprob(*_token(token_bytes(t), p))
                    for t, p in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    token_bytes: TokenBytes,
    visible_bytes: TokenBytes,
    text_offset: int,
) -> tuple[CompletionLogprobs, int]:
    """Four parallel lists, and the offset after the last token.

    An offset is the number of characters of the reply before the token; `text_offset` is that of the first one. A
    character belongs to the token that begins it. The alternatives always include the chosen token.
    """
    result = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        name = _token_name(token_bytes(token_id))
        chosen = max(entry.logprob, LEAST_LOGPROB)
        result.tokens.append(name)
        result.token_logprobs.append(chosen)
        result.text_offset.append(text_offset)
        top = {
            _token_name(token_bytes(t)): max(p, LEAST_LOGPROB)
            for t, p in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        top.setdefault(name, chosen)
        result.top_logprobs.append(top)
        text_offset += sum(byte & 0xC0 != 0x80 for byte in visible_bytes(token_id))
    return result, text_offset


def _token(raw: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return raw.decode("utf-8", errors="replace"), max(logprob, LEAST_LOGPROB), list(raw)


def _token_name(raw: bytes) -> str:
    """The token as text, or its bytes in hexadecimal if it is part of a character: names of two tokens differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
