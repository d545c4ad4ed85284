"""A model, data and a loss of one's own as a task of the lab.

`register_own` checks what `amplab.lab.open` was given and offers it to configs as the task "own", or "own-2" if "own"
is taken. From then on it is a task like the others: a reset, a comparison or a twin makes fresh models and optimizers,
by calling the factories, or by copying the objects as they were when the lab opened.

    model=          an nn.Module, a list or dict of them, or a function that returns one
    data=           an iterable of batches (see `batches`), or a function that returns one
    loss= / step=   as every tool takes them (see `amplab.trace.handed_step`); several models need step(models, batch)
    optimizer=      a function of the parameters, an optimizer of the model's parameters, or None for Adam

Several losses: ``step={"D": [real, fake], "G": generate}`` and ``optimizer={"D": make, "G": make}`` are keyed by the
models. Each loss has a loss scale, each model steps after its losses, in the order of `step`.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp.apex.before_initialize import hooks_of
from amplab.amp.backward.optimizer_params import params_of
from amplab.diagnose.trial import check_called_with, check_optimizer, check_step_of_copies, check_trained
from amplab.lab.batches import Batches, check_data
from amplab.lab.code_digests import code_digests
from amplab.lab.config import OWN
from amplab.lab.data_generators import DataGenerators
from amplab.lab.drawing_turns import drawing_alone
from amplab.lab.kept_attributes import KeptAttributes
from amplab.lab.models import MODELS, ModelChoice
from amplab.lab.tasks import OWN_TASK, TASKS, MakeOptimizer, Score, Task, TaskChoice, TaskLoss
from amplab.optimizers import FusedOptimizer
from amplab.optimizers.group_settings import learning_rate
from amplab.policies.nested_tensors import tensors_in
from amplab.policies.signals import is_interrupt
from amplab.trace.argument_checks import accepts, copy_of
from amplab.trace.as_found import Undo
from amplab.trace.forwarded_modules import buffers_kept
from amplab.trace.handed_step import Loss, ModelGroup, as_model, handed_step
from amplab.trace.optimizer_hooks import is_amplabs
from amplab.trace.random_states import devices_in_use, random_states_kept, seed_all
from amplab.trace.untouched import nodes_behind

__all__ = ["OwnCode", "OwnTask", "check_devices", "forget_own", "register_own"]

_TOOL = "lab.open"
_SINCE = "Reset and Compare need fresh ones"
_CALL = "amplab.lab.open(model=model, data=loader, loss=criterion, optimizer=lambda weights: Adam(weights, lr=1e-3))"
_ADAM = {"adam": 0.001, "adamw": 0.001, "sgd": 0.01}  # learning rates for a model that nothing is known of
_NOT_IN_NAMES = re.compile(r"[^a-z0-9_-]")


@dataclass(frozen=True, eq=False)
class OwnCode:
    """What `amplab.lab.open` was given, checked.

    Attributes:
        make_model: Returns a fresh model; several as one `ModelGroup`.
        given_model: The copied model whose parameters the given optimizers have; None without such optimizers.
        data: An iterable of batches, or a function that returns one.
        losses: (model's name, loss, step) of each loss; the name is "" if one optimizer trains everything.
        optimizers: What makes the optimizer of each model of `losses`; None for Adam.
        evaluate: The held-out score of a model.
        generators: The random generators of the data, for all runs.
    """

    make_model: Callable[[], nn.Module]
    given_model: nn.Module | None
    data: Any
    losses: tuple[tuple[str, Loss | None, Loss | None], ...]
    optimizers: dict[str, MakeOptimizer | Optimizer | None] = field(default_factory=dict)
    evaluate: Callable[[Any], float] | None = None
    generators: DataGenerators = field(default_factory=DataGenerators)

    @property
    def trained(self) -> list[str]:
        """The names of the models that have an optimizer, in the order of their steps."""
        return list(dict.fromkeys(name for name, _, _ in self.losses))

    @property
    def has_optimizers(self) -> bool:
        """Whether optimizers were given."""
        return any(made is not None for made in self.optimizers.values())


class OwnTask(Task):
    """The task of a model of one's own."""

    def __init__(self, name: str, code: OwnCode, score: Score | None, seed: int) -> None:
        self.name, self.seed, self.score = name, seed, score
        self._code = code
        self._batches = Batches(code.data, seed, code.generators)
        places = {model: place for place, model in enumerate(code.trained)}
        copies: dict[int, Any] = {}
        given = [(model, _own(loss, copies), step) for model, loss, step in code.losses]
        losses = dict.fromkeys(loss for _, loss, _ in given if isinstance(loss, nn.Module))
        self._modules_of_losses = {f"loss {number}".removesuffix(" 0"): each for number, each in enumerate(losses)}
        self.losses = tuple(
            TaskLoss(_name_of_loss(model, number, code), _loss_of(loss, step), places[model])
            for number, (model, loss, step) in enumerate(given)
        )
        code_of_steps = [each for _, loss, step in given for each in (loss, step) if each is not None]
        self._code_of_steps = {f"code {number}": each for number, each in enumerate(code_of_steps)}
        self._devices: tuple[torch.device, ...] = ()
        self._trained: dict[str, list[str]] = {}  # the parameters of each model; a step may freeze some for a while

    def batch(self, step: int, batch_size: int) -> Any:  # noqa: ARG002  the data have batches already
        """Return the batch of a step."""
        return self._batches.batch(step)

    def place_in_data(self, step: int) -> dict[str, Any]:
        """Return the first step and the number of the epoch of a batch, and what the data kept when it began."""
        start, epoch = self._batches.epoch_of(step)
        state, lost = self._batches.state_of(epoch)
        return {"epoch": [start, epoch], "data": state, "left_out": lost}

    def know_place(self, place: Mapping[str, Any]) -> None:
        """Take over what `place_in_data` returned in another process; an older checkpoint has less."""
        if epoch := place.get("epoch"):
            self._batches.know_epoch(epoch[0], epoch[1], place.get("data"))

    def parts_with_state(self) -> dict[str, nn.Module]:
        """Return the losses that are modules."""
        return self._modules_of_losses

    def code_of_steps(self) -> dict[str, Any]:
        """Return the functions and modules that were given as `loss` and `step`."""
        return self._code_of_steps

    def tell_of_reading(self, goes_on: Callable[[int], bool]) -> None:
        """See `Batches.goes_on`."""
        self._batches.goes_on = goes_on

    def rest(self) -> None:
        """End the workers that read the data."""
        self._batches.rest()

    def optimizers(self, model: nn.Module, make: MakeOptimizer | None) -> list[Optimizer]:
        """Return an optimizer for each model that has one of its own."""
        self._devices = tuple({each.device for each in model.parameters() if each.device.type != "cpu"})
        if not self._trained:
            self._trained = {name: [*_trained(model, name)] for name in self._code.trained}
        weights = {name: [model.get_parameter(each) for each in names] for name, names in self._trained.items()}
        return [self._optimizer(each, name, make) for name, each in weights.items()]

    def measure(self, model: nn.Module) -> float:
        """Return what `evaluate` returns."""
        if self._code.evaluate is None:
            raise NotImplementedError("no evaluate= was given.")
        return float(self._code.evaluate(model.given if isinstance(model, ModelGroup) else model))

    def seed_forward(self, step: int, place: int = 0) -> None:
        """Seed torch with the model's devices, Python and NumPy: a step of one's own may draw from any of them."""
        seed_all(self.seed_of(step, place), self._devices)

    @contextmanager
    def random_states_kept(self) -> Iterator[None]:
        """Run a block and restore the random states of torch, its devices, Python and NumPy."""
        with random_states_kept(self._devices):
            yield

    def optimizer_of(self, weights: Sequence[Tensor], make: MakeOptimizer | None) -> Optimizer:
        """Return the one optimizer, of the parameters of a copy."""
        return self._optimizer(weights, "", make)

    def _optimizer(self, weights: Sequence[Tensor], name: str, make: MakeOptimizer | None) -> Optimizer:
        given = self._code.optimizers.get(name) if make is None else make
        if isinstance(given, Optimizer) and self._code.given_model is not None:
            return _moved(given, [*_trained(self._code.given_model, name).values()], weights)
        if given is None or isinstance(given, Optimizer):
            raise ValueError("no optimizer= was given; choose one by name.")
        optimizer = given(list(weights))
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer returned {type(optimizer).__name__}: expected a torch optimizer.")
        if not {*map(id, params_of(optimizer))} <= {*map(id, weights)}:
            raise ValueError(
                "optimizer returned one of other parameters: expected an optimizer of the parameters that the function "
                "gets, such as lambda weights: SGD(weights, lr=0.1)."
            )
        _check_step(optimizer)
        return optimizer


@drawing_alone
def register_own(
    model: Any,
    data: Any,
    *,
    loss: Loss | None = None,
    step: Any = None,
    optimizer: Any = None,
    evaluate: Callable[[Any], float] | None = None,
    taken: Set[str] = frozenset(),
) -> str:
    """Offer a model of one's own as a task and return the name of the task.

    One step's forward runs, on a fresh model, so that what does not fit together is refused here.

    Args:
        model, data, loss, step, optimizer, evaluate: as `amplab.lab.open` takes them.
        taken: Names that are not given again, besides those in use: a config may have them.

    Raises:
        TypeError, ValueError: One of them is not of its kind, or they do not fit together. What the model, the loss or
            the step raise passes through.
    """
    check_data(data)
    with random_states_kept(devices_in_use()):
        return _register(_checked(model, data, loss, step, optimizer, evaluate), taken)


def _register(code: OwnCode, taken: Set[str]) -> str:
    earlier = _tensors_of_one(code)
    first = code.make_model()
    if _check_fresh(first, earlier):
        _check_tensor_hooks(first)
        make = code.make_model
        code = replace(code, make_model=lambda: copy_of(make(), "model", _SINCE))
        first = code.make_model()
    check_devices({each.device.type for each in first.parameters()})
    for number in itertools.count(1):
        name = OWN if number == 1 else f"{OWN}-{number}"
        if name not in TASKS and name not in taken:
            break
    score = None if code.evaluate is None else _score(code.evaluate)
    rates, chosen = dict(_ADAM), "adam"
    if code.has_optimizers:
        made = OwnTask(name, code, score, 0).optimizers(first, None)
        chosen = OWN
        rates |= {OWN: learning_rate(made[0].param_groups[0]) or 0.0}
    task = OwnTask(name, code, score, 0)
    batch = task.batch(0, 0)
    _check_is_read_again(code, batch)
    digests = _digests(code, first, batch)  # a forward may note in attributes what it draws
    _try_one_step(task, first)
    label = type(first.get_submodule(code.trained[0]) if isinstance(first, ModelGroup) else first).__name__
    label = " + ".join(type(each).__name__ for each in first.children()) if isinstance(first, ModelGroup) else label
    TASKS[name] = TaskChoice(
        "your own" if number == 1 else f"your own, {number}",
        lambda seed: OwnTask(name, code, score, seed),
        score=score,
        optimizer=chosen,
        learning_rates=rates,
        has_own_optimizer=code.has_optimizers,
        has_batch_size=False,
        has_opposed_losses=len(code.trained) > 1,
        digests=digests,
    )
    MODELS[_free_model_name(label)] = ModelChoice(label, lambda _hidden: code.make_model(), (name,))
    return name


def forget_own(in_use: set[str]) -> None:
    """Stop offering the tasks of one's own that no run uses."""
    for name in [each for each in TASKS if OWN_TASK.fullmatch(each) and each not in in_use]:
        del TASKS[name]
        for model in [key for key, choice in MODELS.items() if choice.tasks == (name,)]:
            del MODELS[model]


# -- checks --------------------------------------------------------------------------------------------


def _checked(model: Any, data: Any, loss: Any, step: Any, optimizer: Any, evaluate: Any) -> OwnCode:
    _check_loss(loss)
    several = isinstance(step, Mapping)
    steps = (
        {name: [*each] if isinstance(each, list | tuple) else [each] for name, each in step.items()}
        if several
        else {"": [step]}
    )
    makers = dict(optimizer) if isinstance(optimizer, Mapping) else dict.fromkeys(steps, optimizer)
    for each in itertools.chain(*steps.values()):
        check_step_of_copies(_TOOL, each, "model=model, data=loader")
    instances = [each for each in makers.values() if isinstance(each, Optimizer)]
    for each in makers.values():
        if not isinstance(each, Optimizer):
            check_optimizer(each)
    if evaluate is not None:
        check_called_with("evaluate", evaluate, 1, "lambda model: accuracy(model, images, labels)")
    make, kept, makers = _model_maker(model, makers, has_instances=bool(instances))
    losses = tuple((name, loss, each) for name, functions in steps.items() for each in functions)
    return OwnCode(make, kept, data, losses, makers, evaluate)


def check_devices(kinds: Set[str]) -> None:
    """Raise a ValueError if the lab cannot train on one of these kinds of device.

    >>> check_devices({"cpu", "cuda"})
    """
    if "mps" in kinds:
        raise ValueError(
            "the model is on mps, which has no float64, and the lab measures in float64; expected a model on the CPU, "
            "as model.to('cpu') returns it, and batches there."
        )


def _model_maker(
    model: Any, makers: dict[str, Any], *, has_instances: bool
) -> tuple[Callable[[], nn.Module], nn.Module | None, dict[str, Any]]:
    """Return what makes a fresh model, and copies of the model and of the optimizers that were given as objects."""
    if isinstance(model, type) or (callable(model) and not isinstance(model, nn.Module)):
        check_called_with("model", model, 0, "lambda: Net(width=64)")
        if has_instances:
            raise TypeError(
                "optimizer is an object and model a function: its parameters are not those of the models that the "
                "function makes; pass a function as well, optimizer=lambda weights: Adam(weights, lr=1e-3)."
            )
        return lambda: check_trained(as_model(model())), None, makers
    group = as_model(model, values=True)
    check_trained(group)
    _check_tensor_hooks(group)
    _check_parameters(group, makers)
    memo: dict[int, Any] = {}
    instead = "pass a function that makes the model, model=lambda: Net(), and one for the optimizer"
    kept = copy_of(group, "model", _SINCE, memo, instead=instead)
    copied = {name: _copied(each, memo) if isinstance(each, Optimizer) else each for name, each in makers.items()}
    kept.zero_grad(set_to_none=True)
    if not any(each.training for each in kept.modules()):  # else some parts are frozen by their mode
        kept.train()
    return lambda: copy.deepcopy(kept), kept if has_instances else None, copied


def _check_parameters(model: nn.Module, makers: dict[str, Any]) -> None:
    known = {id(each) for each in model.parameters()}
    for given in makers.values():
        if not isinstance(given, Optimizer):
            continue
        _check_step(given)
        if any(not is_amplabs(hook) for hooks in hooks_of(given) for hook in hooks.values()):
            raise ValueError(
                f"optimizer={type(given).__name__}: has hooks, which belong to it, and Reset and Compare need others; "
                "pass a function that makes the optimizer with its hooks, optimizer=lambda weights: …."
            )
        if any(id(each) not in known for each in params_of(given)):
            raise ValueError(
                f"optimizer={type(given).__name__}: steps parameters that are not the model's; expected an optimizer "
                "of model.parameters()."
            )


def _check_tensor_hooks(model: nn.Module) -> None:
    """Raise a ValueError if weights have hooks, such as a mask of their gradients: a copy would train without them."""
    for name, weight in model.named_parameters():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise ValueError(
                f"model={type(model).__name__}: {name} has a hook, which a copy leaves out, and Reset and Compare need "
                "copies; pass a function that makes the model and registers the hook, model=make_model."
            )


def _check_step(optimizer: Optimizer) -> None:
    """Raise a ValueError if an optimizer cannot step by the gradients alone, as LBFGS."""
    refused = accepts(type(optimizer).step, 1)  # of the class: a schedule's wrapper has another signature
    if refused is not None:
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: the lab calls step() without arguments, and {refused}; expected an "
            "optimizer that needs no closure, such as lambda weights: Adam(weights, lr=1e-3)."
        )


