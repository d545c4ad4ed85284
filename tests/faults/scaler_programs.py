"""Random training programs that are legal for a GradScaler, and what they compute without one.

    program = random_program(seed)
    trained(program, scaler)        weights and scales with a scaler
    trained(program, None)          the reference: unscaled gradients, steps skipped by the rule of torch's page

A program is a list of calls. It is legal if every gradient that a step uses was unscaled once: nothing scaled is added
to a gradient that is unscaled. The scales are powers of two, so all results are equal bitwise.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import amplab

__all__ = ["KINDS", "Program", "Trained", "random_program", "trained"]

KINDS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.05, fused=True),
    "amplab sgd": lambda params: amplab.optimizers.FusedSGD(params, lr=0.05, momentum=0.9),
    "amplab adam": lambda params: amplab.optimizers.FusedAdam(params, lr=0.05),
}
_UNSCALES_IN_ITS_STEP = [kind for kind in KINDS if kind.startswith(("fused", "amplab"))]
_GROWTH_INTERVAL = 3
_BIG, _SMALL = 2.0**20, 2.0**4  # of the scales that a program sets


@dataclass
class Program:
    """Calls, and what they work on.

    Attributes:
        kinds: of the optimizers, by number.
        owned: the parameters of each optimizer, by number; a parameter can have several owners.
        calls: (name, arguments…).
        late: whether a gradient arrives after `unscale_` of an optimizer of its parameter; torch's class forbids it.
    """

    kinds: list[str]
    owned: list[list[int]]
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    late: bool = False

    @property
    def shares(self) -> bool:
        """Whether a parameter has several optimizers; torch's class unscales its gradient for each of them."""
        listed = [param for owned in self.owned for param in owned]
        return len(listed) > len(set(listed))

    def __str__(self) -> str:
        lines = [
            f"optimizer {number}: {kind} of {owned}"
            for number, (kind, owned) in enumerate(zip(self.kinds, self.owned, strict=True))
        ]
        return "\n".join([*lines, *map(str, self.calls)])


