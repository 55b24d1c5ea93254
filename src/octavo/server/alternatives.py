"""How many log-probabilities replies may hold: those of prompts, and of answers for which more than a few are wanted.

They wait here until a reply is whole, and each takes some hundred bytes by then. Knows nothing of reply shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.errors import InvalidRequestError
from octavo.core.records import Request
from octavo.engine.limits import num_alternatives
from octavo.server.errors import ApiError

MAX_OF_A_REQUEST = 1 << 19  # all prompts of one HTTP request together: a reply of some 40 MB
MAX_HELD = 1 << 21  # all HTTP requests together


class Alternatives:
    """Counts what is held, and says no before there is too much."""

    def __init__(self, vocab_size: int, limit: int = MAX_HELD) -> None:
        self._vocab_size = vocab_size
        self._limit = limit
        self.num_held = 0

    def take(self, requests: Sequence[Request]) -> list[Callable[[], None]]:
        """Makes room for what these will hold; returns for each what gives it back, to be called once or more often.

        Raises InvalidRequestError if they ask for too much, ApiError 503 if others hold so much now.
        """
        counts = [num_alternatives(request, self._vocab_size) for request in requests]
        wanted = sum(counts)
        if wanted > MAX_OF_A_REQUEST:
            of_prompt = any(request.params.prompt_logprobs for request in requests)
            raise InvalidRequestError(
                f"{wanted:,} log-probabilities are asked for, the limit is {MAX_OF_A_REQUEST:,} for all tokens and "
                "prompts of a request: ask for fewer at each token, or send shorter or fewer prompts or a smaller "
                "max_tokens",
                "prompt_logprobs" if of_prompt else "logprobs",
            )
        if self.num_held + wanted > self._limit:
            raise ApiError(
                503,
                f"the requests at work hold {self.num_held:,} log-probabilities, the limit is {self._limit:,}: try "
                "again in a moment, or ask for fewer",
                code="overloaded",
            )
        self.num_held += wanted
        return [self._giver(count) for count in counts]

    def _giver(self, count: int) -> Callable[[], None]:
        left = count

        def give_back() -> None:
            nonlocal left
            self.num_held -= left
            left = 0

        return give_back
