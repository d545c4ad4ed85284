"""A whole training run in one file: saved atomically, loaded completely or not at all, resumed bitwise.

    save_run_state(path, model=model, optimizer=optimizer, amp=amp, position=step)
    …
    state = load_run_state(path, model=model, optimizer=optimizer, amp=amp)
    for step in range(state.position, steps): …

=============  ==========================================================================================
models         state_dict of each; at O2 the float32 masters' values, at O3 half weights as float32
optimizers     state_dict of each, and the shapes and dtypes of its parameters
loss scale     ``amp.state_dict()`` of a session, or ``state_dict()`` of a GradScaler
generators     of torch (CPU and CUDA), random and numpy (`rng_state`)
position       the position in the data: a step, an epoch, a sampler's state
extra          everything else that the run needs: a scheduler's state_dict, a generator's state
=============  ==========================================================================================

Gradients are not saved: save between steps, not between two backwards of one step. Under torch.distributed each rank
has its own generators, so each rank saves to its own path. The file itself is written in `file_format`.

A run with sharded parameters (FSDP2) is saved as a folder, by all ranks together: see `sharded_folder`.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from amplab.amp.apex.functions import default_session
from amplab.amp.apex.session import Session
from amplab.amp.arguments import as_list
from amplab.amp.run_state.checks import form_problems, model_problems, scale_problems, session_problems
from amplab.amp.run_state.file_format import MissingRunState, RunStateError, read_run_state, write_run_state
from amplab.amp.run_state.models_of_tools import refuse_models_of_tools
from amplab.amp.run_state.optimizer_checks import optimizer_entry, optimizer_problems
from amplab.amp.run_state.optimizer_state import load_optimizer
from amplab.amp.run_state.paths import given_path
from amplab.amp.run_state.rng_state import capture_rng, restore_rng, rng_problems
from amplab.amp.run_state.sharded_folder import (
    difference_of_ranks,
    has_shards,
    is_run_folder,
    lost_shardings,
    on_every_rank,
    rank_file,
    read_shards,
    refuse_other_shards,
    tensors_of,
    write_run_folder,
)
from amplab.policies.signals import DeferredSignals, is_interrupt
from amplab.scalers import is_sharded

__all__ = ["RunState", "load_run_state", "save_run_state"]


@dataclass(frozen=True)
class RunState:
    """The result of `load_run_state`.

    Attributes:
        position: what was given to `save_run_state`.
        extra: what was given to `save_run_state`.
        notes: one sentence for each part that was in the file or among the arguments, but not in both.
    """

    position: Any
    extra: Any
    notes: tuple[str, ...] = ()


def save_run_state(
    path: str | os.PathLike[str],
    *,
    model: Module | Sequence[Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    amp: Session | ModuleType | None = None,
    scaler: GradScaler | None = None,
    position: Any = None,
    extra: Any = None,
) -> None:
    """Save a run between two steps. If that fails, a file that was at ``path`` is unchanged.

    Sharded parameters (DTensors of ``fully_shard``) are saved by ``torch.distributed.checkpoint``. Then every rank
    calls this with the same ``path``, which becomes a folder. It loads on any number of ranks, also without shards.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "run.pt"
    >>> model = torch.nn.Linear(2, 1)
    >>> save_run_state(path, model=model, position={"epoch": 1, "batch": 30})
    >>> load_run_state(path, model=model).position
    {'epoch': 1, 'batch': 30}

    Args:
        path: the file, or the folder of a sharded run; its parent folder must exist. ``~`` is the home folder.
        model: a module or a list of them.
        optimizer: an optimizer or a list of them.
        amp: the `Session` that initialized them, or the module ``amplab.amp`` for its default session.
        scaler: the GradScaler of torch or amplab, instead of ``amp``; after its ``update()``.
        position: the position in the data, made of tensors, numbers, text, lists, tuples and dicts.
        extra: everything else that the run needs, made of the same types.

    Raises:
        RunStateError: a value that the file cannot hold, or a DTensor in ``position`` or ``extra``; the message names
            its place. Of a sharded run on every rank if one rank fails.
        RuntimeError: ``amp`` before its ``initialize``.
        TypeError: an argument of another type, or both ``amp`` and ``scaler``. ValueError: a path with NUL.
        RuntimeError: the scaler is between ``unscale_`` or ``step`` and ``update``; a tool, such as `amplab.xray`,
            runs the model now, while a signal's handler or another thread calls this.
        OSError: the file cannot be written.

    Sync: many, as every tensor is copied to the CPU.

    Reference: "Saving/Resuming" in PyTorch's Automatic Mixed Precision recipe.
    """
    collect = partial(_collected, path, model, optimizer, amp, scaler)
    path, state = on_every_rank(collect) if _hold_shards(model, optimizer) else collect()
    state |= {"position": position, "extra": extra}
    if has_shards(state):
        write_run_folder(path, state)
    else:
        refuse_other_shards(state)
        write_run_state(path, state)


def load_run_state(
    path: str | os.PathLike[str],
    *,
    model: Module | Sequence[Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    amp: Session | ModuleType | None = None,
    scaler: GradScaler | None = None,
) -> RunState:
    """Load what `save_run_state` saved into models, optimizers and a scaler that are created as in the saved run.

    Everything is checked first: if an error is raised, nothing has been loaded. Models are saved as float32 values, so
    a run may continue at another opt_level. A loss scale in the file for which no ``amp`` or ``scaler`` is passed is
    ignored (from AMP to float32). A scaler without a loss scale in the file keeps its initial scale (from float32 to
    AMP). Models and optimizers that are not passed are ignored, too.

    Args:
        path: a file of `save_run_state`, or a folder, which all ranks load together.
        model: as for `save_run_state`, after ``amp.initialize``.
        optimizer: as for `save_run_state`.
        amp: the `Session` that initialized them, or the module ``amplab.amp`` for its default session.
        scaler: a GradScaler, instead of ``amp``.

    Returns:
        The position, the extra values, and notes about ignored parts. The global random number generators are
        restored, except on a rank that had no part in the saved run.

    Raises:
        RunStateError: the file is truncated, damaged, altered, of another format, or of another run; the message has
            the differences. Of an error while values are copied, which a module's own hook can raise, too. Of a
            sharded run on every rank if one rank fails, or if the folder is not there on one.
        RuntimeError: ``amp`` before its ``initialize``; a tool runs the model now.
        TypeError: an argument of another type, or both ``amp`` and ``scaler``. ValueError: a path with NUL.
        OSError: there is no such file, which is a RunStateError, too; or it cannot be read.

    Sync: none.
    """
    sharded = _hold_shards(model, optimizer)
    check = partial(_checked, path, model, optimizer, amp, scaler)
    path, models, optimizers, session = on_every_rank(check) if sharded else check()
    _refuse_missing(path, on_any_rank=sharded)
    state, own, whole = _read(path, models, optimizers, scaler)
    notes = _left_out(state, models, optimizers, session, scaler)
    if whole:
        more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
        notes = (*notes, f"{whole[0]}{more} of an earlier version: a DTensor when saved, a whole tensor now")
    if not own:
        notes = (*notes, "saved by fewer ranks: the random states of this rank are not restored")

    def load_values(undo: _Undo) -> None:
        with DeferredSignals():  # torch collects what a handler raises where it copies weights, in a RuntimeError
            _load(state, models, optimizers, session, scaler, undo)

    def load(undo: _Undo) -> None:
        values = partial(load_values, undo)
        on_every_rank(values) if is_run_folder(path) else values()
        if own:
            undo.append(partial(restore_rng, capture_rng()))
            restore_rng(state["rng"])

    _undo_on_error(load, path)
    return RunState(state["position"], state["extra"], notes)


_Undo = list[Callable[[], object]]
"""What takes back each part that has been loaded, in the order of loading."""


def _undo_on_error(load: Callable[[_Undo], object], path: Path) -> None:
    """Take back everything that `load` has loaded if it raises, as a hook or an extra state of a module can.

    Raises:
        RunStateError: it raised an exception.
    """
    undo: _Undo = []
    signals = DeferredSignals()
    try:
        signals.admit()
        load(undo)
    except BaseException as error:
        signals.waits = True  # a second one must not stop this
        for take_back in reversed(undo):
            take_back()
        if isinstance(error, RunStateError) or is_interrupt(error):
            raise
        raise RunStateError(
            f"{path} cannot be loaded into the arguments, and nothing was loaded: {type(error).__name__}: {error}. "
            "Create models, optimizers and scaler as in the saved run, or read parts of the file with torch.load."
        ) from error
    finally:
        signals.waits = True
        signals.end()


def _load(
    state: dict[str, Any],
    models: list[Module],
    optimizers: list[Optimizer],
    session: Session | None,
    scaler: GradScaler | None,
    undo: _Undo,
) -> None:
    """Load a checked state, the parts that can still refuse it first."""
    if session is not None and session.properties.enabled and state["amp"] is not None:
        undo += [partial(setattr, each, "state", each.state) for each in session.scalers]
        session.load_state_dict(state["amp"])
    if scaler is not None and state["scaler"] is not None:
        undo.append(partial(scaler.load_state_dict, scaler.state_dict()))
        scaler.load_state_dict(state["scaler"])
    for each, entry in zip(optimizers, state["optimizers"], strict=False):
        undo.append(partial(load_optimizer, each, optimizer_entry(each)))
        load_optimizer(each, entry)
    for one, saved in zip(models, state["models"], strict=False):
        undo.append(_restorer(one))
        one.load_state_dict(saved)


def _restorer(model: Module) -> Callable[[], None]:
    """Return a function that gives a model the values back that it has now."""
    before = model.state_dict()
    for name, value in before.items():  # in place, since a state_dict also has the versions of its modules
        if isinstance(value, Tensor) and not is_lazy(value):
            before[name] = value.detach().clone()
    live = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    of_modules = before.keys() - {name for name, _ in live}

    def restore() -> None:
        tensors = before.copy()
        for name in of_modules:
            del tensors[name]
        model.load_state_dict(tensors, strict=False)
        with suppress(Exception):  # a module that refuses its own extra state
            model.load_state_dict(before)

    return restore


def _hold_shards(model: Any, optimizer: Any) -> bool:
    """Return whether models or optimizers hold DTensors: then every rank makes this call, and checks its own arguments.

    What is of another type is left to `_checked`.
    """
    models = [each for each in as_list(model) if isinstance(each, Module)]
    groups = [group for each in as_list(optimizer) if isinstance(each, Optimizer) for group in each.param_groups]
    tensors = chain(
        *(chain(each.parameters(), each.buffers()) for each in models), *(group["params"] for group in groups)
    )
    return any(map(is_sharded, tensors))


def _collected(path: Any, model: Any, optimizer: Any, amp: Any, scaler: Any) -> tuple[Path, dict[str, Any]]:
    """Return the path, and everything that is saved but the caller's own values."""
    path, models, optimizers, session = _checked(path, model, optimizer, amp, scaler)
    if scaler is not None and scaler.is_enabled() and scaler._per_optimizer_states:
        raise RuntimeError("scaler is between unscale_() or step() and update(): call update() before saving.")
    try:
        generators = capture_rng()
    except ValueError as error:
        raise RunStateError(str(error)) from None
    return path, {
        "models": [each.state_dict() for each in models],
        "optimizers": [optimizer_entry(each) for each in optimizers],
        "opt_level": None if session is None else session.opt_level,
        "amp": None if session is None else session.state_dict() or None,
        "scaler": None if scaler is None else scaler.state_dict() or None,
        "rng": generators,
    }


