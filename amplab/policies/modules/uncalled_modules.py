"""Warn of a module rule that has no effect, because the model reads the weights of the module without calling it.

    logits = F.linear(hidden, self.head.weight)      # a rule for "head" acts on calls of head

The first forward of the model is watched, and no other.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from amplab.policies.casting.function_modes import ScopeMode
from amplab.policies.casting.hook_scopes import HookScopes
from amplab.policies.casting.thread_scopes import ScopeOfMode
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.called_op import called_op
from amplab.policies.tables.op_table import CastPolicy, OpRule

__all__ = ["UncalledModules"]

_VIEWS = {
    Tensor.t: "t()",
    Tensor.T.__get__: "T",  # type: ignore[attr-defined]  # torch declares a Tensor: it is a descriptor
    Tensor.mT.__get__: "mT",  # type: ignore[attr-defined]
    Tensor.transpose: "transpose()",
}


class UncalledModules:
    """The hooks of a model that watch its first forward.

    Args:
        rule_of: Parameter -> what names its rule, e.g. "head=float32 in head"; emptied after the first forward.
        weights_decide: whether a weight that is passed to an op decides its dtype (half weights, `mixed_arguments`).
        was_called: returns whether the module of a rule has been called.
    """

    def __init__(
        self, rule_of: Mapping[Tensor, Any], *, weights_decide: bool, was_called: Callable[[Any], bool]
    ) -> None:
        self._rule_of = dict(rule_of)
        self._weights_decide = weights_decide
        self._was_called = was_called
        self._reads: _Reads | None = None
        self._scopes = HookScopes()

    def before_forward(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        """Begin to watch; does nothing after the first forward, and while torch.compile traces."""
        if is_dynamo_compiling() or not self._rule_of or self._reads is not None:
            return
        self._reads = _Reads(self._rule_of, weights_decide=self._weights_decide)
        self._scopes.enter(ScopeOfMode(self._reads))

    def after_forward(self, _model: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """Warn of each rule without effect, and stop watching; called with None if forward raised."""
        if is_dynamo_compiling() or self._reads is None:
            return
        self._scopes.leave()
        found, self._reads = self._reads.found, None
        self._rule_of.clear()
        for rule, ops in found.items():
            if not self._was_called(rule):
                warnings.warn(
                    f"module_rules: {rule} has no effect on {', '.join(sorted(ops))}, since the model reads the weight "
                    "without calling that module. Write the rule for the module whose forward does so, or call it.",
                    stacklevel=2,
                )

    def leave(self) -> None:
        """Stop watching: after an interrupt in forward, no hook runs."""
        self._scopes.leave_all()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _state: dict[str, Any]) -> None:
        self.__init__({}, weights_decide=True, was_called=bool)  # type: ignore[misc]  # copies watch nothing


class _Reads(ScopeMode):
    """Note which ops read a Parameter that has a rule.

    Attributes:
        found: rule -> names of the ops.
    """

    def __init__(self, rule_of: Mapping[Tensor, Any], *, weights_decide: bool) -> None:
        super().__init__()
        self.found: dict[Any, set[str]] = {}
        self._rule_of = rule_of
        self._weights_decide = weights_decide

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        func = func if is_dynamo_compiling() else called_op(func, sys._getframe(1))
        name = _VIEWS.get(func) or self._op(APEX.by_function.get(func))
        if name:
            for rule in self._rules((*args, *kwargs.values())):
                self.found.setdefault(rule, set()).add(name)
        return func(*args, **kwargs)

    def _op(self, row: OpRule | None) -> str:
        if row is None or row.cast is CastPolicy.FALL_THROUGH:
            return ""
        return "" if self._weights_decide and row.cast is CastPolicy.LOWER_PRECISION_FP else row.op

    def _rules(self, values: Iterable[Any]) -> list[Any]:
        read = (value for value in values if isinstance(value, Parameter))
        return [self._rule_of[param] for param in read if param in self._rule_of]
