from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.server.harness import ServerProcess, fake_server, metric, openai_client, wait_until

FLAGS = ("--stream-interval", "4", "--max-num-queued-reqs", "2", "--uvicorn-log-level", "warning")


@pytest.fixture(scope="module")
def flagged_server() -> Iterator[ServerProcess]:
    yield from fake_server(0.005, flags=FLAGS)


def test_a_chunk_waits_for_the_interval_unless_it_is_the_first_or_the_last(flagged_server: ServerProcess) -> None:
    stream = openai_client(flagged_server).completions.create(
        model="echo", prompt="abcdef", max_tokens=11, stream=True, logprobs=1
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.text for choice in choices] == ["a", "bcde", "fabc", "de"]
    assert [len(choice.logprobs.tokens) for choice in choices] == [1, 4, 4, 2]
    assert [choice.finish_reason for choice in choices] == [None, None, None, "length"]


def test_the_interval_changes_no_reply_that_comes_whole(flagged_server: ServerProcess) -> None:
    reply = openai_client(flagged_server).completions.create(model="echo", prompt="abc", max_tokens=7, logprobs=1)
    assert reply.choices[0].text == "abcabca"
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.completion_tokens == 7


def test_more_requests_than_may_wait_are_told_to_come_again(flagged_server: ServerProcess) -> None:
    client = openai_client(flagged_server)

    def ask(prompts: object) -> object:
        return client.completions.create(model="echo", prompt=prompts, max_tokens=60)  # type: ignore[call-overload]

    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, ["ab", "cd"])
        wait_until(lambda: metric(flagged_server, "num_requests_running") == 2)
        with pytest.raises(openai.InternalServerError, match=r"2 requests run or wait and 1 would come") as refused:
            ask("ef")
        assert (refused.value.status_code, refused.value.code) == (503, "overloaded")
        first.result()
    wait_until(lambda: metric(flagged_server, "num_requests_running") == 0)
    ask("ef")


def test_lines_of_requests_need_the_level(flagged_server: ServerProcess) -> None:
    openai_client(flagged_server).models.list()
    assert "GET /v1/models" not in flagged_server.log
