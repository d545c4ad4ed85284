"""The GAN of lesson 09: who is skipped, its images, and the checks of its exercises."""

import zlib
from typing import Any

import pytest
import torch

from amplab.lessons import lesson_09
from amplab.lessons.lesson_09 import judged

REAL, FAKE, GENERATOR = lesson_09.LOSSES


def generator_step(
    *,
    zero: bool = True,
    freeze: bool = True,
    melt: bool = True,
    step: bool = True,
    loss_id: int = 2,
    target: float = 1.0,
) -> Any:
    """Return the solution of exercise 3, or one of its mistakes."""

    def run(discriminator: Any, generator: Any, optimizer: Any, noise: Any, scale_loss: Any) -> None:
        if zero:
            optimizer.zero_grad()
        discriminator.requires_grad_(not freeze)
        with scale_loss(judged(discriminator(generator(noise)), target), optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
        if step:
            optimizer.step()
        discriminator.requires_grad_(melt)

    return run


@pytest.mark.parametrize(
    ("overflows", "stepped", "halved"),
    [
        ("none", (True, True), []),
        (REAL, (False, True), [0]),
        (FAKE, (False, True), [1]),
        (GENERATOR, (True, False), [2]),
    ],
)
def test_an_overflow_skips_its_optimizer_and_halves_its_scale(
    overflows: str, stepped: tuple[bool, bool], halved: list[int]
) -> None:
    own, shared = lesson_09.one_iteration(overflows, 3), lesson_09.one_iteration(overflows, 1)
    assert own.stepped == shared.stepped == stepped
    assert [place for place, (before, after) in enumerate(own.scales) if after == before / 2] == halved
    assert (shared.scales[0][1] == shared.scales[0][0] / 2) is bool(halved)


def test_the_explorer_names_who_is_skipped() -> None:
    explorer = lesson_09.skip_explorer()
    explorer.set(overflows=GENERATOR, num_losses=1)
    assert "generator is skipped" in repr(explorer)
    assert explorer.payload["html"].count("2¹⁶ → 2¹⁵") == 3  # the one scale, shown for each loss


def test_one_scale_is_held_down_by_the_largest_gradients() -> None:
    own, _ = lesson_09.train_gan(3, steps=40)
    (shared,) = lesson_09.train_gan(1, steps=40)[0].values()
    assert max(own[GENERATOR]) > max(own[REAL]) >= max(shared)


def test_images_are_a_png_of_their_pixels() -> None:
    images = torch.tensor([0.0, 1.0, 1.0, 0.0]).reshape(1, 1, 2, 2)
    shown = lesson_09.Images(images)
    file = shown._repr_png_()
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    start = file.index(b"IDAT")
    length = int.from_bytes(file[start - 4 : start], "big")
    lines = zlib.decompress(file[start + 4 : start + 4 + length])
    width = 4 * 6
    assert len(lines) == width * (width + 1)
    seventh = lines[6 * (width + 1) : 7 * (width + 1)]  # the first line below the frame
    assert list(seventh) == [0] + [0] * 12 + [255] * 6 + [0] * 6
    assert repr(shown) == "1 images of 2 × 2"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (("discriminator", [1]), "Right"),
        (..., "Not answered yet"),
        (("generator", [1]), "was not passed"),
        (("discriminator", [0, 1]), "only the scale of the loss"),
        (("both", [1]), "'both' has no optimizer here"),
        (("discriminator", 1), "answer[1] = 1 is not a list: write a name and a list"),
        (("discriminator", ["1"]), "answer[1][0] = '1' is not a whole number"),
        (("discriminator",), "('discriminator',) is not 2 values in parentheses"),
        (None, "None is not 2 values in parentheses: write a name and a list"),
    ],
)
def test_check_skipped(answer: Any, said: str) -> None:
    assert said in repr(lesson_09.check_skipped(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"num_losses": 2, "class": 1, "box": 0}, "Right"),
        ({"num_losses": ..., "class": ..., "box": ...}, "Not answered yet"),
        ({"num_losses": 1, "class": 0, "box": 0}, "losses are counted"),
        ({"num_losses": 2, "class": 0, "box": 0}, "share a scale"),
        ({"num_losses": 2, "class": 1, "box": 2}, "loss_id 2 does not exist"),
        ({"num_losses": 2, "class": 1, "box": -1}, "loss_id -1 does not exist"),
        ({"num_losses": "2", "class": 1, "box": 0}, "answer['num_losses'] = '2' is not a whole number"),
        ({"num_losses": 2, "class": 1, "box": 0, "mask": 1}, "has the key 'mask'"),
        ({"num_losses": 2}, "the answer lacks 'class': the keys"),
    ],
)
def test_check_num_losses(answer: Any, said: str) -> None:
    assert said in repr(lesson_09.check_num_losses(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (generator_step(), "Right"),
        (..., "Not answered yet"),
        (generator_step(freeze=False), "still has gradients"),
        (generator_step(step=False), "did not change"),
        (generator_step(zero=False), "of an earlier step"),
        (generator_step(melt=False), "would never learn again"),
        (generator_step(loss_id=0), "loss_id=2"),
        (generator_step(target=0.0), "takes for real"),
        (lambda _model: None, "your function raised TypeError"),
    ],
)
def test_check_generator_step(answer: Any, said: str) -> None:
    assert said in repr(lesson_09.check_generator_step(answer))
