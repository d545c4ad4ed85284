"""One step of a model nobody has seen: how its batch goes in, and which number its backward starts from.

=================  ============================  =======================================================
batch              the model is called as        the loss is called as
=================  ============================  =======================================================
a tensor           model(batch)                  loss(output), loss(output, batch) if it takes two
a mapping          model(**batch)                the same; keys that forward does not know stay with it
a tuple or list    model(*first), as many as     loss(output, *rest); with nothing left over
                   forward takes                 loss(output, batch)
none               not at all                    loss(), which runs the step itself
several models     not at all                    loss(batch), or loss() without one; the same
=================  ============================  =======================================================

Without `loss` it is the output's own `loss` (a key or an attribute), else the sum of every floating-point output.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from amplab.policies.nested_tensors import floating_tensors_in
from amplab.trace.step_checks import accepts, check_loss, check_model

__all__ = ["ModelGroup", "StepFunction", "as_model", "step_function"]


class ModelGroup(nn.Module):
    """Several models that are one step, e.g. a generator and a discriminator; their paths begin with their names."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(str(name).replace(".", "_"), model)  # a module's name is a word without a dot


class StepFunction:
    """Runs a step's forward when it is called, and gives the loss.

    Args:
        model: whose step it is.
        output: calls the model; None where the loss runs the step.
        loss: the user's loss, given the output and `rest`; None for what the output offers.
        rest: what the loss is given beside the output.

    Attributes:
        loss: where the number comes from, in words; known once the step has run.
    """

    def __init__(
        self,
        model: nn.Module,
        output: Callable[[], Any] | None,
        loss: Callable[..., Tensor] | None,
        rest: tuple = (),
    ) -> None:
        self.loss = "" if loss is None else f"{_name_of(loss)}, as given"
        self._model, self._output, self._criterion, self._rest = model, output, loss, rest

    def __call__(self) -> Tensor:
        """Return the loss of one forward.

        Raises:
            TypeError, ValueError: it is no number to start backward from.
        """
        given = self._rest if self._output is None else (self._output(), *self._rest)
        if self._criterion is None:
            loss, self.loss = _loss_in(given[0])
        else:
            loss = self._criterion(*given)
        check_loss(loss, self._model, "the model" if self._criterion is None else "loss")
        return loss


def as_model(model: Any, *, compiled: bool = False, values: bool = False) -> nn.Module:
    """Return a model; several in a list, tuple or dict as one group.

    Args:
        model: what was given.
        compiled, values: as `check_model` takes them.

    Raises:
        TypeError, ValueError: as `check_model`; a list or dict with no model in it.
    """
    if isinstance(model, list | tuple):
        kinds = [type(each).__name__ for each in model]
        names = [kind if kinds.count(kind) == 1 else f"{kind}{place}" for place, kind in enumerate(kinds)]
        model = dict(zip(names, model, strict=True))
    if not isinstance(model, Mapping):
        return check_model(model, compiled=compiled, values=values)
    if not model:
        raise TypeError("no model in the list: expected a torch.nn.Module, or a list or dict of them.")
    for each in model.values():
        check_model(each, compiled=compiled, values=values)
    return ModelGroup(model)