def _checked(
    path: Any, model: Any, optimizer: Any, amp: Any, scaler: Any
) -> tuple[Path, list[Module], list[Optimizer], Session | None]:
    path, models, optimizers = given_path(path), as_list(model), as_list(optimizer)
    for name, kind, values in (("model", Module, models), ("optimizer", Optimizer, optimizers)):
        for value in values:
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name}: got a {type(value).__name__}, expected a torch {kind.__name__} or a list of them."
                )
    session = default_session() if isinstance(amp, ModuleType) else amp
    if not isinstance(session, Session | None):
        raise TypeError(f"amp: got a {type(amp).__name__}, expected an amp.Session, the module amplab.amp, or None.")
    if not isinstance(scaler, GradScaler | None):
        raise TypeError(f"scaler: got a {type(scaler).__name__}, expected a GradScaler of torch or amplab, or None.")
    if session is not None and scaler is not None:
        raise TypeError("amp and scaler: got both, expected one of them. Pass the session or the GradScaler.")
    if session is not None:
        session.state_dict()  # raises before initialize
    refuse_models_of_tools(models)
    return path, models, optimizers, session


def _refuse_missing(path: Path, *, on_any_rank: bool) -> None:
    """Raise if there is nothing at ``path``, nor a folder that a killed process left beside it.

    Args:
        path: of this rank.
        on_any_rank: raise on every rank, too, if some see a folder there and others do not.
    """
    found = "a folder" if is_run_folder(path) else "a file" if path.exists() else "nothing"
    if on_any_rank and (difference := difference_of_ranks(found)):
        raise RunStateError(
            f"{path} cannot be loaded, and nothing was loaded: {difference}. Save to a folder that every rank sees, or "
            "copy the whole folder to each of their disks; on a network drive, load when all of them see it."
        )
    if found != "nothing":
        return
    here = "" if path.parent.exists() else f" The folder {path.parent} does not exist either."
    raise MissingRunState(
        f"{path}: there is no such file or folder; expected the path that save_run_state was given.{here} In the first "
        "start of a run, which has nothing to continue, leave load_run_state out."
    )