class _Writer:
    """Writes one program. The gradient of a parameter is "none", "zero", "scaled", "unscaled" or "dead".

    A step that unscales in its kernel leaves gradients "either", unscaled or still scaled. A dead gradient must be
    zeroed before a step uses it.
    """

    def __init__(self, seed: int, kinds: Iterable[str]) -> None:
        self._random = random.Random(seed)
        count = self._random.choice([1, 2, 2, 3])
        owned = [[2 * number, 2 * number + 1] for number in range(count)]
        if self._random.random() < 0.5:
            for number in self._random.sample(range(count), self._random.randint(1, count)):
                owned[number].append(2 * count)
        else:
            owned[0].append(2 * count)
        self.program = Program([self._random.choice(list(kinds)) for _ in owned], owned)
        self._params = sorted({param for each in owned for param in each})
        self._grads = dict.fromkeys(self._params, "none")
        self._stages = ["ready"] * count
        self._pending: list[tuple[int, list[int], bool]] = []  # scaled losses whose backward can still run
        self._losses = 0

    def write(self) -> Program:
        for _ in range(self._random.randint(2, 5)):
            self._iteration()
        return self.program

    def _add(self, *call: Any) -> None:
        self.program.calls.append(call)

    def _iteration(self) -> None:
        for number in range(len(self._stages)):
            if any(self._grads[param] != "none" for param in self.program.owned[number]) or self._random.random() < 0.3:
                self._zero(number)
        actions = [
            self._scale,
            self._backward,
            self._backward,
            self._unscale,
            self._edit,
            self._some_zero,
            self._step,
            self._step,
        ]
        for _ in range(self._random.randint(4, 18)):
            self._random.choice(actions)()
        while not any(stage == "stepped" for stage in self._stages):
            self._scale()
            self._backward()
            self._step()
        self._pending = []
        self._update()

    def _scale(self) -> None:
        reach = self._random.sample(self._params, self._random.randint(1, len(self._params)))
        bad = self._random.random() < 0.12
        self._add("scale", self._losses, sorted(reach), bad)
        self._pending.append((self._losses, reach, bad))
        self._losses += 1

    def _backward(self) -> None:
        if not self._pending:
            self._scale()
        place = self._random.randrange(len(self._pending))
        loss, reach, _ = self._pending[place]
        if not all(map(self._may_receive, reach)):
            return
        del self._pending[place]
        self._add("backward", loss)
        for param in reach:
            before = self._grads[param]
            if before in ("unscaled", "either", "dead"):
                self._grads[param] = "dead"
                continue
            self._grads[param] = "scaled"
            if any(self._stages[number] == "unscaled" for number in self._owners(param)):
                self.program.late = True

    def _may_receive(self, param: int) -> bool:
        if self._grads[param] in ("none", "zero", "scaled", "dead"):
            return True
        return all(self._stages[number] == "stepped" for number in self._owners(param))

    def _owners(self, param: int) -> list[int]:
        return [number for number, owned in enumerate(self.program.owned) if param in owned]

    def _usable(self, number: int) -> bool:
        states = [self._grads[param] for param in self.program.owned[number]]
        return "dead" not in states and any(state != "none" for state in states)

    def _unscale(self) -> None:
        number = self._random.randrange(len(self._stages))
        if self._stages[number] == "ready" and self._usable(number):
            self._add("unscale", number)
            self._stages[number] = "unscaled"
            self._become_unscaled(number, "unscaled")

    def _become_unscaled(self, number: int, state: str) -> None:
        for param in self.program.owned[number]:
            if self._grads[param] in ("scaled", "either"):
                self._grads[param] = state

    def _edit(self) -> None:
        """Clip or change the gradients of an optimizer whose gradients are all unscaled."""
        number = self._random.randrange(len(self._stages))
        states = {self._grads[param] for param in self.program.owned[number]}
        if self._stages[number] == "unscaled" and states <= {"none", "zero", "unscaled"} and "unscaled" in states:
            self._add(self._random.choice(["clip", "decay", "replace"]), number)
            for param in self.program.owned[number]:
                self._grads[param] = "unscaled" if self._grads[param] == "zero" else self._grads[param]

    def _some_zero(self) -> None:
        if self._random.random() < 0.4:
            self._zero(self._random.randrange(len(self._stages)))

    def _zero(self, number: int) -> None:
        to_none = self._random.random() < 0.5
        self._add("zero_grad", number, to_none)
        for param in self.program.owned[number]:
            self._grads[param] = "none" if to_none or self._grads[param] == "none" else "zero"

    def _step(self) -> None:
        number = self._random.randrange(len(self._stages))
        if self._stages[number] != "stepped" and self._usable(number):
            ready = self._stages[number] == "ready"
            self._add("step", number)
            self._stages[number] = "stepped"
            self._pending = [each for each in self._pending if not set(each[1]) & set(self.program.owned[number])]
            in_kernel = ready and self.program.kinds[number] in _UNSCALES_IN_ITS_STEP
            self._become_unscaled(number, "either" if in_kernel else "unscaled")

    def _update(self) -> None:
        new_scale = None if self._random.random() < 0.8 else self._random.choice([_SMALL, 2.0**10, _BIG])
        self._add("update", new_scale)
        self._stages = ["ready"] * len(self._stages)
        for param, state in self._grads.items():
            if state not in ("none", "zero"):
                self._grads[param] = "dead"


def random_program(seed: int, kinds: Iterable[str] = KINDS) -> Program:
    """Return program number `seed`."""
    return _Writer(seed, kinds).write()


@dataclass
class Trained:
    """What a program has computed."""

    weights: list[Tensor]
    scales: list[float]

    def equals(self, other: "Trained") -> bool:
        """Whether weights and scales are equal bitwise."""
        return self.scales == other.scales and all(map(torch.equal, self.weights, other.weights))