def step_function(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> StepFunction:
    """Return what runs a forward of `model` on `batch`; the module's table says how.

    Raises:
        TypeError: `loss` cannot be called, or not with what it is given; the batch is many batches, or does not fit
            the model's forward; or there is neither a batch nor a loss, or a group without a loss.
    """
    _check_criterion(loss)
    _check_batch(batch)
    runs_itself = batch is None or isinstance(model, ModelGroup)
    if runs_itself and loss is None:
        what = "batch=None" if batch is None else "several models"
        raise TypeError(f"{what} without a loss: expected loss=, a function that runs the step and returns the loss.")
    if runs_itself:
        given = () if batch is None else (batch,)
        _check_given(loss, len(given), "the batch alone" if given else "nothing, as there is no batch")
        return StepFunction(model, None, loss, given)
    args, kwargs, rest = _parts(model, batch, _required(loss))
    _check_call(model, args, kwargs, batch)
    beside = f", {len(rest)} more of the batch" if rest else ""
    _check_given(loss, 1 + len(rest), f"the model's output{beside}")
    return StepFunction(model, lambda: _called(model, args, kwargs), loss, rest)


def _check_criterion(loss: Any) -> None:
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        name = loss.__name__
        raise TypeError(f"loss={name} is a class: expected a function or an instance; call it, {name}().")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss={type(loss).__name__}: expected a function of the model's output, or None.")


def _check_batch(batch: Any) -> None:
    """Raise a TypeError for what holds many batches, and for what makes one."""
    many = "expected one batch, and this holds many; take one"
    if isinstance(batch, DataLoader | Dataset):
        loader = "loader" if isinstance(batch, DataLoader) else "DataLoader(dataset, batch_size=64)"
        raise TypeError(f"batch={type(batch).__name__}: {many}, next(iter({loader})).")
    if isinstance(batch, Iterator):
        raise TypeError(f"batch={type(batch).__name__}: {many}, next(batch).")
    if inspect.isroutine(batch):
        raise TypeError(f"batch={_name_of(batch)}: expected a batch, and this is a function; pass what it returns.")


def _check_given(loss: Callable[..., Tensor] | None, given: int, what: str) -> None:
    refused = None if loss is None else accepts(loss, given)
    if refused is not None:
        raise TypeError(f"loss is given {what}, and {refused}; wrap it, e.g. loss=lambda out: criterion(out, target).")


def _check_call(model: nn.Module, args: tuple, kwargs: dict[str, Any], batch: Any) -> None:
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
            f"{_words(model)} takes, and it is {refusal}; see amplab.xray for how a batch goes in."
        ) from None


def _words(model: nn.Module) -> str:
    return f"{type(model).__name__}.forward({', '.join(inspect.signature(model.forward).parameters)})"


def _called(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the model; what it raises says with what it was called."""
    try:
        return model(*args, **kwargs)
    except Exception as error:
        given = [*map(_described, args), *(f"{name}={_described(value)}" for name, value in kwargs.items())]
        weights = dict.fromkeys(_described(each, shape=False) for each in model.parameters())
        error.add_note(
            f"amplab called {type(model).__name__}({', '.join(given)}); its parameters are "
            f"{', '.join(weights) or 'none'}."
        )
        raise


def _described(value: Any, *, shape: bool = True) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    sizes = str(list(value.shape)) if shape else ""
    return f"{str(value.dtype).removeprefix('torch.')}{sizes} on {value.device}"


def _parts(model: nn.Module, batch: Any, wants: list[inspect.Parameter]) -> tuple[tuple, dict[str, Any], tuple]:
    """What the model is given by place and by name, and what the loss is given beside the output."""
    whole = (batch,) if len(wants) > 1 else ()
    if isinstance(batch, Mapping):
        known = _known_names(model)
        return (), {key: value for key, value in batch.items() if known is None or key in known}, whole
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence):
        return (batch,), {}, whole
    apart = 0 if len(wants) == 2 and wants[1].name == "batch" else max(0, len(wants) - 1)
    first = _into_model(model, len(batch), apart)
    rest = tuple(batch[first:])
    return tuple(batch[:first]), {}, rest if apart and rest else whole


def _into_model(model: nn.Module, given: int, apart: int) -> int:
    """How many of `given` values forward takes, where the loss wants `apart` of them and forward can do without."""
    takes = _by_place(model.forward)
    least = sum(each.default is each.empty and each.kind is not each.VAR_POSITIONAL for each in takes)
    most = given if any(each.kind is each.VAR_POSITIONAL for each in takes) else len(takes)
    return min(given, most, max(least, given - apart))


def _required(loss: Callable | None) -> list[inspect.Parameter]:
    """What a loss has to be given by place."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    return [each for each in _by_place(function) if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]


def _by_place(function: Callable | None) -> list[inspect.Parameter]:
    """The arguments that a function takes by place; none where it is written in C and says nothing."""
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
    """The names that forward takes; None where it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters}


def _loss_in(output: Any) -> tuple[Tensor, str]:
    """The loss that a model's output offers, and where it lies."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own, "the output's own loss"
    tensors = floating_tensors_in(output)
    if not tensors:
        raise ValueError(
            f"the model returned {_described(output)} without a floating-point tensor: expected one to start backward "
            "from; pass loss=, a function of the output."
        )
    return sum(tensor.float().sum() for tensor in tensors), "the sum of the output, as no loss is given"


def _name_of(func: Callable) -> str:
    return getattr(func, "__qualname__", type(func).__name__).replace("<lambda>", "lambda").split(".<locals>.")[-1]
