"""For a step that cannot be run again: find the first module output and the first gradient that are inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amplab.diagnose import Finding
from amplab.diagnose.catalogue import finding
from amplab.formats.stored_values import stored_values
from amplab.lab.events import StepRecord
from amplab.policies.nested_tensors import floating_tensors_in
from amplab.policies.signals import is_interrupt
from amplab.scalers.unscaler import local_shard
from amplab.trace.modules import UncopiedHook

__all__ = ["Seen", "StepCheck"]


class Seen(NamedTuple):
    """What was not finite in one step.

    Attributes:
        output: path of the first module whose output was not finite, "(model)" for the model; None if all were finite.
        gradient: the first parameter, in the order of backward, whose gradient was not finite; None if all were
            finite.
    """

    output: str | None
    gradient: str | None


class StepCheck:
    """Checks every module's output and every parameter's gradient until `seen` is called, which removes the hooks.

    Scripted modules take no hooks: what is not finite in one is seen at the next module. A check that fails ends, is
    told, and shows nothing.

    Args:
        model: the model.
        fail: called with a sentence if the check fails; the loop goes on.

    Sync: one, when `seen` is called.
    """

    def __init__(self, model: nn.Module, fail: Callable[[str], object]) -> None:
        self._fail = fail
        self._outputs: list[tuple[str, Tensor]] = []
        self._gradients: list[tuple[str, Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        with self._guarded():
            for path, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    self._hooks.append(module.register_forward_hook(self._look(path or "(model)")))
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    self._hooks.append(weight.register_post_accumulate_grad_hook(self._take(name)))

    def seen(self) -> Seen:
        """Return the result and remove the hooks."""
        self.end()
        output = gradient = None
        with self._guarded():
            output, gradient = _first_bad(self._outputs), _first_bad(self._gradients)
        return Seen(output, gradient)

    def findings(self, record: StepRecord, skips: int, *, has_loss: bool) -> list[Finding]:
        """Return the findings about `skips` skipped steps in a row, of which the step of `record` is the next.

        Args:
            record: that step.
            skips: their number.
            has_loss: whether its loss is known; without one it is NaN.
        """
        seen = self.seen()
        if seen.output is not None:
            return [_in_forward(record, skips, seen.output)]
        if seen.gradient is None:
            return []
        case = "loss" if has_loss and not math.isfinite(record.loss) else ""
        return [_in_backward(record, skips, seen.gradient, case)]

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, path: str) -> UncopiedHook:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if _traces():
                return
            with self._guarded():
                self._outputs += [(path, _is_finite(tensor)) for tensor in floating_tensors_in(output)]

        return UncopiedHook(hook)

    def _take(self, name: str) -> Callable[[Tensor], None]:
        def hook(weight: Tensor) -> None:
            if _traces():
                return
            with self._guarded():
                if weight.grad is not None:  # an earlier hook may have taken it
                    self._gradients.append((name, _is_finite(weight.grad)))

        return hook

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A check that fails ends."""
        try:
            yield
        except Exception as error:  # the loop goes on
            if is_interrupt(error):
                raise
            self.end()
            self._outputs, self._gradients = [], []
            self._fail(f"the check of a step after skipped ones failed: {type(error).__name__}: {error}")


def _traces() -> bool:
    """Whether tensors have no values that outlive this call: a compiler or torch.export traces, or in torch.func."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _is_finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(stored_values(local_shard(tensor.detach()))).all()


def _first_bad(flags: Sequence[tuple[str, Tensor]]) -> str | None:
    if not flags:
        return None
    finite = torch.stack([flag.to("cpu") for _, flag in flags]).tolist()
    return next((name for (name, _), good in zip(flags, finite, strict=True) if not good), None)


def _in_forward(record: StepRecord, skips: int, module: str) -> Finding:
    return finding(
        "nonfinite-forward",
        module="" if module == "(model)" else module,
        evidence={"step": record.step, "loss_scale": record.loss_scale},
        skips=skips,
        output_of=module,
    )


def _in_backward(record: StepRecord, skips: int, parameter: str, case: str) -> Finding:
    return finding(
        "nonfinite-gradient",
        case,
        certainty="possible",
        tensor=f"gradient of {parameter}",
        evidence={"step": record.step, "loss_scale": record.loss_scale},
        skips=skips,
        parameter=parameter,
    )