def _check_loss(loss: Any) -> None:
    if isinstance(loss, nn.Module):
        trained = [name for name, each in loss.named_parameters() if each.requires_grad]
        if trained:
            raise ValueError(
                f"loss={type(loss).__name__}: has parameters to train ({', '.join(trained[:3])}), and the optimizer "
                "gets those of the model; make it a part of the model and pass step=, or freeze it with "
                "loss.requires_grad_(False)."
            )


def _check_names(code: OwnCode, model: nn.Module) -> None:
    models = dict(model.named_children()) if isinstance(model, ModelGroup) else {}
    unknown = [name for name in (*code.trained, *code.optimizers) if name and name not in models]
    if unknown or set(code.optimizers) - set(code.trained):
        names = ", ".join(map(repr, models)) or "none: pass several models as a dict"
        name = unknown[0] if unknown else next(iter(set(code.optimizers) - set(code.trained)))
        raise ValueError(f"{name!r} in step= or optimizer=: expected the names of the models in both ({names}).")
    if isinstance(model, ModelGroup) and all(step is None for _, _, step in code.losses):
        raise TypeError(
            "several models without step=: expected a function that runs them and returns the loss, "
            "step=lambda models, batch: …, or a dict of them by model."
        )


def _tensors_of_one(code: OwnCode) -> list[ReferenceType[Tensor]]:
    """Make a model, check the names by it, and return its tensors; the references do not keep it in memory."""
    model = code.make_model()
    _check_names(code, model)
    return [ref(each) for each in (*model.parameters(), *model.buffers())]


