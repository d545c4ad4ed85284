"""A norm of one's own in half, batches that arrive, and the checks of lesson 11."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from amplab.amp import custom_bwd, custom_fwd
from amplab.lessons import lesson_11


class Square(Function):
    """The function of exercise 1 without decorators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0]


class WrongGradient(Square):
    """Decorated, with a backward that is half of what it should be."""

    forward = staticmethod(custom_fwd(Square.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(custom_bwd(lambda ctx, grad: grad * ctx.saved_tensors[0], device_type="cpu"))


class NoBackwardDecorator(Square):
    """Only forward is decorated."""

    forward = staticmethod(custom_fwd(Square.forward, device_type="cpu", cast_inputs=torch.float32))


class Batch:
    """Images and labels without ``to``."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels


class RightBatch(Batch):
    """The solution of exercise 2."""

    def to(self, target: Any) -> "RightBatch":
        labels = self.labels if isinstance(target, torch.dtype) else self.labels.to(target)
        return RightBatch(self.images.to(target), labels)


class CarelessBatch(Batch):
    """Casts the labels, too."""

    def to(self, *args: Any) -> "CarelessBatch":
        return CarelessBatch(self.images.to(*args), self.labels.to(*args))


def with_forward(**options: Any) -> type[Function]:
    """Return `Square` with other arguments of its decorators."""
    forward = staticmethod(custom_fwd(Square.forward, **options))
    backward = staticmethod(custom_bwd(Square.backward, device_type=options["device_type"]))
    return type("Decorated", (Square,), {"forward": forward, "backward": backward})


def with_torchs_decorator() -> type[Function]:
    forward = torch.amp.custom_fwd(Square.forward, device_type="cpu", cast_inputs=torch.float32)
    return type("Decorated", (Square,), {"forward": staticmethod(forward)})


class HalfInside(Square):
    """Is decorated, and makes its float32 input half."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.half() * x.half()


class NotATensor(Square):
    """Returns nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> None: ...


class ChangedBatch(Batch):
    """Changes itself."""

    def to(self, target: Any) -> "ChangedBatch":
        self.images = self.images.to(target)
        return self


class UncastBatch(Batch):
    """Ignores the dtype."""

    def to(self, _target: Any) -> "UncastBatch":
        return self


class LeftBehind(Batch):
    """Moves the images alone."""

    def to(self, target: Any) -> "LeftBehind":
        return LeftBehind(self.images.to(target), self.labels)


class AnotherBatch(Batch):
    """Returns something else."""

    def to(self, _target: Any) -> object:
        return object()


class RaisingBatch(Batch):
    """Cannot be cast."""

    def to(self, target: Any) -> None:
        raise KeyError(target)


class LostBatch(Batch):
    """Returns nothing."""

    def to(self, _target: Any) -> None: ...


def test_the_norm_has_the_gradients_of_its_formula() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lesson_11.RmsNorm.apply, (x,))
    torch.testing.assert_close(lesson_11.RmsNorm.apply(x), lesson_11.rms_norm(x))


def test_in_half_the_norm_is_wrong_at_both_ends_and_in_float32_at_none() -> None:
    plain, decorated = lesson_11.output_sizes(False), lesson_11.output_sizes(True)
    assert plain[-1] == 0.0
    assert not 0.9 < plain[0] < 1.1
    assert plain[-lesson_11.GAINS[0]] == pytest.approx(1, rel=0.01)
    assert decorated == pytest.approx([1.0] * len(lesson_11.GAINS), rel=0.02)


def test_the_explorer_shows_the_size_of_the_output() -> None:
    explorer = lesson_11.norm_explorer()
    explorer.set(gain=10)
    assert "output 0.00" in repr(explorer)
    explorer.set(decorators="custom_fwd(cast_inputs=torch.float32)")
    assert "output 1.00" in repr(explorer)


def test_batches_arrive_as_the_lesson_says() -> None:
    images, labels = torch.rand(2, 64), torch.tensor([2049, 7])
    for kind, dtype in (
        (lesson_11.TupleBatch, torch.float16),
        (lesson_11.DataBatch, torch.float16),
        (Batch, torch.float32),
    ):
        seen = lesson_11.arriving(kind(images, labels))
        assert (type(seen), seen.images.dtype, seen.labels.dtype) == (kind, dtype, torch.int64)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lesson_11.in_float32(Square), "Right"),
        (..., "Not answered yet"),
        (Square, "still computes in half. It has no decorator"),
        (with_forward(device_type="cpu"), "Its decorator has cast_inputs=None"),
        (with_forward(device_type="cpu", cast_inputs=torch.float16), "Its decorator has cast_inputs=torch.float16"),
        (with_forward(device_type="cuda", cast_inputs=torch.float32), "device_type='cuda', and these tensors are on"),
        (with_torchs_decorator(), "Its decorator is that of torch"),
        (HalfInside, "leave out what makes them half"),
        (None, "None is not a subclass of Function: run the cell"),
        (torch.relu, "is not a subclass of Function"),
        (Function, "your function raised NotImplementedError"),
        (NotATensor, "forward returned None: expected x * x, a tensor"),
        (WrongGradient, "is 600, not 300"),
        (NoBackwardDecorator, "backward has no decorator"),
    ],
)
def test_check_function(answer: Any, said: str) -> None:
    assert said in repr(lesson_11.check_function(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RightBatch, "Right"),
        (..., "Not answered yet"),
        (Batch, "has no method to"),
        (CarelessBatch, "label 2049 is now 2048"),
        (ChangedBatch, "changed the batch itself"),
        (UncastBatch, "the images arrive in torch.float32"),
        (LeftBehind, "has to move the images and the labels"),
        (LostBatch, "to returned None: it has to return a batch"),
        (AnotherBatch, "it has to return a batch with the tensors images and labels"),
        (RaisingBatch, "your function raised KeyError"),
        (3, "3 is not a function: complete MyBatch"),
    ],
)
def test_check_batch(answer: Any, said: str) -> None:
    assert said in repr(lesson_11.check_batch(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (("half", "float", "promote"), "Right"),
        ((..., ..., ...), "Not answered yet"),
        (("float", "float", "promote"), "my_matmul: 'float' does not fit"),
        (("half", "half", "promote"), "my_rms_norm: 'half' does not fit"),
        (("half", "float", "half"), "my_residual: 'half' does not fit"),
        (("half", "float", "int8"), "'int8' is none of"),
    ],
)
def test_check_registrations(answer: Any, said: str) -> None:
    names = ("my_matmul", "my_rms_norm", "my_residual")
    assert said in repr(lesson_11.check_registrations(dict(zip(names, answer, strict=True))))
