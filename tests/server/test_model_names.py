from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.harness import ServerProcess, fake_server, openai_client


@pytest.fixture(scope="module")
def named_server() -> Iterator[ServerProcess]:
    yield from fake_server(flags=["--served-model-name", "first", "org/second"])


def test_requests_may_use_any_name_and_replies_have_the_first(named_server: ServerProcess) -> None:
    client = openai_client(named_server)
    for name in ("first", "org/second"):
        assert client.completions.create(model=name, prompt="ab", max_tokens=2).model == "first"
    with pytest.raises(openai.NotFoundError, match="'third' is not served here; use 'first'"):
        client.completions.create(model="third", prompt="ab")


def test_all_names_are_listed_and_can_be_looked_up(named_server: ServerProcess) -> None:
    client = openai_client(named_server)
    assert [(card.id, card.root) for card in client.models.list()] == [("first", "first"), ("org/second", "first")]  # type: ignore[attr-defined]
    assert client.models.retrieve("org/second").id == "org/second"
