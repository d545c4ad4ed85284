"""For a step that cannot be run again: find the first module output and the first gradient that are inf or NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amplab.diagnose import Finding
from amplab.diagnose.catalogue import finding
from amplab.formats.stored_values import stored_values
from amplab.lab.events import StepRecord
from amplab.policies.nested_tensors import floating_tensors_in
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

    Sync: one, when `seen` is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._outputs: list[tuple[str, Tensor]] = []
        self._gradients: list[tuple[str, Tensor]] = []
        learning = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self._hooks = [
            *(module.register_forward_hook(self._look(path or "(model)")) for path, module in model.named_modules()),
            *(weight.register_post_accumulate_grad_hook(self._take(name)) for name, weight in learning),
        ]

    def seen(self) -> Seen:
        """Return the result and remove the hooks."""
        self.end()
        return Seen(_first_bad(self._outputs), _first_bad(self._gradients))

    def findings(self, record: StepRecord, skips: int) -> list[Finding]:
        """Return the findings about `skips` skipped steps in a row, of which the step of `record` is the next."""
        seen = self.seen()
        if seen.output is not None:
            return [_in_forward(record, skips, seen.output)]
        return [] if seen.gradient is None else [_in_backward(record, skips, seen.gradient)]

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, path: str) -> UncopiedHook:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            self._outputs += [(path, _is_finite(tensor)) for tensor in floating_tensors_in(output)]

        return UncopiedHook(hook)

    def _take(self, name: str) -> Callable[[Tensor], None]:
        def hook(weight: Tensor) -> None:
            if weight.grad is not None:  # an earlier hook may have taken it
                self._gradients.append((name, _is_finite(weight.grad)))

        return hook


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


def _in_backward(record: StepRecord, skips: int, parameter: str) -> Finding:
    return finding(
        "nonfinite-gradient",
        certainty="possible",
        tensor=f"gradient of {parameter}",
        evidence={"step": record.step, "loss_scale": record.loss_scale},
        skips=skips,
        parameter=parameter,
    )
