"""`untouched`: run a step on a model and restore everything that its forward and backward change.

Restored: parameters, buffers and child modules (also those that forward adds, rebinds or removes), the values of
parameters and buffers, the class of each module, its hooks and those of its parameters, `.grad` of every leaf,
`requires_grad`, training flags, the random states of torch, its devices, Python and NumPy, the optimizers that step in
the block, and the buffers of other modules that run in it. Of the plain Python attributes of modules: their bindings,
and the states of random generators among them.

Not restored: objects in plain attributes that forward changes in place (a list that grows, the elements of a tensor
that is not a buffer), other things outside the modules, and a loss scale. Attributes of torch's wrappers, such as DDP
and FSDP, are not touched: they hold what may be set up only once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amplab.amp.apex.before_initialize import hooks_of
from amplab.amp.apex.iteration_state import iterations_kept
from amplab.amp.run_state.models_of_tools import MODELS_OF_TOOLS
from amplab.parallel.ranks import exchanges_in_forward, has_other_ranks, is_alone, on_this_rank_alone
from amplab.parallel.shards import reshard
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.casting.thread_scopes import casts_outside_step
from amplab.scalers import is_sharded
from amplab.trace.as_found import Undo, rebind, remove_hooks_since
from amplab.trace.collectives import NoCollectives
from amplab.trace.dispatch_mode import INTO_GRAD
from amplab.trace.engines import compiled_functions_eagerly
from amplab.trace.forwarded_modules import buffers_kept
from amplab.trace.optimizer_hooks import once_a_step
from amplab.trace.optimizer_states import unchanged_optimizers
from amplab.trace.random_states import random_states_kept, restorers
from amplab.trace.stand_ins import apart
from amplab.trace.tensor_copies import TensorCopy, restore_all

__all__ = [
    "WRAPPERS",
    "ParkedGradients",
    "before_untouched",
    "computed_anew",
    "modules_kept",
    "nodes_behind",
    "observing_steps",
    "unless_undone",
    "untouched",
]


class _Thread(local):
    """Whether the thread runs a block of `untouched`, and what is called before one."""

    undoes = False

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []


_THREAD = _Thread()


class ParkedGradients:
    """Gradients set aside, so that a backward starts without any and its results can be dropped.

    Post-accumulate-grad hooks, such as an optimizer that steps inside backward, are set aside with them.
    """

    def __init__(self) -> None:
        self._parked: dict[int, tuple[Tensor, Tensor | None, dict[Any, Any]]] = {}

    def park(self, leaves: Iterable[Tensor]) -> None:
        """Set aside the gradients of `leaves`, once each."""
        for leaf in leaves:
            if id(leaf) not in self._parked:
                hooks = leaf._post_accumulate_grad_hooks
                self._parked[id(leaf)] = (leaf, leaf.grad, dict(hooks or {}))
                leaf.grad = None
                if hooks:
                    hooks.clear()

    def park_leaves_of(self, loss: Tensor) -> None:
        """Set aside the gradients of all leaves that a backward from `loss` reaches."""
        nodes = (node for node in nodes_behind(loss) if node.name() == INTO_GRAD)
        self.park(node.variable for node in nodes)  # type: ignore[attr-defined]  # AccumulateGrad has one

    def restore(self) -> None:
        """Restore every gradient and hook."""
        for leaf, grad, hooks in self._parked.values():
            leaf.grad = grad
            if hooks:
                leaf._post_accumulate_grad_hooks.update(hooks)
        self._parked.clear()


def nodes_behind(loss: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """Yield the nodes of the graph that a backward from `loss` runs."""
    start = [] if loss.grad_fn is None else [loss.grad_fn]
    waiting, seen = start, set(start)
    while waiting:
        node = waiting.pop()
        yield node
        found = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= found
        waiting += found


_PARAMETRIZE = vars(torch.nn.utils.parametrize)


def computed_anew(undo: Undo, *, caches: bool = True) -> None:
    """Let weights be computed anew until `undo` ends, in a block of ``torch.nn.utils.parametrize.cached()`` too.

    What is cached there belongs to the graph of the loop, and is found by the ids of modules.

    Args:
        undo: restores it.
        caches: whether they are cached meanwhile, as there; not for several steps.
    """
    old, enabled = torch.nn.utils.parametrize._cache, torch.nn.utils.parametrize._cache_enabled
    undo.add(partial(_PARAMETRIZE.update, _cache=old, _cache_enabled=enabled))
    _PARAMETRIZE.update(_cache={}, _cache_enabled=enabled if caches else 0)


@contextmanager
def untouched(model: nn.Module, *, draws: bool = True) -> Iterator[ParkedGradients]:
    """Run a block on `model` and restore everything that it changed, also after an exception.

    Yields the gradients set aside, to which the block adds leaves outside the model. Holds one copy of the model's
    parameters and buffers while the block runs, and a second one of those in shared memory, which the block gets: what
    other processes write there meanwhile stays. Of several ranks this one waits for no other: they may run the model
    more often, or not at all, see `on_this_rank_alone`. So it starts no collective, except for a sharded model, which
    has its weights by collectives: every rank must run it.

    Args:
        model: the model.
        draws: whether the block may draw random numbers. If not, the global random states are left alone: another
            thread may seed them, and draw, meanwhile.

    Raises:
        NeedsOtherRanks: The block calls a collective of ``torch.distributed``.

    Functions that were given to `torch.compile` run eagerly in the block. In a hook on the step of an optimizer, inside
    of which `amp` casts nothing, the block casts as outside of the step.

    Sync: none.
    """
    for callback in () if _THREAD.undoes else tuple(_THREAD.callbacks):
        callback()
    reshard(model)  # what FSDP2 has gathered is memory that it frees in a backward
    gradients = ParkedGradients()
    with apart(model), casts_outside_step(), Undo() as undo:
        undo.add(partial(setattr, _THREAD, "undoes", _THREAD.undoes))
        _THREAD.undoes = True
        this = object()
        undo.add(partial(MODELS_OF_TOOLS.pop, this, None))
        MODELS_OF_TOOLS[this] = model
        computed_anew(undo)
        with without_function_modes():
            undo.add(gradients.restore)
            states = _keep(model, undo)
            for state in states:
                gradients.park(each for each in state.parameters.values() if each is not None and each.is_leaf)
            devices = {copy.tensor.device for state in states for copy in state.copies}
        undo.enter_block(compiled_functions_eagerly)  # or the compiler would compile modes and hooks, too
        if has_other_ranks() and not is_alone() and not _has_shards(model):
            undo.enter(NoCollectives())
        with (
            random_states_kept(devices) if draws else nullcontext(),
            on_this_rank_alone(),
            unchanged_optimizers(),
            iterations_kept(),
            buffers_kept(model),
        ):
            yield gradients


@contextmanager
def modules_kept(model: nn.Module) -> Iterator[None]:
    """Run a block and restore what `untouched` restores of modules, also after an exception.

    It is for code that measures a model: gradients, random states and optimizers are as the block leaves them,
    functions that were given to `torch.compile` are compiled, and collectives are allowed.

    Sync: none.

    >>> norm = nn.BatchNorm1d(2)
    >>> with modules_kept(norm):
    ...     norm.calls = 1
    ...     _ = norm.eval().running_mean.fill_(3.0)
    >>> norm.running_mean.tolist(), norm.training, hasattr(norm, "calls")
    ([0.0, 0.0], True, False)
    """
    with Undo() as undo, buffers_kept(model):
        with without_function_modes():
            _keep(model, undo)
        yield


def _keep(model: nn.Module, undo: Undo) -> "list[_ModuleState]":
    """Restore the modules of a model at the end of `undo`; return what they have now."""
    states = [_ModuleState.of(module) for module in model.modules()]
    for state in states:
        undo.add(state.restore)
    return states


def _has_shards(model: nn.Module) -> bool:
    return bool(exchanges_in_forward(model)) or any(map(is_sharded, model.parameters()))


def unless_undone(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does nothing in blocks of `untouched`, for an observer of a loop in which tools are called."""

    @wraps(hook)
    def observe(*given: Any) -> Any:
        return None if _THREAD.undoes else hook(*given)

    return observe