def _check_fresh(model: nn.Module, earlier: Sequence[ReferenceType[Tensor]]) -> bool:
    """Return whether a model has tensors of one that was made earlier; raise a ValueError if these are trained."""
    known = {id(tensor) for each in earlier if (tensor := each()) is not None}
    for name, weight in model.named_parameters():
        if weight.requires_grad and id(weight) in known:  # a frozen part may be shared
            raise ValueError(
                f"model=a function that returns the same {name} twice, and Reset and Compare need fresh ones; expected "
                "a new model from every call, such as lambda: Net(); to start from trained weights, pass the model "
                "itself, model=net."
            )
    return any(id(each) in known for each in (*model.parameters(), *model.buffers()))


def _try_one_step(task: OwnTask, model: nn.Module) -> None:
    """Run the forward of every loss once."""
    with buffers_kept(model), Undo() as undo:
        undo.add(KeptAttributes({"model": model, **task.code_of_steps()}).restore)  # hooks are shared by all copies
        for loss in task.losses:
            _check_trains(model, loss.of(model, task.batch(0, 0)))


def _check_trains(model: nn.Module, loss: Tensor) -> None:
    """Raise a ValueError if a loss is that of another model; what a reentrant checkpoint leads to is not seen."""
    leaves = [getattr(node, "variable", None) for node in nodes_behind(loss)]
    others = {id(each) for each in leaves if isinstance(each, nn.Parameter)}
    if others and others.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            "the loss depends on parameters of another model only, and the lab trains a copy of yours: expected the "
            "loss of the model that step= gets, step=lambda model, batch: …"
        )


