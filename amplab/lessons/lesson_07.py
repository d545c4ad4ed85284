"""Lesson 07, the fused unscale: where its kernel is built, hard cases for it, and how its time compares.

build_folder        the folder in which `load_inline` builds a kernel once, kept for the next time
hard_cases, agree   lists of gradients on which kernels often fail, and whether two functions do the same
operators_called    how many operators a function calls
draw_times          the time of a Python loop and of one call, for few and for many tensors
without_compiler    amplab's kernels on a machine that has no compiler
"""

import contextlib
import hashlib
import os
import platform
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amplab.display.charts import Chart, bar_chart
from amplab.kernels.builder import KernelLibrary
from amplab.kernels.builder.cache import building, writable_folder
from amplab.kernels.builder.recipe import Recipe, current_recipe, obstacle, search_path
from amplab.kernels.unscale import multi_tensor_unscale_copy_reference, unscale_
from amplab.lessons.cost import milliseconds
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import shown

__all__ = [
    "CFLAGS",
    "CPP_HEADERS",
    "CUDA_HEADERS",
    "agree",
    "build_folder",
    "builds_cuda",
    "check_least_time",
    "check_schema",
    "check_unscale_copy",
    "draw_times",
    "hard_cases",
    "schema_fault",
    "obstacle",
    "reference",
    "without_compiler",
]

CPP_HEADERS = "#include <cfloat>\n#include <cmath>\n#include <ATen/core/Tensor.h>\n#include <torch/library.h>\n"
CUDA_HEADERS = "#include <ATen/ATen.h>\n#include <c10/cuda/CUDAGuard.h>\n#include <torch/library.h>\n"
CFLAGS = ["-O3", "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native", "-DNDEBUG"]

_Unscale = Callable[[list[Tensor], Tensor, Tensor], Any]
_UnscaleCopy = Callable[[list[Tensor], list[Tensor], Tensor, Tensor], Any]


