"""A policy on a model: its forward runs by the policy, and modules with a rule of their own run by their rule.

with apply_policy(policy, model):
    loss = criterion(model(x), y)      # or keep the handle, and call its `remove` some day
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.thread_scopes import HookScopes
from amplab.policies.modules.module_regions import register_module_rules
from amplab.policies.nested_tensors import cast_tree
from amplab.policies.policy.precision_policy import PrecisionPolicy

__all__ = ["AppliedPolicy", "accept_half_input", "apply_policy", "match_rnn_input"]


def match_rnn_input(
    module: torch.nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: input, packed sequence and hidden state of `module` in its weights' dtype."""
    dtype = next(module.parameters()).dtype
    return cast_tree(args, dtype), cast_tree(kwargs, dtype)


def accept_half_input(model: torch.nn.Module) -> list[RemovableHandle]:
    """Register `match_rnn_input` on every RNN, LSTM and GRU in `model`; the handles take it off again."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    return [module.register_forward_pre_hook(match_rnn_input, with_kwargs=True) for module in recurrent]


class AppliedPolicy:
    """The handle of a policy on a model: `remove` takes it off; so does the end of a `with` block.

    Attributes:
        policy: what the model runs by.

    Args:
        policy: see there.
        undo: what takes it off.
    """

    def __init__(self, policy: PrecisionPolicy, undo: contextlib.ExitStack) -> None:
        self.policy = policy
        self._undo = undo

    def remove(self) -> None:
        """Take every hook off again; does nothing the second time. Copies of the model keep theirs."""
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
    """Let `model` run by `policy` from here on, in any thread that calls it; weights stay as they are.

    Its forward casts as under `CastingEngine(policy).active()`, and the modules that module_rules name by their rules
    (see `module_regions`). A deepcopy, a pickle and the replicas of DataParallel behave alike.

    Args:
        policy: the policy.
        model: float32, any device; not compiled, scripted or wrapped yet.

    Returns:
        A handle with `remove`, which is a context manager too.

    Raises:
        TypeError: something else than a policy and a module.
        ValueError: a rule that names no module of `model`, or rules that contradict each other.

    Sync: none.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> with apply_policy(PrecisionPolicy(module_rules={"1": "bfloat16"}), model):
    ...     print(model[0](torch.ones(2)).dtype, model(torch.ones(2)).dtype)
    torch.float32 torch.float16
    """
    if not isinstance(policy, PrecisionPolicy) or not isinstance(model, nn.Module):
        raise TypeError(
            f"apply_policy({type(policy).__name__}, {type(model).__name__}): expected a PrecisionPolicy and a "
            "torch.nn.Module; a string becomes a policy by PrecisionPolicy.parse."
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

    def before_forward(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        """Enter the engine."""
        self._scopes.enter(self._engine.active())

    def after_forward(self, _model: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """Leave the engine; called where forward has raised, too."""
        self._scopes.leave()

    def leave(self) -> None:
        """Leave what this thread is still in: an interrupt in forward lets no hook run."""
        self._scopes.leave_all()

    def __getstate__(self) -> dict[str, Any]:
        return {"_engine": self._engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _scopes=HookScopes())