def _check_is_read_again(code: OwnCode, first: Any) -> None:
    """Warn if a second run does not begin with the batch of the first one."""
    batches = Batches(code.data, 0, code.generators)
    tensors, again = tensors_in(first), tensors_in(batches.batch(0))
    if len(tensors) != len(again) or not all(map(_is_same, tensors, again)):
        data = getattr(code.data, "__name__", type(code.data).__name__)
        text = (
            f"data={data}: the first batch differs when the data are read again: after Reset and in Compare, each run "
            "has other batches. Instead of a function that counts epochs, pass an object that counts them in its "
            "attributes, as a sampler does; draw from the generators of torch, Python or NumPy, which the lab seeds."
        )
        warnings.warn_explicit(text, UserWarning, f"{_TOOL}()", 1)  # each time, not once for each text


def _is_same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return True
    return bool(((one == other) | (one != one)).all())  # NaN may stand for what is missing


def _digests(code: OwnCode, model: nn.Module, batch: Any) -> dict[str, str]:
    """Return the digests of all parts; of code that cannot be looked at none."""
    functions: dict[str, list[Any]] = {
        "loss": [loss for _, loss, _ in code.losses],
        "step": [step for _, _, step in code.losses],
        "optimizer": [*code.optimizers.values()],
        "evaluate": [code.evaluate],
    }
    try:
        return code_digests(model, batch, functions)
    except Exception as failure:
        if is_interrupt(failure):
            raise
        return {}