def reference(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply every gradient by ``inv_scale``, and set ``found_inf`` to 1 if one is not finite.

    Sync: one per tensor.
    """
    for grad in grads:
        grad.mul_(inv_scale)
        if not grad.isfinite().all():
            found_inf.fill_(1.0)


@contextlib.contextmanager
def build_folder(*sources: str) -> Iterator[str]:
    """Yield the folder in which to build ``sources``, with ninja on PATH; other processes wait until the block ends.

    The folder belongs to these sources, flags, torch, Python and CPU. A library that is in it is loaded, not built.
    After a block that raises or is interrupted, this process builds these sources in another folder.
    """
    key = hashlib.sha256("\0".join((*sources, *CFLAGS, current_recipe().key)).encode()).hexdigest()[:32]
    path = os.environ.get("PATH", "")
    with contextlib.ExitStack() as stack:
        folder = writable_folder(key) or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(building(folder))
        place = _next_place(folder)
        (place / "lock").unlink(missing_ok=True)  # of load_inline, which would wait for a builder that was killed
        os.environ["PATH"] = search_path()
        try:
            yield str(place)
        except BaseException:
            _failures[folder] += 1
            raise
        finally:
            os.environ["PATH"] = path


_failures: Counter[Path] = Counter()
"""The failed builds of this process, by folder."""


def _next_place(folder: Path) -> Path:
    """Return a folder in which this process has begun no build that failed.

    `load_inline` notes the sources and the folder of a build before it starts, and does not build them a second time in
    this process, even if there is no library.
    """
    if not (count := _failures[folder]):
        return folder
    place = folder / f"after-{count}"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def builds_cuda() -> bool:
    """Return whether there are a CUDA device and nvcc. Sync: none."""
    return bool(current_recipe().cuda)


def hard_cases() -> dict[str, list[Tensor]]:
    """Return new lists of float32 gradients on which kernels often fail, by name."""
    torch.manual_seed(0)
    first, last = torch.randn(1000), torch.randn(1000)
    first[0], last[-1] = float("inf"), float("nan")
    return {
        "no tensor": [],
        "a tensor without elements": [torch.zeros(0), torch.randn(3)],
        "a tensor of one number": [torch.tensor(3.0)],
        "inf in the first element": [first],
        "NaN in the last element": [torch.randn(7), last],
        "a transposed matrix": [torch.randn(4, 6).T],
        "every second column": [torch.randn(4, 6)[:, ::2]],
    }


def agree(function: _Unscale, expected: _Unscale, grads: list[Tensor], inv_scale: float = 2.0**-16) -> bool:
    """Return whether both functions make the same bits of copies of ``grads``, and leave the memory between alone."""
    results = []
    for each in (function, expected):
        storages = [grad.clone() if grad.is_contiguous() else _with_gaps(grad) for grad in grads]
        found_inf = torch.zeros(1)
        each(storages, found_inf, torch.tensor(inv_scale))
        results.append([found_inf, *(_memory(grad) for grad in storages)])
    return all(torch.equal(*(each.view(torch.int32) for each in pair)) for pair in zip(*results, strict=True))


def _with_gaps(grad: Tensor) -> Tensor:
    """Return a copy with the same strides, and ones in the memory between its elements."""
    memory = torch.ones(1 + sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True)))
    return memory.as_strided(grad.shape, grad.stride()).copy_(grad)


def _memory(grad: Tensor) -> Tensor:
    """Return everything in the storage of ``grad``."""
    return torch.empty(0).set_(grad.untyped_storage())


def schema_fault(operator: Any, *arguments: Any) -> str:
    """Return what `torch.library.opcheck` finds wrong in the schema of an operator; "" if it is true."""
    try:
        torch.library.opcheck(operator, arguments, test_utils="test_schema")
    except Exception as error:  # noqa: BLE001 - the class of the error is private
        return str(error).split(" (")[0]
    return ""


def draw_times(power: int) -> Chart:
    """Draw the times to unscale 2^18 numbers in ``2 ** power`` tensors, as multiples of one multiplication."""
    flat = torch.ones(2**18)
    grads = list(torch.ones(2**18).chunk(2**power))
    found_inf, inv_scale = torch.zeros(1), torch.tensor(1.0 - 2.0**-12)
    bound = milliseconds(lambda: flat.mul_(inv_scale), 0.005)
    times = {
        "Python loop": milliseconds(lambda: reference(grads, found_inf, inv_scale), 0.01),
        "one call": milliseconds(lambda: unscale_(grads, found_inf, inv_scale), 0.01),
    }
    ratios = {name: float(f"{time / bound:.2g}") for name, time in times.items()}
    return bar_chart({**ratios, "the bound": 1.0}, unit="×", label=f"{2**power} tensors: time / time of flat.mul_")


@contextlib.contextmanager
def without_compiler() -> Iterator[KernelLibrary]:
    """Yield amplab's kernels as on a machine that has neither a compiler nor an earlier build."""
    before = {name: os.environ.get(name) for name in ("CXX", "AMPLAB_KERNELS")}
    os.environ.update(CXX="no-such-compiler", AMPLAB_KERNELS="auto")
    try:
        yield KernelLibrary(_never_built)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _never_built() -> Recipe:
    recipe = current_recipe()
    return replace(recipe, cflags=(*recipe.cflags, "-DAMPLAB_LESSON_07"))


@exercise("07-1")
def check_least_time(answer: float) -> str | None:
    """The least time in milliseconds to unscale 25 million float32 gradients in place, at 40 GB per second.

    Right:
        Every gradient is read and written once, 8 bytes, so 200 million bytes.
    """
    elements, bandwidth, right = 25e6, 40e9, 25e6 * 8 / 40e9 * 1e3
    if not 1e-12 < answer < 1e12:
        return f"{answer:g} is not a time in milliseconds: how many bytes move, and how many move in one millisecond?"
    if abs(answer - right) <= 0.01 * right:
        return None
    for wrong, sentence in (
        (right / 2, "each gradient is read and also written"),
        (right / 8, "a float32 has 4 bytes, read and written"),
        (right / 1e3, "this is in seconds; the answer is asked in milliseconds"),
        (right * 1e3, "this is in microseconds; the answer is asked in milliseconds"),
        (right / 4, "this would be right for float16 gradients that are only read"),
    ):
        if abs(answer - wrong) <= 0.01 * wrong:
            return f"{answer:g}: {sentence}."
    return f"{answer:g} ms would be {elements * 8 / (answer / 1e3) / 1e9:.3g} GB/s: expected {bandwidth / 1e9:g} GB/s."


_COPY = {"inputs": False, "outputs": True, "found_inf": True, "inv_scale": False}
_UNMARKED = "Tensor[] inputs, Tensor[] outputs, Tensor found_inf, Tensor inv_scale) -> ()"


@exercise("07-2")
def check_schema(answer: str) -> str | None:
    """The schema of an operator that writes unscaled copies of its inputs to its outputs.

    Form:
        write the schema in quotes, from "(" to "-> ()".

    Right:
        (a!) marks what the operator writes: the outputs and found_inf, and nothing else.
    """
    try:
        schema = torch._C.parse_schema(f"lesson_07::unscale_copy{answer}")
    except RuntimeError as error:
        return f"PyTorch cannot read {shown(answer)}: {str(error).splitlines()[0].rstrip('.')}."
    written = {each.name: each.alias_info is not None and each.alias_info.is_write for each in schema.arguments}
    if written.keys() != _COPY.keys():
        return f"its arguments are {', '.join(written)}: expected {', '.join(_COPY)}."
    for each in schema.arguments:
        if str(each.type) != (expected := "List[Tensor]" if each.name.endswith("puts") else "Tensor"):
            return f"{each.name} is {each.type} now; expected {expected}: only add the marks."
    for name, writes in _COPY.items():
        if written[name] and not writes:
            return f"it says that {name} is written, but the operator only reads it: remove (…!) there."
        if writes and not written[name]:
            return f"it says that {name} is only read; the operator writes it: mark it, such as Tensor(a!)."
    if schema.returns:
        return "it returns something; the operator returns nothing: end with -> ()."
    letters = re.findall(r"\((\w+)!\)", str(schema))
    if len(set(letters)) < len(letters):
        return "outputs and found_inf have the same letter, which says that they may share memory: write (a!) and (b!)."
    unmarked = re.sub(r"\(\w+!\)", "", str(schema)).partition("(")[2]
    if unmarked != _UNMARKED:
        return f"without the marks it is ({unmarked}: expected ({_UNMARKED}. Only add the marks (a!) and (b!)."
    return None


@exercise("07-3")
def check_unscale_copy(answer: _UnscaleCopy) -> str | None:
    """A function of (inputs, outputs, found_inf, inv_scale): half gradients into float32 masters' gradients.

    Form:
        write def answer(inputs, outputs, found_inf, inv_scale).

    Right:
        The gradients become float32 first, so that small ones do not underflow when they are unscaled.
    """
    finite, overflow, invalid = (torch.tensor([1.0, each]).half() for each in (2.0, torch.inf, torch.nan))
    small = torch.tensor([2.0, 2.0**-10]).half()
    for inputs in ([small], [finite, overflow], [overflow, finite], [invalid], *_one_bad_number()):
        if fault := _fault_of_call(answer, inputs):
            return fault
    hint = " It was 1 before the call, and an inf that an earlier call has found stays found: only write 1."
    if fault := _fault_of_call(answer, [finite], found_before=1.0, hint=hint):
        return fault
    # With inv_scale=2^112 the largest half becomes a finite float32, and the sum of two is inf.
    hint = " All of them are finite, also unscaled, but their sum is not: ask each number, as output.isfinite().all()."
    return _fault_of_call(answer, [torch.full((2,), 65504.0).half()], inv_scale=2.0**112, hint=hint)


def _one_bad_number() -> Iterator[list[Tensor]]:
    """Yield three gradients with one inf, -inf or NaN, at each place in turn."""
    for place, bad in product(range(9), (torch.inf, -torch.inf, torch.nan)):
        numbers = torch.arange(1.0, 10.0).half()
        numbers[place] = bad
        yield list(numbers.view(3, 3))


def _fault_of_call(
    answer: _UnscaleCopy,
    inputs: list[Tensor],
    *,
    inv_scale: float = 2.0**-16,
    found_before: float = 0.0,
    hint: str = "",
) -> str | None:
    """Return what a call of an answer to the third exercise does wrong, with the hint if it is found_inf; or None."""
    kept, factor = [each.clone() for each in inputs], torch.tensor(inv_scale)
    outputs = [torch.full(each.shape, 7.0) for each in inputs]
    right = [each.clone() for each in outputs]
    found_inf, expected_inf = torch.tensor([found_before]), torch.tensor([found_before])
    multi_tensor_unscale_copy_reference(inputs, right, expected_inf, factor)
    answer(list(inputs), list(outputs), found_inf, factor)  # what it does to the lists themselves is lost
    if not all(map(_same, inputs, kept)):
        return "it changes the inputs: write only to the outputs, such as output.copy_(…)."
    if fault := _copy_fault(outputs, right):
        return fault
    if not torch.equal(found_inf, expected_inf):
        return f"found_inf is {found_inf.item():g} for inputs {[each.tolist() for each in inputs]}.{hint}"
    return None


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal, NaN included."""
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _copy_fault(outputs: list[Tensor], right: list[Tensor]) -> str | None:
    """Return how the outputs differ from the right ones, or None."""
    for output, expected in zip(outputs, right, strict=True):
        if _same(output, expected):
            continue
        if bool((output == 7).all()):
            return "an output did not change: write into each of them in place, such as output.copy_(…)."
        lost = (output == 0) & (expected != 0)
        if bool(lost.any()):
            number = expected[lost][0].item()
            return f"{number:.2g} became 0: the product was rounded to half. Convert to float32 first, then multiply."
        return f"an output is {output.tolist()}; expected {expected.tolist()}."
    return None