def _read(
    path: Path, models: list[Module], optimizers: list[Optimizer], scaler: GradScaler | None
) -> tuple[dict[str, Any], bool, list[str]]:
    """Return a state that matches the models and optimizers, whether it is of this rank, and its `lost_shardings`."""
    if not is_run_folder(path):
        state = read_run_state(path)
        _refuse_other_run(path, state, models, optimizers, scaler)
        _refuse_empty_tensors(path, state, models, optimizers)
        return state, True, []

    def checked() -> tuple[dict[str, Any], bool]:
        state, own = rank_file(path)
        _refuse_other_run(path, state, models, optimizers, scaler)
        return state, own

    state, own = on_every_rank(checked)
    filled = read_shards(path, state, models, optimizers)
    on_every_rank(lambda: _refuse_empty_tensors(path, filled, models, optimizers))
    return filled, own, lost_shardings(state, filled)


def _refuse_other_run(
    path: Path, state: dict[str, Any], models: list[Module], optimizers: list[Optimizer], scaler: GradScaler | None
) -> None:
    """Raise an error with all mismatches."""
    try:
        problems = list(form_problems(state)) or [
            *model_problems(models, state["models"]),
            *optimizer_problems(optimizers, state["optimizers"]),
            *session_problems(state["amp"] or {}),
            *(scale_problems(state["scaler"]) if scaler and scaler.is_enabled() and state["scaler"] else ()),
            *rng_problems(state["rng"]),
        ]
    except Exception as error:  # tensors of rare kinds refuse to be compared with anything
        if is_interrupt(error):
            raise
        problems = [f"it has a value that cannot be compared ({type(error).__name__}: {error})"]
    if problems:
        raise RunStateError(
            f"{path} does not match the arguments, and nothing was loaded: {'; '.join(problems)}. Create models, "
            "optimizers and scaler as in the saved run, or read parts of the file with torch.load."
        )


