"""How a user passes a step to a tool: a model and a batch, or a function that returns the loss.

    tool(model, batch, loss=fn)      the tool calls the model, then fn
    tool(model, step=fn)             fn runs the forward and returns the loss
    tool(model, batch, step=fn)      the same; fn may take the batch

=================  ============================  =======================================================
batch              the model is called as        loss is called as
=================  ============================  =======================================================
a tensor           model(batch)                  loss(output), loss(output, batch) if it takes two
a mapping          model(**batch)                the same; the batch keeps keys that forward does not take
a tuple or list    model(*first), as many as     loss(output, *rest); with nothing left over
                   forward takes                 loss(output, batch)
(mapping, …)       model(**mapping) if forward   loss(output, *rest)
                   names every key, else above
=================  ============================  =======================================================

Without `loss` it is the output's own `loss` (a key or an attribute), else the sum of every floating-point output.

=============================  ====================
step takes, without defaults   step is called as
=============================  ====================
nothing                        step()
one argument                   step(batch)
two arguments                  step(model, batch)
=============================  ====================

The tool runs backward: a step returns the loss before it is scaled. Several models in a list or a dict need a step.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from amplab.amp import Session, default_session
from amplab.policies.nested_tensors import floating_tensors_in
from amplab.trace.argument_checks import accepts, check_loss, check_model

__all__ = [
    "HandedStep",
    "Loss",
    "ModelGroup",
    "Models",
    "Scaler",
    "as_model",
    "bound_to_batch",
    "check_loss_function",
    "check_scaler",
    "handed_step",
    "optimizers_of",
    "scaler_in_use",
    "shows_calls",
]

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Loss = Callable[..., Tensor]
Scaler = Session | torch.amp.GradScaler

P = ParamSpec("P")
R = TypeVar("R")


def shows_calls(*calls: str, finds_nothing: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a tool: arguments that it does not take raise a TypeError with `calls`, the ones to write.

    Where the tool runs a step that calls it again, as a hook of the model may, it would run steps without end. It
    raises a RuntimeError there; a tool that `finds_nothing` returns None.

    >>> @shows_calls("tool(model, batch, loss=criterion)")
    ... def tool(model, batch=None, *, loss=None, scaler=None): ...
    >>> tool(None, amp=None)
    Traceback (most recent call last):
    TypeError: tool() got an unexpected keyword argument 'amp'; use scaler=. Write tool(model, batch, loss=criterion).
    """

    def decorate(tool: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(tool)

        @functools.wraps(tool)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as refusal:
                verb = next((verb for start, verb in _VERBS.items() if str(refusal).startswith(start)), "")
                what = f"{tool.__name__}() {verb}{refusal}{_instead(kwargs, signature)}"
                raise TypeError(f"{what}. Write {' or '.join(calls)}.") from None
            call = tool, *_ids_of(args[0] if args else next(iter(kwargs.values()), None))
            if call not in _RUNNING.calls:
                return _running(call, tool, args, kwargs)
            if finds_nothing:
                return cast(R, None)
            raise RuntimeError(
                f"amplab.{tool.__name__} is called in a step that it runs itself, as by a hook of the model: call it "
                "outside of the step."
            )

        return checked

    return decorate


class _Running(threading.local):
    """The tools that run in a thread, each with the ids of its models, in the order of their calls."""

    def __init__(self) -> None:
        self.calls: tuple[tuple[object, ...], ...] = ()


_RUNNING = _Running()


def _running(call: tuple[object, ...], tool: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    before = _RUNNING.calls
    try:
        _RUNNING.calls = (*before, call)
        return tool(*args, **kwargs)
    finally:
        _RUNNING.calls = before


def _ids_of(models: Any) -> Iterator[int]:
    several = (
        models.values() if isinstance(models, Mapping) else models if isinstance(models, list | tuple) else (models,)
    )
    return map(id, several)


def _instead(kwargs: Mapping[str, Any], signature: inspect.Signature) -> str:
    """Return advice on the argument to use for the first one that the tool does not take; empty for none."""
    unknown = next((name for name in kwargs if name not in signature.parameters), "")
    argument, words = _INSTEAD.get(unknown, ("", ""))
    if argument == "scaler" and isinstance(kwargs[unknown], str):
        argument = "opt_level"
    return f"; use {argument}={words}" if argument in signature.parameters else ""


_VERBS = {"missing": "is ", "too many": "got "}
_INSTEAD = {
    "amp": ("scaler", ""),
    "scaler_or_amp": ("scaler", ""),
    "grad_scaler": ("scaler", ""),
    "session": ("scaler", ""),
    "criterion": ("loss", ""),
    "loss_fn": ("loss", " for a function of the output, or step= for a function that runs the forward"),
    "closure": ("step", ""),
    "train_step": ("step", " for a function that returns the loss; only amplab.doctor takes a whole train_step"),
    "optimizers": ("optimizer", ""),
}
"""Names that other libraries use; the argument that takes such a value here, and what else to say."""


class ModelGroup(nn.Module):
    """Several models of one step, such as a generator and a discriminator; their paths start with their names.

    Attributes:
        given: the list or dict of models that the user passed.
    """

    def __init__(self, models: Mapping[str, nn.Module], given: Any) -> None:
        super().__init__()
        self.given = given
        for name, model in models.items():
            self.add_module(str(name).replace(".", "_"), model)  # names of modules have no dots


@dataclass
class HandedStep:
    """A step that can run: call it for the loss of one forward.

    Attributes:
        model: the model.
        run: the user's part: returns the loss, or the model's output if there is neither `loss=` nor `step=`.
        name: what returns the loss, for messages: "step", "loss" or "the model".
        loss: where the loss comes from, in words; for "the model" known after the first call.
        of_copies: whether the tool trains copies of the model.
    """

    model: nn.Module
    run: Callable[[], Any]
    name: str
    loss: str = ""
    of_copies: bool = False

    @property
    def loss_is_made_up(self) -> bool:
        """Whether the last call returned the sum of the output, since there is no loss."""
        return self.loss == _SUM

    def __call__(self) -> Tensor:
        """Return the loss of one forward.

        Raises:
            TypeError, ValueError: it is not a number that backward can start from.
        """
        loss = self.run()
        if self.name == "the model":
            loss, self.loss = _loss_in(loss)
        return check_loss(loss, self.model, self.name, whole=not self.of_copies)


def as_model(model: Any, *, compiled: bool = False, values: bool = False) -> nn.Module:
    """Return a model; several in a list, tuple or dict as one `ModelGroup`.

    Args:
        model: what the user passed.
        compiled, values: as `check_model` takes them.

    Raises:
        TypeError, ValueError: as `check_model`; a list or dict with no model in it.
    """
    named = model
    if isinstance(model, list | tuple):
        kinds = [type(each).__name__ for each in model]
        names = [kind if kinds.count(kind) == 1 else f"{kind}{place}" for place, kind in enumerate(kinds)]
        named = dict(zip(names, model, strict=True))
    if not isinstance(named, Mapping):
        return check_model(model, compiled=compiled, values=values)
    if not named:
        raise TypeError("no model in the list: expected a torch.nn.Module, or a list or dict of them.")
    for each in named.values():
        check_model(each, compiled=compiled, values=values)
    return ModelGroup(named, model)


def handed_step(
    tool: str, model: nn.Module, batch: Any = None, *, loss: Loss | None = None, step: Loss | None = None
) -> HandedStep:
    """Return the step that the user passed to a tool. The tables at the top of this file show how its parts are called.

    Args:
        tool: the tool's name, for the calls that messages show.
        model: as `as_model` returns it.
        batch, loss, step: as the user passed them.

    Raises:
        TypeError: batch and step are both missing; both loss and step are given; a loader or a dataset instead of a
            batch; or arguments that the model, the loss or the step do not take.
    """
    if step is not None:
        if loss is not None:
            raise TypeError(
                f"got both loss= and step=: expected one of them, {_by_loss(tool)} or {_by_step(tool)}; a step "
                "computes the loss itself."
            )
        run = bound_to_batch(tool, "step", step, model, batch)
        return HandedStep(model, run, "step", f"{_name_of(step)}, as given", tool in _OF_COPIES)
    check_loss_function(loss)
    if batch is None:
        also = " loss= takes the model's output, so it needs a batch as well." if loss is not None else ""
        raise TypeError(
            f"no batch: expected {_by_loss(tool)}, or {_by_step(tool)} with a function that runs the forward and "
            f"returns the loss.{also}"
        )
    if isinstance(model, ModelGroup):
        raise TypeError(
            "several models without step=: expected a function that runs them all and returns the loss, "
            f"amplab.{tool}(models, batch, step=loss_of)."
        )
    _check_batch(tool, batch)
    args, kwargs, rest = _parts(model, batch, _required(loss))
    _check_call(model, args, kwargs, batch)
    if loss is None:
        return HandedStep(model, lambda: _called(model, args, kwargs), "the model")
    more = f", {len(rest)} more of the batch" if rest else ""
    _check_given(loss, 1 + len(rest), f"the model's output{more}")
    return HandedStep(model, lambda: loss(_called(model, args, kwargs), *rest), "loss", f"{_name_of(loss)}, as given")


_OF_COPIES = {
    "twin": "model, batch",
    "ladder": "make_model, data",
    "lab.open": "model=model, data=loader",
}
"""Tools that train models of their own: their step takes the model and the batch."""


def _by_loss(tool: str) -> str:
    return f"amplab.{tool}({_OF_COPIES.get(tool, 'model, batch')}, loss=criterion)"


def _by_step(tool: str) -> str:
    if tool in _OF_COPIES:
        return f"amplab.{tool}({_OF_COPIES[tool]}, step=lambda model, batch: criterion(model(batch)))"
    return f"amplab.{tool}(model, step=loss_of)"


def bound_to_batch(
    tool: str,
    name: str,
    function: Callable[..., R],
    model: Any,
    batch: Any,
    *,
    such: str = "lambda: criterion(model(x), y)",
) -> Callable[[], R]:
    """Return `function` with as many of (model, batch) as it requires; see the module's second table.

    Args:
        tool: the tool's name.
        name: of the tool's argument.
        function: what the user passed for it.
        model, batch: what it may be called with; None for no batch.
        such: a function that the tool takes, as code.

    Raises:
        TypeError: it is not a function, or it requires other arguments.
    """
    if isinstance(function, type) or not callable(function):
        kind = f"{function.__name__} is a class" if isinstance(function, type) else type(function).__name__
        raise TypeError(f"{name}={kind}: expected a function such as {such}.")
    if isinstance(function, nn.Module) and not _shares_parameters(function, model):
        raise TypeError(
            f"{name}={type(function).__name__} is a module that does not contain the model: expected a function that "
            f"runs the model, such as {such}; pass a function of the model's output as loss=."
        )
    required = len(_required(function)) or int(batch is not None and _takes_any_number(function))
    if required and batch is None:
        raise TypeError(
            f"{name} requires {_arguments(function)}, but no batch was given: expected a function without arguments "
            f"such as {such}, or a batch, amplab.{tool}(model, batch, {name}=...)."
        )
    models = model.given if isinstance(model, ModelGroup) else model
    given = {0: (), 1: (batch,)}.get(required, (models, batch))
    refused = accepts(function, len(given))
    if refused is not None:
        raise TypeError(
            f"{name} is called without arguments, with the batch, or with the model and the batch, but {refused}: "
            f"expected a function such as {such}."
        )
    return functools.partial(function, *given) if given else function


def _shares_parameters(module: nn.Module, model: nn.Module) -> bool:
    return not {*map(id, module.parameters())}.isdisjoint(map(id, model.parameters()))


def check_scaler(scaler: Any) -> Scaler | None:
    """Return `scaler`, a session or a GradScaler; for the module ``amp`` this thread's session.

    Raises:
        TypeError: another type.
    """
    if isinstance(scaler, ModuleType) and scaler.__name__ in ("amplab.amp", "apex.amp"):
        return default_session()
    if scaler is None or isinstance(scaler, Session | torch.amp.GradScaler):
        return scaler
    raise TypeError(f"scaler={type(scaler).__name__}: expected a GradScaler, a Session, the module amp, or None.")


def scaler_in_use(scaler: Any) -> Scaler | None:
    """Return the result of `check_scaler`; for None this thread's session, if ``amp.initialize`` was called.

    Raises:
        TypeError: as `check_scaler`. RuntimeError: a session, or the module ``amp``, before `initialize`.
    """
    if scaler is None and default_session().initialized:
        return default_session()
    found = check_scaler(scaler)
    if isinstance(found, Session) and not found.initialized:
        given, name = ("amp", "amp") if isinstance(scaler, ModuleType) else ("Session", "session")
        raise RuntimeError(
            f"scaler={given} has no loss scale, since {name}.initialize was not called: call "
            f"{name}.initialize(model, optimizer) first{', in this thread' if given == 'amp' else ''}, or omit scaler=."
        )
    return found


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """Return `optimizer`, one or several or None, as a list.

    Of a wrapper that passes on to an optimizer, such as Accelerate's, the list has the optimizer.

    Raises:
        TypeError: another type.
    """
    one = _unwrapped(optimizer)
    given = [] if one is None else [one] if isinstance(one, Optimizer) else one
    found = [_unwrapped(each) for each in given] if isinstance(given, Iterable) else None
    if found is not None and all(isinstance(each, Optimizer) for each in found):
        return found
    kinds = f" of {', '.join(dict.fromkeys(type(each).__name__ for each in found))}" if found else ""
    given_as = repr(optimizer) if isinstance(optimizer, str) else f"{type(optimizer).__name__}{kinds}"
    raise TypeError(f"optimizer={given_as}: expected a torch.optim.Optimizer, or a list of them.")


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer in a wrapper, which has no hooks of its own; also if it is one by its type."""
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", ()):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def check_loss_function(loss: Any) -> None:
    """Raise a TypeError unless `loss` is a function, or None."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        name = loss.__name__
        raise TypeError(f"loss={name} is a class: expected a function or an instance; call it, {name}().")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss={type(loss).__name__}: expected a function of the model's output, or None.")


def _check_batch(tool: str, batch: Any) -> None:
    """Raise a TypeError for an object that yields many batches, and for a function."""
    many = "expected one batch, not an object that yields many; pass"
    if isinstance(batch, DataLoader | Dataset):
        loader = "loader" if isinstance(batch, DataLoader) else "DataLoader(dataset, batch_size=64)"
        raise TypeError(f"batch={type(batch).__name__}: {many} next(iter({loader})).")
    if isinstance(batch, Iterator):
        raise TypeError(f"batch={type(batch).__name__}: {many} next(batch).")
    if callable(batch):
        raise TypeError(
            f"batch={_name_of(batch)}: expected a batch, not a function. Write {_by_step(tool)} for a function that "
            f"returns the loss, or {_by_loss(tool)} for a function of the output."
        )


def _check_given(loss: Loss, given: int, what: str) -> None:
    refused = accepts(loss, given)
    if refused is not None:
        raise TypeError(f"loss is called with {what}, but {refused}; wrap it: loss=lambda out: criterion(out, target).")


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> None:
    """Raise a TypeError unless forward takes these arguments; a hook may change them first."""
    if model._forward_pre_hooks:
        return
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except ValueError:  # it says nothing
        return
    except TypeError as refusal:
        keys = f" with the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) and batch else ""
        raise TypeError(
            f"batch={type(batch).__name__}{keys or (' without values' if not len(batch) else '')}: expected what "
            f"{_words(model)} takes, but it is {refusal}; help(amplab.trace.handed_step) shows how a batch is passed."
        ) from None


def _words(model: nn.Module) -> str:
    return f"{type(model).__name__}.forward({', '.join(inspect.signature(model.forward).parameters)})"


def _called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model; add a note on how it was called to what it raises."""
    try:
        return model(*args, **kwargs)
    except Exception as error:
        given = [*map(_described, args), *(f"{name}={_described(value)}" for name, value in kwargs.items())]
        all_tensors = all(isinstance(each, Tensor) for each in (*args, *kwargs.values()))
        weights = dict.fromkeys(_described(each, shape=False) for each in model.parameters())
        error.add_note(
            f"amplab called {type(model).__name__}({', '.join(given)}); its parameters are "
            f"{', '.join(weights) or 'none'}.{'' if all_tensors else _BY_STEP}"
        )
        raise


_BY_STEP = " To call it in another way, pass step=, a function that calls the model and returns the loss."


def _described(value: Any, *, shape: bool = True) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    sizes = str(list(value.shape)) if shape else ""
    return f"{str(value.dtype).removeprefix('torch.')}{sizes} on {value.device}"


def _parts(
    model: nn.Module, batch: Any, wants: list[inspect.Parameter]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return the positional and the named arguments of the model, and those of the loss after the output."""
    whole = (batch,) if len(wants) > 1 else ()
    if isinstance(batch, Mapping):
        known = _known_names(model)
        return (), {key: value for key, value in batch.items() if known is None or key in known}, whole
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence):
        return (batch,), {}, whole
    if batch and isinstance(batch[0], Mapping) and set(batch[0]) <= (_known_names(model) or set()):
        return (), dict(batch[0]), tuple(batch[1:]) or whole
    apart = 0 if len(wants) == 2 and wants[1].name == "batch" else max(0, len(wants) - 1)
    first = _into_model(model, len(batch), apart)
    rest = tuple(batch[first:])
    return tuple(batch[:first]), {}, rest if apart and rest else whole


def _into_model(model: nn.Module, given: int, apart: int) -> int:
    """Return how many of `given` values forward takes, if the loss needs `apart` of them."""
    takes = _by_place(model.forward)
    least = sum(each.default is each.empty and each.kind is not each.VAR_POSITIONAL for each in takes)
    most = given if any(each.kind is each.VAR_POSITIONAL for each in takes) else len(takes)
    return min(given, most, max(least, given - apart))


def _required(function: Callable[..., Any] | None) -> list[inspect.Parameter]:
    """Return the positional arguments without defaults."""
    return [each for each in _by_place(function) if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]


def _takes_any_number(function: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_POSITIONAL for each in _by_place(function))


def _arguments(function: Callable[..., Any]) -> str:
    return f"({', '.join(each.name for each in _required(function))})"


def _by_place(function: Callable[..., Any] | None) -> list[inspect.Parameter]:
    """Return the positional arguments of a function; none if it is written in C without a signature."""
    if function is None:
        return []
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each for each in parameters if each.kind in _BY_PLACE]


_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def _known_names(model: nn.Module) -> set[str] | None:
    """Return the names that forward takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters}


_SUM = "the sum of the output, as no loss is given"


def _loss_in(output: Any) -> tuple[Tensor, str]:
    """Return the loss in a model's output, and where it was."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own, "the output's own loss"
    tensors = floating_tensors_in(output)
    if not tensors:
        raise ValueError(
            f"the model returned {_described(output)} without a floating-point tensor: expected one to start backward "
            "from; pass loss=, a function of the output."
        )
    return cast(Tensor, sum(tensor.float().sum() for tensor in tensors)), _SUM


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", type(func).__name__).replace("<lambda>", "lambda").split(".<locals>.")[-1]
