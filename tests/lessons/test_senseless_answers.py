"""Every check of every lesson refuses a senseless answer in plain words, and a right answer with one senseless part."""

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, get_origin

import pytest
import torch

from amplab import lessons
from amplab.lessons.exercises import Exercise, Verdict
from amplab.lessons.lesson_13 import group_for_each, network
from amplab.lessons.lesson_15 import TOOLS
from amplab.optimizers import merge_groups

MODULES = [importlib.import_module(f"amplab.lessons.{each.name}") for each in pkgutil.iter_modules(lessons.__path__)]
EXERCISES = {each.name: each for module in MODULES for each in vars(module).values() if isinstance(each, Exercise)}
MODEL = network(hidden=1)
WEIGHTS, BIASES = merge_groups(group_for_each(MODEL))
FURTHER = {"13-3": (MODEL,)}  # what a cell passes beside the answer

SENSELESS: dict[str, Any] = {
    "None": None,
    "empty string": "",
    "string": "x",
    "empty list": [],
    "list of None": [None, None],
    "empty tuple": (),
    "pair of an object and a number": (object(), 3),
    "empty dict": {},
    "dict": {"x": None},
    "dict with other keys": {3: "x", (1, 2): None},
    "empty set": set(),
    "nan": math.nan,
    "inf": math.inf,
    "negative": -3,
    "zero": 0,
    "huge": 2**5000,
    "tiny": 5e-324,
    "a half": 0.3,
    "True": True,
    "complex": 1j,
    "tensor": torch.ones(2, 3),
    "tensor without dimensions": torch.tensor(math.nan),
    "tensor without values": torch.empty((), device="meta"),
    "function": lambda: None,
    "function of anything": lambda *_, **__: None,
    "function that returns text": lambda *_, **__: "x",
    "class": object,
    "object": object(),
    "bytes": b"x",
    "module": math,
}
RIGHT: dict[str, Any] = {
    "01-2": ["float32", "tf32", "bfloat16"],
    "04-1": {"O1": ("float32",) * 3, "O2": ("float16", "float32", "float32"), "O3": ("float16",) * 3},
    "04-2": {"keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"},
    "05-1": dict(
        zip(
            ("wide @ wide", "half.exp()", "half.relu()", "half + wide", "half.mean()"),
            ("half", "float32", "half", "float32", "half"),
            strict=True,
        )
    ),
    "09-1": ("discriminator", [1]),
    "09-2": {"num_losses": 2, "class": 0, "box": 1},
    "10-2": (250, 2000),
    "11-3": {"my_matmul": "half", "my_rms_norm": "float", "my_residual": "promote"},
    "12-1": ["scale", "backward", "unscale_", "clip", "step", "update"],
    "12-3": {**torch.amp.GradScaler("cpu").state_dict(), "scale": 32768.0, "_growth_tracker": 12},
    "13-3": [WEIGHTS, {"params": BIASES["params"]}],
    "14-2": ["backward", "average", "unscale", "clip", "step"],
    "15-3": dict(TOOLS),
}


def is_refused(verdict: Verdict) -> bool:
    """Return whether a verdict is one plain sentence or more against the answer."""
    return not verdict.right and verdict.text.startswith("Not yet: ") and verdict.text.endswith((".", "?"))


def asks_for_a_function(check: Exercise) -> bool:
    return get_origin(next(iter(check.__annotations__.values()))) is Callable or check.name in {"07-3", "08-3"}


def is_equal(part: Any, value: Any) -> bool:
    """Return whether a part is the right one: 0 for 0.0, but not True for 1."""
    numbers = isinstance(part, int | float) and isinstance(value, int | float)
    return numbers and part == value and isinstance(part, bool) == isinstance(value, bool)


def with_one_part(right: Any, part: Any) -> Iterator[Any]:
    """Yield an answer with each of its parts replaced, and without it, and with one more."""
    if isinstance(right, dict):
        for key, value in right.items():
            yield {each: value for each, value in right.items() if each != key}
            if not is_equal(part, value):
                yield {**right, key: part}
            yield from ({**right, key: inner} for inner in with_one_part(value, part))
        yield {**right, "further": part}
    elif isinstance(right, list | tuple):
        for at, value in enumerate(right):
            if not is_equal(part, value):
                yield [*right[:at], part, *right[at + 1 :]]
            yield from ([*right[:at], inner, *right[at + 1 :]] for inner in with_one_part(value, part))
        yield [*right, part]


@pytest.mark.parametrize("name", EXERCISES)
@pytest.mark.parametrize("kind", SENSELESS)
def test_a_senseless_answer_is_refused_in_plain_words(name: str, kind: str) -> None:
    verdict = EXERCISES[name](SENSELESS[kind], *FURTHER.get(name, ()))
    assert is_refused(verdict), verdict.text
    assert "the check raised" not in verdict.text
    if kind not in {"function", "class"}:  # called with arguments that they do not take
        assert "Error" not in verdict.text, verdict.text
    if kind in {"None", "nan", "tensor", "object"}:
        assert verdict.text.removeprefix("Not yet: ").startswith(repr(SENSELESS[kind])[:20])


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_with_a_senseless_part_is_refused_in_plain_words(name: str) -> None:
    further = FURTHER.get(name, ())
    assert EXERCISES[name](RIGHT[name], *further).right
    answers = [answer for part in SENSELESS.values() for answer in with_one_part(RIGHT[name], part)]
    verdicts = [EXERCISES[name](answer, *further) for answer in answers]
    bad = [each for each in verdicts if not is_refused(each) or "raised" in each.text]
    assert bad == []


def test_every_exercise_is_tried() -> None:
    assert len(EXERCISES) >= 54
    assert {name[:2] for name in EXERCISES} == {f"{number:02}" for number in range(17)}
    assert EXERCISES.keys() >= RIGHT.keys()


def test_what_is_no_refusal() -> None:
    for text in ("Right.", "Not yet: Traceback", "None."):
        assert not is_refused(Verdict(text, right=False))
    assert not is_refused(Verdict("Not yet: no.", right=True))


def test_each_part_of_an_answer_is_replaced() -> None:
    assert list(with_one_part({"a": (1, 2)}, 0)) == [
        {}, {"a": 0}, {"a": [0, 2]}, {"a": [1, 0]}, {"a": [1, 2, 0]}, {"a": (1, 2), "further": 0},
    ]  # fmt: skip
    assert list(with_one_part([1.0], 1)) == [[1.0, 1]]
    assert list(with_one_part([1], True)) == [[True], [1, True]]
