"""Apply a policy to a model, including its module rules.

with apply_policy(policy, model):
    loss = criterion(model(x), y)      # or keep the handle and call its `remove` later
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.hook_scopes import HookScopes, no_graph_of_its_own
from amplab.policies.modules.module_regions import register_module_rules
from amplab.policies.nested_tensors import cast_tree
from amplab.policies.policy.precision_policy import PrecisionPolicy

__all__ = ["AppliedPolicy", "accept_half_input", "apply_policy", "match_rnn_input"]


@no_graph_of_its_own
def match_rnn_input(
    module: torch.nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: cast input, packed sequence and hidden state of `module` to the dtype of its weights."""
    dtype = next(module.parameters()).dtype
    return cast_tree(args, dtype), cast_tree(kwargs, dtype)


def accept_half_input(model: torch.nn.Module) -> list[RemovableHandle]:
    """Register `match_rnn_input` on every RNN, LSTM and GRU in `model` and return the handles that remove it."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    return [module.register_forward_pre_hook(match_rnn_input, with_kwargs=True) for module in recurrent]


class AppliedPolicy:
    """The handle of a policy on a model. `remove`, or the end of a `with` block, removes the policy.

    Attributes:
        policy: the policy of the model.

    Args:
        policy: the policy of the model.
        undo: the callbacks that remove it.
    """

    def __init__(self, policy: PrecisionPolicy, undo: contextlib.ExitStack) -> None:
        self.policy = policy
        self._undo = undo

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing. Copies of the model keep their hooks."""
        self._undo.close()

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        """Show the policy in its string form."""
        return f"AppliedPolicy({str(self.policy)!r})"


def apply_policy(policy: PrecisionPolicy, model: nn.Module) -> AppliedPolicy:
    """Run `model` under `policy` from now on, in every thread that calls it; weights are not cast.

    Its forward casts as under `CastingEngine(policy).active()`; modules that match a module rule follow their rule
    (see `module_regions`). A deepcopy, an unpickled copy and the replicas of DataParallel behave the same.

    Args:
        policy: the policy.
        model: float32, on any device. Compile, script or wrap it after this call.

    Returns:
        A handle with `remove`, which is also a context manager.

    Raises:
        TypeError: the arguments are not a policy and a module.
        ValueError: a rule matches no module of `model`, or rules contradict each other.

    Sync: none.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> with apply_policy(PrecisionPolicy(module_rules={"1": "bfloat16"}), model):
    ...     print(model[0](torch.ones(2)).dtype, model(torch.ones(2)).dtype)
    torch.float32 torch.bfloat16
    """
    if not isinstance(policy, PrecisionPolicy) or not isinstance(model, nn.Module):
        raise TypeError(
            f"apply_policy({type(policy).__name__}, {type(model).__name__}): expected a PrecisionPolicy and a "
            "torch.nn.Module; convert a string with PrecisionPolicy.parse."
        )
    forward = _UnderEngine(CastingEngine(policy))
    with contextlib.ExitStack() as undo:
        undo.callback(forward.leave)
        undo.callback(model.register_forward_pre_hook(forward.before_forward).remove)
        undo.callback(model.register_forward_hook(forward.after_forward, prepend=True, always_call=True).remove)
        for region in register_module_rules(model, policy):
            undo.callback(region.remove)
        for handle in accept_half_input(model):
            undo.callback(handle.remove)
        return AppliedPolicy(policy, undo.pop_all())


class _UnderEngine:
    """The hooks that keep an engine active while a model's forward runs."""

    def __init__(self, engine: CastingEngine) -> None:
        self._engine = engine
        self._scopes = HookScopes()

    @no_graph_of_its_own
    def before_forward(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        """Enter the engine."""
        self._scopes.enter(self._engine.active())

    @no_graph_of_its_own
    def after_forward(self, _model: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """Leave the engine; also called if forward raised."""
        self._scopes.leave()

    def leave(self) -> None:
        """Leave the scopes that this thread is still in: after an interrupt in forward, no hook runs."""
        self._scopes.leave_all()

    def __getstate__(self) -> dict[str, Any]:
        return {"_engine": self._engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _scopes=HookScopes())
