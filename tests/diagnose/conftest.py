"""The tools of `diagnose` ask the default session who casts and scales, so no test may find that of another."""

from collections.abc import Iterator

import pytest

from amplab import amp


@pytest.fixture(autouse=True)
def default_session_is_reset() -> Iterator[None]:
    amp.reset()
    yield
    amp.reset()
