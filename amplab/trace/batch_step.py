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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["ModelGroup", "StepFunction", "as_model", "floating_tensors", "step_function"]


class ModelGroup(nn.Module):
    """Several models that are one step, e.g. a generator and a discriminator; their paths begin with their names."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


class StepFunction:
    """Runs a step's forward when it is called, and gives the loss.

    Args:
        output: calls the model; None where the loss runs the step.
        loss: the user's loss, given the output and `rest`; None for what the output offers.
        rest: what the loss is given beside the output.

    Attributes:
        loss: where the number comes from, in words; known once the step has run.
    """

    def __init__(self, output: Callable[[], Any] | None, loss: Callable[..., Tensor] | None, rest: tuple = ()) -> None:
        self.loss = "" if loss is None else f"{_name_of(loss)}, as given"
        self._output, self._criterion, self._rest = output, loss, rest

    def __call__(self) -> Tensor:
        """Return the loss of one forward."""
        given = self._rest if self._output is None else (self._output(), *self._rest)
        if self._criterion is not None:
            return self._criterion(*given)
        loss, self.loss = _loss_in(given[0])
        return loss


def as_model(model: Any) -> nn.Module:
    """Return a model; several in a list, tuple or dict as one group.

    Raises:
        TypeError: something else than modules.
    """
    if isinstance(model, list | tuple):
        kinds = [type(each).__name__ for each in model]
        names = [kind if kinds.count(kind) == 1 else f"{kind}{place}" for place, kind in enumerate(kinds)]
        model = dict(zip(names, model, strict=True))
    several = model.values() if isinstance(model, Mapping) else (model,)
    for each in several:
        if not isinstance(each, nn.Module):
            raise TypeError(f"model={type(each).__name__}: expected a torch.nn.Module, or a list or dict of them.")
    return ModelGroup(model) if isinstance(model, Mapping) else model


def step_function(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> StepFunction:
    """Return what runs a forward of `model` on `batch`; the module's table says how.

    Raises:
        TypeError: `loss` cannot be called; or there is neither a batch nor a loss, or a group without a loss.
    """
    if loss is not None and not callable(loss):
        raise TypeError(f"loss={type(loss).__name__}: expected a function of the model's output, or None.")
    runs_itself = batch is None or isinstance(model, ModelGroup)
    if runs_itself and loss is None:
        what = "batch=None" if batch is None else "several models"
        raise TypeError(f"{what} without a loss: expected loss=, a function that runs the step and returns the loss.")
    if runs_itself:
        return StepFunction(None, loss, () if batch is None else (batch,))
    args, kwargs, rest = _parts(model, batch, _required(loss))
    return StepFunction(lambda: model(*args, **kwargs), loss, rest)


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
    tensors = list(floating_tensors(output))
    if not tensors:
        raise ValueError(
            f"the model returned {type(output).__name__} without a floating-point tensor: expected one to start "
            "backward from; pass loss=, a function of the output."
        )
    return sum(tensor.float().sum() for tensor in tensors), "the sum of the output, as no loss is given"


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of what a module returns: in dicts, sequences and dataclasses, however deep."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from floating_tensors(each)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            yield from floating_tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from floating_tensors(getattr(value, field.name))


def _name_of(func: Callable) -> str:
    return getattr(func, "__qualname__", type(func).__name__).replace("<lambda>", "lambda").split(".<locals>.")[-1]
