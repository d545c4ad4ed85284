"""Lesson 13, fused optimizers and combined gradients: a network of many small tensors, and what steps and buffers cost.

first_updates     the length of each optimizer's first step
trained           the weights after a run, with combined gradients or without
ACTIONS, breaks   what people do with gradients, and whether a gradient then leaves its buffer
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amplab import optimizers
from amplab.amp import Session
from amplab.display.charts import Chart, bar_chart
from amplab.lab.tasks.digits import digit_images
from amplab.lessons.cost import operators_called
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import in_form, keys_fault, shown
from amplab.optimizers import merge_groups
from amplab.scalers import FlatGradients

__all__ = [
    "ACTIONS",
    "breaks",
    "check_buffer_size",
    "check_groups",
    "check_safe_actions",
    "digits",
    "draw_padding",
    "draw_step",
    "first_updates",
    "group_for_each",
    "loss_of",
    "network",
    "trained",
]

_NAMES = ("SGD", "Adam", "AdamW", "AdamP", "BertAdam", "Lamb", "RMSprop", "RMSpropTF", "Adadelta")


def digits() -> tuple[Tensor, Tensor]:
    """Return 128 images ``(128, 64)`` and their labels ``(128,)``."""
    images, labels = digit_images()
    return images[:128].flatten(1), labels[:128]


def network(hidden: int = 8, width: int = 32) -> nn.Sequential:
    """Return ``hidden + 2`` linear layers with a weight and a bias each, the same at every call."""
    widths = [64, *[width] * (hidden + 1), 10]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        layers = (nn.Linear(*sizes) for sizes in itertools.pairwise(widths))
        return nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())][:-1])


def loss_of(model: nn.Module) -> Tensor:
    """Return the cross-entropy of a model on the digits."""
    images, labels = digits()
    return F.cross_entropy(model(images).float(), labels)


def draw_step(hidden: int) -> Chart:
    """Draw how many operators one step of Adam calls, for a network with ``hidden + 2`` layers."""
    model = network(hidden)
    loss_of(model).backward()
    makers: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
        "Adam(foreach=False)": lambda params: torch.optim.Adam(params, foreach=False),
        "Adam(foreach=True)": lambda params: torch.optim.Adam(params, foreach=True),
        "NpuFusedAdam": optimizers.NpuFusedAdam,
    }
    counts = {}
    for name, make in makers.items():
        optimizer = make(model.parameters())
        optimizer.step()  # the first one makes the state
        counts[name] = float(operators_called(optimizer.step))
    return bar_chart(counts, label=f"operators of a step, {2 * hidden + 4} tensors", whole=600)


def first_updates() -> dict[str, float]:
    """Return the first update of a weight of 0 with gradient 0.5, in learning rates, by each ``NpuFused`` optimizer."""
    updates = {}
    for name in _NAMES:
        weight = nn.Parameter(torch.zeros(4))
        weight.grad = torch.full((4,), 0.5)
        make: Any = getattr(optimizers, f"NpuFused{name}")
        make([weight], lr=2**-10).step()
        updates[name] = -weight[0].item() * 2**10
    return updates


def trained(opt_level: str, *, combine_grad: bool, steps: int = 20) -> list[Tensor]:
    """Train with momentum and weight decay, and return the weights."""
    session, model = Session(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    session.initialize(model, optimizer, opt_level=opt_level, verbosity=0, combine_grad=combine_grad)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        with session.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
        session.clip_grad_norm_(optimizer, 100.0)  # above every norm here, so that it changes nothing
        optimizer.step()
    weights = [each.detach().clone() for each in session.master_params(optimizer)]
    session.reset()
    return weights


def draw_padding(width: int) -> Chart:
    """Draw the elements of the flat buffer of a linear layer with ``2 ** width`` inputs and outputs."""
    side = 2**width
    model = nn.Linear(side, side)
    model(torch.ones(1, side)).sum().backward()
    (buffer,) = FlatGradients(model.parameters()).buffers
    used, size = sum(param.numel() for param in model.parameters()), buffer.numel()
    parts = {"weight": side * side, "bias": side, "padding": size - used}
    percent = {name: 100 * count / size for name, count in parts.items()}
    return bar_chart(percent, unit="%", label=f"buffer of Linear({side}, {side}): {size} elements", whole=100)


def _assign(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 2


def _multiply(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(2)


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _keep_graph(model: nn.Module) -> None:
    with warnings.catch_warnings():  # of a cycle of references, which ends with the model
        warnings.simplefilter("ignore", UserWarning)
        loss_of(model).backward(create_graph=True)


ACTIONS: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "a": ("model.zero_grad()", lambda model: model.zero_grad()),
    "b": ("model.zero_grad(set_to_none=False)", lambda model: model.zero_grad(set_to_none=False)),
    "c": ("param.grad = param.grad * 2", _assign),
    "d": ("param.grad.mul_(2)", _multiply),
    "e": ("clip_grad_norm_(model.parameters(), 1e-3)", _clip),
    "f": ("loss.backward(), a second time", lambda model: loss_of(model).backward()),
    "g": ("loss.backward(create_graph=True)", _keep_graph),
    "h": ("model.double()", lambda model: model.double()),
}
"""What people do with gradients: a letter, the line of code, and the function that runs it."""


def breaks(letter: str) -> str:
    """Run one of `ACTIONS` on combined gradients; return why they left their buffer, "" if they did not."""
    model = network(hidden=0)
    loss_of(model).backward()
    flat = FlatGradients(model.parameters())
    ACTIONS[letter][1](model)
    return next((broken.reason.value for broken in flat.check()), "")


def group_for_each(model: nn.Module) -> list[dict[str, Any]]:
    """Return a group for each parameter, as many scripts make them: weight decay for weights, none for biases."""
    return [
        {"params": [param], "weight_decay": 0.0 if name.endswith("bias") else 1e-4}
        for name, param in model.named_parameters()
    ]


@exercise("13-1")
def check_buffer_size(answer: int) -> str | None:
    """Ask for the elements of the flat buffer of ``Linear(100, 10)``.

    Form:
        write the number of elements.

    Right:
        1000 is rounded up to 1008 and 10 to 16, and each part has 32 elements of padding: 1040 + 48.
    """
    model = nn.Linear(100, 10)
    model(torch.ones(1, 100)).sum().backward()
    (buffer,) = FlatGradients(model.parameters()).buffers
    hints = {
        1010: "these are the gradients alone; each part is also rounded up and padded",
        1024: "each part is rounded up; 32 more elements follow each of them",
        1074: "32 elements follow each part; each is first rounded up to a multiple of 16",
        1056: "each of the two parts has 32 elements of padding of its own",
        1040: "this is the part of the weight; the bias has one, too",
    }
    if answer == buffer.numel():
        return None
    return f"{answer} is not its size: {hints.get(answer, 'add the parts of the weight (1000) and of the bias (10)')}."


@exercise("13-2")
def check_safe_actions(answer: str | Iterable[str]) -> str | None:
    """Ask for the letters of the actions that leave gradients in their buffer.

    Form:
        write the letters in one string, such as "ab".

    Right:
        What writes into a gradient is safe. What puts another tensor, or None, into .grad is not.
    """
    letters = set("".join(answer)) - set(" ,")
    if unknown := letters - set(ACTIONS):
        return f"{shown(answer)}: {sorted(unknown)} are not letters of the list; write 'ab' for its first two."
    for letter, (line, _) in ACTIONS.items():
        if (reason := breaks(letter)) and letter in letters:
            return f"{letter}, {line}, is not safe: {reason}."
    missing = [letter for letter in ACTIONS if letter not in letters and not breaks(letter)]
    if missing:
        return f"what you chose is safe, but {len(missing)} more of the list are: look for lines that write in place."
    return None


@exercise("13-3")
def check_groups(answer: Sequence[Mapping[str, Any]], model: nn.Module) -> str | None:
    """Ask for as few parameter groups as possible with the options of `group_for_each`.

    Form:
        write a list of groups, each of them {"params": […], "weight_decay": …}.

    Right:
        Two sets of options, so two groups; every parameter keeps its weight decay.
    """
    options = {id(group["params"][0]): group["weight_decay"] for group in group_for_each(model)}
    names = {id(param): name for name, param in model.named_parameters()}
    seen: dict[int, float] = {}
    for at, group in enumerate({"weight_decay": 0.0, **each} for each in answer):
        if fault := keys_fault(group, ("params", "weight_decay"), f"answer[{at}]"):
            return fault
        decay = in_form(group["weight_decay"], float, f"answer[{at}]['weight_decay']")
        for place, param in enumerate(in_form(group["params"], Iterable[Any], f"answer[{at}]['params']")):
            if id(param) not in names:
                return f"answer[{at}]['params'][{place}] = {shown(param)} is no parameter of this network."
            if id(param) in seen:
                return f"{names[id(param)]} is in two groups: an optimizer refuses this."
            seen[id(param)] = decay
    for key, decay in options.items():
        if key not in seen:
            return f"{names[key]} is in no group, so it would never be trained."
        if seen[key] != decay:
            return f"{names[key]} would get a weight decay of {seen[key]:g} instead of {decay:g}."
    fewest = len(merge_groups(group_for_each(model)))
    return (
        None if len(answer) == fewest else f"{len(answer)} groups; {fewest} are enough: merge those with equal options."
    )
