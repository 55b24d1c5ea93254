"""How many log-probabilities may be held: in one request, and in all."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.records import Request, SamplingParams
from octavo.server.alternatives import MAX_OF_A_REQUEST, Alternatives
from octavo.server.errors import ApiError

VOCAB_SIZE = 1000


def request(num_prompt_tokens: int = 11, **params: Any) -> Request:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 100, **params})
    return Request(request_id="a", prompt_token_ids=[1] * num_prompt_tokens, params=sampling, arrival_time=0.0)


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, 0),
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 3}, 30),
        ({"prompt_logprobs": -1}, 10 * VOCAB_SIZE),
        ({"prompt_logprobs": 5000}, 10 * VOCAB_SIZE),
        ({"logprobs": 20}, 0),
        ({"logprobs": 21}, 2100),
        ({"logprobs": -1, "prompt_logprobs": 1}, 100 * VOCAB_SIZE + 10),
    ],
)
def test_what_is_held_is_counted_until_it_is_given_back(params: dict[str, Any], count: int) -> None:
    alternatives = Alternatives(VOCAB_SIZE)
    (first,) = alternatives.take([request(**params)])
    second, third = alternatives.take([request(**params)] * 2)
    assert alternatives.num_held == 3 * count
    for give_back in (second, second, first, third, first):
        give_back()
    assert alternatives.num_held == 0


def test_a_request_that_asks_for_too_much_is_refused_and_holds_nothing() -> None:
    alternatives = Alternatives(VOCAB_SIZE)
    most = request(1 + MAX_OF_A_REQUEST // 8, prompt_logprobs=8)
    alternatives.take([most])[0]()
    for param, requests in (
        ("prompt_logprobs", [most, request(prompt_logprobs=1)]),
        ("logprobs", [request(logprobs=600)] * 9),
    ):
        with pytest.raises(InvalidRequestError, match="the limit is 524,288 for all tokens and prompts") as caught:
            alternatives.take(requests)
        assert caught.value.param == param
    assert alternatives.num_held == 0


def test_all_requests_together_are_told_to_come_again() -> None:
    alternatives = Alternatives(VOCAB_SIZE, limit=100)
    (give_back,) = alternatives.take([request(prompt_logprobs=6)])
    with pytest.raises(ApiError, match="hold 60 log-probabilities, the limit is 100") as caught:
        alternatives.take([request(prompt_logprobs=5)])
    assert caught.value.status == 503
    give_back()
    alternatives.take([request(prompt_logprobs=5)])
