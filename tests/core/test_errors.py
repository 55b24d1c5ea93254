"""What came from outside, as messages show it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import short_repr, shorten

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON, st.integers(10, 80))
@settings(max_examples=50, deadline=None)
def test_a_short_repr_is_the_repr_cut_short(value: Any, limit: int) -> None:
    assert short_repr(value, limit) == shorten(repr(value), limit)


@pytest.mark.parametrize("value", [["a" * 1000] * 1_000_000, "a" * 100_000_000, {str(i): [i] for i in range(300_000)}])
def test_a_short_repr_of_much_is_made_at_once(value: Any) -> None:
    began = time.thread_time()
    assert short_repr(value).endswith("...")
    assert time.thread_time() - began < 0.005
