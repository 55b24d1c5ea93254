from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.harness import ServerProcess, fake_server, openai_client


@pytest.fixture(scope="package")
def quick_server() -> Iterator[ServerProcess]:
    """Steps take no time. Shared: nobody may break it."""
    yield from fake_server()


@pytest.fixture(scope="package")
def steady_server() -> Iterator[ServerProcess]:
    """A step takes 5 ms, so that a long request is still running when a test looks. Shared."""
    yield from fake_server(0.005)


@pytest.fixture
def own_server() -> Iterator[ServerProcess]:
    """Steps take 5 ms. To be broken by its test."""
    yield from fake_server(0.005)


@pytest.fixture
def client(quick_server: ServerProcess) -> openai.OpenAI:
    return openai_client(quick_server)
