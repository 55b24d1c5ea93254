"""What a request's parameters may ask of one model: token ids that it knows, and as many log-probabilities as allowed.

Checked at the door, and once more by the engine. Knows neither prompts nor lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from octavo.core.errors import InvalidRequestError
from octavo.core.records import SamplingParams


def check_token_limits(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """max_logprobs: -1 for no limit. Raises InvalidRequestError naming the field."""
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("bad_words", chain.from_iterable(params.bad_words_token_ids), vocab_size)
    _check_logprobs("logprobs", params.logprobs, vocab_size, max_logprobs)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size, max_logprobs)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise InvalidRequestError(
            f"{param} has {worst}, but the vocabulary ends at {vocab_size - 1}: remove it", param=param
        )


def _check_logprobs(param: str, wanted: int | None, vocab_size: int, limit: int) -> None:
    if wanted is None or limit < 0:
        return
    if wanted == -1 and vocab_size > limit:
        what = f"-1, the whole vocabulary of {vocab_size:,}"
    elif wanted > limit:
        what = f"{wanted:,}"
    else:
        return
    raise InvalidRequestError(
        f"{param} is {what}; the limit is {limit:,}: ask for fewer, or start with a larger --max-logprobs", param=param
    )
