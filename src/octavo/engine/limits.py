"""What a request's parameters may ask of one model: token ids that it knows, and as many log-probabilities as allowed.

Checked at the door, and once more by the engine. Knows neither prompts nor lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from octavo.core.errors import InvalidRequestError
from octavo.core.records import Request, SamplingParams

MAX_ALTERNATIVES = 1 << 22  # in all of an answer, and in all of a prompt; each takes some 70 bytes where it waits
FEW = 20  # alternatives that any token may have, however long an answer may become


def check_token_limits(params: SamplingParams, num_prompt_tokens: int, vocab_size: int, max_logprobs: int) -> None:
    """`params.max_tokens` is resolved; max_logprobs: -1 for no limit. Raises InvalidRequestError naming the field."""
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("bad_words", chain.from_iterable(params.bad_words_token_ids), vocab_size)
    prompt, output = "prompt token", "output token"
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size, max_logprobs, num_prompt_tokens - 1, prompt)
    _check_logprobs("logprobs", params.logprobs, vocab_size, max_logprobs, params.max_tokens or 1, output)


def num_alternatives(request: Request, vocab_size: int) -> int:
    """How many alternatives of tokens a client may be told that waits for the end; those of an answer if not FEW."""
    params = request.params
    prompt, output = (
        vocab_size if wanted == -1 else min(wanted or 0, vocab_size)
        for wanted in (params.prompt_logprobs, params.logprobs)
    )
    of_output = output * (params.max_tokens or 1) if output > FEW else 0
    return prompt * (len(request.prompt_token_ids) - 1) + of_output


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise InvalidRequestError(
            f"{param} has {worst}, but the vocabulary ends at {vocab_size - 1}: remove it", param=param
        )


def _check_logprobs(param: str, wanted: int | None, vocab_size: int, limit: int, num_tokens: int, token: str) -> None:
    if wanted is None:
        return
    each = vocab_size if wanted == -1 else min(wanted, vocab_size)
    what = f"-1, the whole vocabulary of {vocab_size:,}" if wanted == -1 else f"{wanted:,}"
    if limit >= 0 and (each if wanted == -1 else wanted) > limit:
        raise InvalidRequestError(
            f"{param} is {what}; the limit is {limit:,}: ask for fewer, or start with a larger --max-logprobs",
            param=param,
        )
    if each * num_tokens > MAX_ALTERNATIVES and (each > FEW or param == "prompt_logprobs"):
        raise InvalidRequestError(
            f"{param} is {what}, for each of {num_tokens:,} {token}s; together the limit is {MAX_ALTERNATIVES:,}: ask "
            "for fewer, or have fewer tokens",
            param=param,
        )