class _Reference:
    """The same calls without a scale: gradients are unscaled always; found_inf and the scale by hand."""

    def __init__(self, init_scale: float) -> None:
        self._scale, self._clean = init_scale, 0
        self._begin()

    def _begin(self) -> None:
        self._found: dict[int, bool] = {}
        self._checked: dict[int, set[int]] = {}

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def written(self, param: Tensor) -> None:
        """Note that a backward has written the gradient of `param`: it is checked again."""
        for checked in self._checked.values():
            checked.discard(id(param))

    def unscale_(self, optimizer: Optimizer) -> None:
        checked = self._checked.setdefault(id(optimizer), set())
        params = [param for group in optimizer.param_groups for param in group["params"]]
        fresh = [param for param in params if param.grad is not None and id(param) not in checked]
        bad = any(not param.grad.isfinite().all() for param in fresh)
        self._found[id(optimizer)] = bad or self._found.get(id(optimizer), False)
        checked.update(map(id, params))

    def step(self, optimizer: Optimizer) -> None:
        self.unscale_(optimizer)
        if not self._found[id(optimizer)]:
            optimizer.step()

    def update(self, new_scale: float | None) -> None:
        if new_scale is not None:
            self._scale = new_scale
        elif any(self._found.values()):
            self._scale, self._clean = self._scale / 2, 0
        else:
            self._clean += 1
            if self._clean == _GROWTH_INTERVAL:
                self._scale, self._clean = self._scale * 2, 0
        self._begin()

    def get_scale(self) -> float:
        return self._scale


def trained(program: Program, scaler: Any) -> Trained:
    """Run a program with a scaler, or with None by the reference."""
    scaler = _Reference(2.0**16) if scaler is None else scaler("cpu", growth_interval=_GROWTH_INTERVAL)
    numbers = torch.Generator().manual_seed(0)
    count = 1 + max(param for owned in program.owned for param in owned)
    params = [nn.Parameter(torch.randn(3, generator=numbers)) for _ in range(count)]
    optimizers = [
        KINDS[kind]([params[param] for param in owned])
        for kind, owned in zip(program.kinds, program.owned, strict=True)
    ]
    losses: dict[int, Tensor] = {}
    reaches: dict[int, list[Tensor]] = {}
    scales = []
    for name, *arguments in program.calls:
        if name == "scale":
            number, reach, bad = arguments
            reaches[number] = [params[param] for param in reach]
            factors = torch.randn(len(reach), 3, generator=numbers) * (math.inf if bad else 1.0)
            losses[number] = scaler.scale(_loss(reaches[number], factors))
        elif name == "backward":
            losses.pop(arguments[0]).backward()
            if isinstance(scaler, _Reference):
                for param in reaches[arguments[0]]:
                    scaler.written(param)
        elif name == "update":
            scaler.update(arguments[0])
            losses.clear()
            scales.append(scaler.get_scale())
        else:
            _call(name, optimizers[arguments[0]], scaler, *arguments[1:])
    return Trained([param.detach().clone() for param in params], scales)


def _loss(params: list[Tensor], factors: Tensor) -> Tensor:
    """Return a loss whose gradient for each parameter is its row of `factors`, and depends on the parameter."""
    return torch.stack(
        [((param + 0.25 * param.square()) * row).sum() for param, row in zip(params, factors, strict=True)]
    ).sum()


def _call(name: str, optimizer: Optimizer, scaler: Any, *arguments: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if name == "unscale":
        scaler.unscale_(optimizer)
    elif name == "step":
        scaler.step(optimizer)
    elif name == "zero_grad":
        optimizer.zero_grad(set_to_none=arguments[0])
    elif name == "clip":
        nn.utils.clip_grad_norm_(params, 1.0)
    else:
        with torch.no_grad():
            for param in params:
                if param.grad is not None and name == "decay":
                    param.grad.add_(param, alpha=0.125)
                elif param.grad is not None:  # out of place
                    param.grad = param.grad * 0.5
