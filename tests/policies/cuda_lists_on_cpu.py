"""torch.autocast("cpu") made to follow CUDA's lists, for the rest of the process: an oracle where no GPU is.

The lists are read from torch's own header, and kernels that cast as it describes are put under the dispatch key of
CPU autocast. They act on ATen ops, inside composites too, as torch.autocast("cuda") does on a GPU; nothing of amplab
takes part. As a script it runs every row of the torch_cuda table against that and prints where the two differ, as JSON.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["HEADER", "compare", "follow_cuda_lists", "header_lists"]

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_ELIGIBLE = (torch.float16, torch.bfloat16, torch.float32)


def header_lists() -> dict[str, list[str]]:
    """Policy -> the ops, with overload, that torch's header lists under it for every accelerator."""
    text = HEADER.read_text()
    found = {"append_dtype": ["norm.Scalar", "norm.ScalarOpt_dim"], "banned": ["binary_cross_entropy.default"]}
    for policy in ("lower_precision_fp", "fp32", "fp32_set_opt_dtype", "promote"):
        body = re.search(rf"#define AT_FORALL_{policy.upper()}\(_\)(.*?[^\\])\n", text, re.DOTALL)[1]
        entries = re.findall(r"\s_\((\w+)(?:,\s*(\w+))?\)", body)
        found[policy] = [f"{op}.{overload or 'default'}" for op, overload in entries]
    if hasattr(torch.ops.aten, "linalg_matrix_sqrth"):  # registered without a list, from torch 2.14 on
        found["fp32"].append("linalg_matrix_sqrth.default")
    return found


def follow_cuda_lists() -> torch.library.Library:
    """Put CUDA's lists under CPU autocast; they stay as long as what is returned."""
    library = torch.library.Library("aten", "IMPL")
    listed = {name: policy for policy, names in header_lists().items() for name in names}
    for name, policy in listed.items():
        op, _, overload = name.partition(".")
        kernel = _kernel(getattr(getattr(torch.ops.aten, op), overload), policy)
        library.impl(name.removesuffix(".default"), kernel, "AutocastCPU", allow_override=True)
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    for name in (name.removeprefix("aten::") for name in registered):
        if name not in listed and f"{name}.default" not in listed:
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    return library


def _kernel(op: Callable, policy: str) -> Callable:
    def kernel(*args: object, **kwargs: object) -> object:
        with torch._C._ExcludeDispatchKeyGuard(_CPU):
            return _CARRIED_OUT[policy](op, args, kwargs)

    return kernel


def _eligible(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _ELIGIBLE


def _cast(op: Callable, args: tuple, kwargs: dict, dtype: torch.dtype) -> object:
    args, kwargs = tree_map(lambda value: value.to(dtype) if _eligible(value) else value, (args, kwargs))
    return op(*args, **kwargs)


def _lower(op: Callable, args: tuple, kwargs: dict) -> object:
    return _cast(op, args, kwargs, torch.get_autocast_dtype("cpu"))


def _fp32(op: Callable, args: tuple, kwargs: dict) -> object:
    return _cast(op, args, kwargs, torch.float32)


def _set_dtype(op: Callable, args: tuple, kwargs: dict) -> object:
    chosen = kwargs.get("dtype") or next((value for value in args if isinstance(value, torch.dtype)), None)
    return op(*args, **({**kwargs, "dtype": torch.float32} if _eligible(args[0]) and not chosen else kwargs))


def _append_dtype(op: Callable, args: tuple, kwargs: dict) -> object:
    if not _eligible(args[0]):
        return op(*args, **kwargs)
    if op is torch.ops.aten.norm.Scalar:
        return torch.ops.aten.norm.ScalarOpt_dtype(*args, *([2] if len(args) < 2 else []), dtype=torch.float32)
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(*args, *([False] if len(args) < 4 else []), dtype=torch.float32)


def _promote(op: Callable, args: tuple, kwargs: dict) -> object:
    wide = any(_eligible(value) and value.dtype is torch.float32 for value in tree_leaves((args, kwargs)))
    return _cast(op, args, kwargs, torch.float32 if wide else torch.get_autocast_dtype("cpu"))


def _banned(op: Callable, args: tuple, kwargs: dict) -> object:
    raise RuntimeError("unsafe to autocast")


_CARRIED_OUT = {
    "lower_precision_fp": _lower,
    "fp32": _fp32,
    "fp32_set_opt_dtype": _set_dtype,
    "append_dtype": _append_dtype,
    "promote": _promote,
    "banned": _banned,
}


def compare(lower: torch.dtype) -> dict[str, dict[str, str]]:
    """Op -> mixture -> how the engine with the torch_cuda table differs from torch with CUDA's lists."""
    from op_calls import CALLS
    from whole_table import MIXTURES, differences, outcome

    from amplab.policies import TORCH_CUDA, CastingEngine, PrecisionPolicy, cpu_half

    engine = CastingEngine(PrecisionPolicy("torch_cuda", lower))

    @contextmanager
    def ours() -> object:
        with cpu_half("native"), engine.active():
            yield

    def both(op: str, mixture: str) -> str:
        theirs = outcome(op, mixture, lower, lambda: torch.autocast("cpu", lower))
        return differences(outcome(op, mixture, lower, ours), theirs)

    rows = [row.op for row in TORCH_CUDA.rows if row.op in CALLS]
    found = {op: {mixture: both(op, mixture) for mixture in MIXTURES} for op in rows}
    return {op: {mixture: said for mixture, said in by.items() if said} for op, by in found.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    library = follow_cuda_lists()
    json.dump({str(dtype): compare(dtype) for dtype in (torch.bfloat16, torch.float16)}, sys.stdout)