def observing_steps(hook: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    """As `unless_undone`, for a hook on the steps of an optimizer, of which it sees each once, see `once_a_step`.

    A loop may compile its steps, and not the hook.

    Reference: torch.compiler.disable.
    """
    outside: Callable[..., Any] = torch.compiler.disable(unless_undone(once_a_step(hook, optimizer)))
    return outside


def before_untouched(callback: Callable[[], object]) -> Callable[[], None]:
    """Call `callback` before each outermost block of `untouched` in this thread; return a function that ends this."""
    callbacks = _THREAD.callbacks
    callbacks.append(callback)
    return lambda: callbacks.remove(callback) if callback in callbacks else None


WRAPPERS = "torch.nn.parallel.", "torch.distributed.", "torch._dynamo."
"""Modules of torch whose first forward sets them up, together with state outside of them."""


class _ModuleState(NamedTuple):
    """What one module itself owns: parameters, buffers, child modules, training flag, attributes and hooks."""

    module: nn.Module
    kind: type[nn.Module]
    training: bool
    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    children: dict[str, nn.Module | None]
    copies: tuple[TensorCopy, ...]
    attributes: dict[str, Any] | None
    generators: tuple[Callable[[], object], ...]
    not_persistent: set[str]
    hooks: tuple[tuple[dict[Any, Any], dict[Any, Any]], ...]
    next_hook: int

    @classmethod
    def of(cls, module: nn.Module) -> "_ModuleState":
        parameters: dict[str, Tensor | None] = {**module._parameters}
        buffers, children = dict(module._buffers), dict(module._modules)
        tensors = [tensor for tensor in (*parameters.values(), *buffers.values()) if tensor is not None]
        copies = tuple(TensorCopy.of(tensor) for tensor in tensors)
        attributes = None if type(module).__module__.startswith(WRAPPERS) else dict(vars(module))
        generators = restorers((attributes or {}).values())
        owners = module, *(each for each in parameters.values() if each is not None)
        hooks = tuple((each, dict(each)) for owner in owners for each in hooks_of(owner))
        not_persistent = set(module._non_persistent_buffers_set)
        own = parameters, buffers, children, copies, attributes, generators, not_persistent, hooks
        return cls(module, type(module), module.training, *own, RemovableHandle.next_id)

    def restore(self) -> None:
        if type(self.module) is not self.kind:  # as after a parametrization
            self.module.__class__ = self.kind
        self.module.training = self.training
        if self.attributes is not None:
            rebind(vars(self.module), self.attributes)
        for restore in self.generators:
            restore()
        rebind(self.module._parameters, self.parameters)
        rebind(self.module._buffers, self.buffers)
        rebind(self.module._modules, self.children)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.not_persistent)
        for name in self.parameters.keys() & vars(self.module).keys():
            del vars(self.module)[name]  # which hides the parameter, as after `torch.nn.utils.weight_norm`
        remove_hooks_since(self.module, self.next_hook)
        for parameter in self.parameters.values():
            if parameter is not None:
                remove_hooks_since(parameter, self.next_hook)
        for hooks, before in self.hooks:
            rebind(hooks, before)  # also those that the block has removed
        with without_function_modes():
            restore_all(self.copies)
