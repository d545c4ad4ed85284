"""The tests of a lesson hear, of each of its exercises, a right answer, a wrong one, and one that is still open."""

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from course import Heard, unheard

from amplab.lessons.exercises import Exercise, Verdict


@pytest.fixture(autouse=True, scope="module")
def every_verdict_is_heard(request: pytest.FixtureRequest) -> Iterator[None]:
    """After all tests of a lesson have passed, fail if a verdict was not heard; parts of a file are not judged."""
    number = re.search(r"test_lesson_(\d\d)$", request.module.__name__)
    if number is None or _is_part(request):
        yield
        return
    heard: Heard = []
    answer = Exercise.__call__

    def listen(self: Exercise, *answers: Any, **further: Any) -> Verdict:
        verdict = answer(self, *answers, **further)
        heard.append((self.name, verdict))
        return verdict

    failed = request.session.testsfailed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exercise, "__call__", listen)
        yield
    module = importlib.import_module(f"amplab.lessons.lesson_{number[1]}")
    names = [each.name for each in vars(module).values() if isinstance(each, Exercise)]
    if request.session.testsfailed == failed:
        assert unheard(names, heard) == []


def _is_part(request: pytest.FixtureRequest) -> bool:
    """Return whether only some tests of a file were asked for."""
    config = request.config
    return bool(
        config.option.keyword or config.getoption("lf", default=False) or any("::" in each for each in config.args)
    )