def _refuse_empty_tensors(path: Path, state: dict[str, Any], models: list[Module], optimizers: list[Optimizer]) -> None:
    """Raise an error for tensors without values, as the file of one rank of a sharded run has them."""
    wanted = [*state["models"][: len(models)], *state["optimizers"][: len(optimizers)]]
    if any(tensor.is_meta for _, tensor in tensors_of(wanted)):
        raise RunStateError(
            f"{path} has tensors without values, and nothing was loaded. If it is rank_0.pt or the like, load the "
            f"folder of the sharded run, {path.parent}; else copy it again from an intact source."
        )


def _left_out(
    state: dict[str, Any],
    models: list[Module],
    optimizers: list[Optimizer],
    session: Session | None,
    scaler: GradScaler | None,
) -> tuple[str, ...]:
    """Return a note for each part that is only in the file or only among the arguments."""
    notes = []
    for name, given, saved in (("model", models, state["models"]), ("optimizer", optimizers, state["optimizers"])):
        if saved and not given:
            notes.append(f"{len(saved)} saved {name}(s) ignored: none was passed")
    here = {
        "amp": session is not None and session.properties.enabled,
        "scaler": scaler is not None and scaler.is_enabled(),
    }
    for name, passed in here.items():
        if state[name] is not None and not passed:
            notes.append(f"the saved loss scale of {name} is ignored: {name} was not passed, or is disabled")
        elif state[name] is None and passed:
            notes.append(f"the file has no loss scale of {name}: {name} keeps its initial loss scale")
    if session is not None and state["amp"] is not None and state["opt_level"] != session.opt_level:
        notes.append(f"saved at opt_level {state['opt_level']}, loaded at {session.opt_level}")
    return tuple(notes)