# -- parts ---------------------------------------------------------------------------------------------


def _loss_of(loss: Loss | None, step: Loss | None) -> Callable[[nn.Module, Any], Tensor]:
    def computed(model: nn.Module, batch: Any) -> Tensor:
        handed = handed_step(_TOOL, model, batch, loss=loss, step=step)
        value = handed()
        if handed.loss_is_made_up:
            raise TypeError(
                f"no loss: {type(model).__name__} returns none of its own, and training on the sum of its output has "
                "no meaning. Pass loss=, a function of the output and the rest of the batch, such as "
                "torch.nn.functional.cross_entropy, or step=, a function that returns the loss."
            )
        return value

    return computed


def _own(loss: Loss | None, copies: dict[int, Any]) -> Loss | None:
    """Return a copy of a loss that is a module: its forward may change its buffers, and each run begins as given."""
    if not isinstance(loss, nn.Module):
        return loss
    try:
        return copy_of(
            loss, "loss", "each run begins with its buffers as now", copies, instead="pass one that has no buffers"
        )
    except ValueError:
        if next(loss.buffers(), None) is None:
            return loss
        raise


def _name_of_loss(model: str, number: int, code: OwnCode) -> str:
    same = [place for place, (name, _, _) in enumerate(code.losses) if name == model]
    return (f"{model} {same.index(number) + 1}" if len(same) > 1 else model) or "loss"


