"""PyTorch's own autocast test lists for CUDA, run through an engine on the CPU, as a script.

They come with torch.testing, whose import freezes torch's backend flags for the rest of the process, hence a
process of their own. Prints, as JSON, how each entry compares with the same call on arguments cast by hand.
"""

import json
import sys

import torch
from torch.nn import functional as F
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from amplab.policies import CastingEngine, PrecisionPolicy, cpu_half

__all__ = ["compare", "entries", "promoted"]

HALF, FLOAT = torch.float16, torch.float32
LISTS = AutocastTestLists(torch.device("cpu"))
EXPECTED = {
    "torch_fp16": (torch, HALF),
    "nn_fp16": (F, HALF),
    "linalg_fp16": (torch.linalg, HALF),
    "methods_fp16": (torch.Tensor, HALF),
    "torch_fp32": (torch, FLOAT),
    "nn_fp32": (F, FLOAT),
    "methods_fp32": (torch.Tensor, FLOAT),
    "torch_need_autocast_promote": (torch, FLOAT),
}
# cuDNN's kernels are on no CPU, and the list's einsum names no arguments for its equation.
IMPOSSIBLE = ("cudnn_convolution", "cudnn_convolution_transpose", "einsum")


def entries() -> list[tuple]:
    """(list, position and name, function or None, args, kwargs, expected dtype) of every entry."""
    found = []
    for part, (home, dtype) in EXPECTED.items():
        for index, (name, args, *rest) in enumerate(getattr(LISTS, part)):
            bare = name.removeprefix("linalg_") if home is torch.linalg else name
            bare = bare.removesuffix("2d") if part == "nn_fp32" else bare
            func = None if name in IMPOSSIBLE else getattr(home, bare)
            kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
            found.append((f"{part}[{index}] {name}", func, args, kwargs, dtype))
    return found


def compare(table: str) -> dict[str, str]:
    """Entry -> "equal", "impossible on a CPU", or what differs from the manual cast under native half."""
    engine = CastingEngine(PrecisionPolicy(table, HALF))
    with cpu_half("native"):
        return {name: _compared(engine, *rest) for name, *rest in entries()}


def promoted(table: str) -> dict[str, str]:
    """Entry of the lists of built-in promotion -> the dtype that comes out, beside the one expected."""
    found = {}
    with CastingEngine(PrecisionPolicy(table, HALF)).active():
        for part, home in (("torch_expect_builtin_promote", torch), ("methods_expect_builtin_promote", torch.Tensor)):
            for index, (name, args, expected) in enumerate(getattr(LISTS, part)):
                result = getattr(home, name)(*args)
                given = result.dtype if isinstance(result, torch.Tensor) else type(result).__name__
                found[f"{part}[{index}] {name}"] = f"{given} {expected}"
    return found


def _compared(engine: CastingEngine, func: object, args: tuple, kwargs: dict, dtype: torch.dtype) -> str:
    if func is None:
        return "impossible on a CPU"
    with engine.active():
        ours = func(*args, **kwargs)
    return "equal" if _same(ours, func(*_cast(args, dtype), **kwargs)) else f"is not the cast to {dtype}"


def _cast(args: object, dtype: torch.dtype) -> object:
    if isinstance(args, torch.Tensor):
        return args.to(dtype) if args.is_floating_point() else args
    return type(args)(_cast(arg, dtype) for arg in args) if isinstance(args, (tuple, list)) else args


def _same(left: object, right: object) -> bool:
    if isinstance(left, tuple):
        return all(map(_same, left, right))
    return left.dtype == right.dtype and torch.equal(left.nan_to_num(), right.nan_to_num())


if __name__ == "__main__":
    tables = ("apex", "torch_cuda")
    json.dump({table: {"cast": compare(table), "promoted": promoted(table)} for table in tables}, sys.stdout)