def _trained(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters to train of a model, or of one of several by its name, by their names in all."""
    found = (model.get_submodule(name) if name else model).named_parameters(prefix=name)
    return {path: each for path, each in found if each.requires_grad}


def _moved(optimizer: Optimizer, old: Sequence[Tensor], new: Sequence[Tensor]) -> Optimizer:
    """Return a copy of an optimizer, of the parameters `new` of another copy of its model, without frozen ones."""
    trained: dict[int, Any] = {id(one): other for one, other in zip(old, new, strict=True)}
    moved = _copied(optimizer, {id(each): each for each in params_of(optimizer)} | trained)
    known = {*map(id, new)}
    for group in moved.param_groups:
        kept = [place for place, each in enumerate(group["params"]) if id(each) in known]
        for name in {"params", "param_names"} & group.keys():
            group[name] = [group[name][place] for place in kept]
    for each in [each for each in moved.state if isinstance(each, Tensor) and id(each) not in known]:
        del moved.state[each]
    return moved


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy with the attributes of a class of one's own, which `Optimizer` leaves out."""
    instead = "pass a function, optimizer=lambda weights: Adam(weights, lr=1e-3)"
    copied = copy_of(optimizer, "optimizer", _SINCE, memo, instead=instead)
    own = {name: value for name, value in vars(optimizer).items() if name not in vars(copied)}
    own.pop("step", None)  # as a schedule has put it there, which steps the original
    for name, value in own.items() if not isinstance(optimizer, FusedOptimizer) else ():
        try:
            vars(copied)[name] = copy.deepcopy(value, memo)
        except Exception as refusal:
            if is_interrupt(refusal):
                raise
            vars(copied)[name] = value  # such as a writer or a lock
    return copied


def _score(evaluate: Callable[..., Any]) -> Score:
    """Return the score that a function measures, by its name; an accuracy is a share."""
    name = getattr(evaluate, "__name__", "")
    words = name.replace("_", " ").strip() if name.isidentifier() else "score"
    is_share = words.endswith("accuracy")
    return Score(words, higher_is_better=is_share, is_share=is_share)


def _free_model_name(label: str) -> str:
    plain = _NOT_IN_NAMES.sub("", label.replace(" + ", "-").lower()) or "model"
    plain = plain if plain[0].isalpha() else f"model{plain}"
    names = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in MODELS)
