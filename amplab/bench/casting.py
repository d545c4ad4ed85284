"""Suite "casting": whole training steps under amplab's engines, against torch.autocast and against float32."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch

from amplab.amp import Session
from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import Workload, mlp_512, small_transformer, tiny_mlp
from amplab.policies import CastingEngine, CompiledEngine, PrecisionPolicy

__all__ = ["casting_cases"]

Make = Callable[[], Workload]

# Name, engine, goal against torch.autocast, goal with nothing to cast.
_ENGINES = (("engine", CastingEngine, 1.08, 1.25), ("compiled engine", CompiledEngine, 1.05, 1.06))


def casting_cases(width: int = 128, layers: int = 4) -> list[Case]:
    """Return the cases of ``amplab bench casting``; each times forward, backward and optimizer.

    Args:
        width: width of the small transformer.
        layers: layers of the small transformer.
    """

    def transformer() -> Workload:
        return small_transformer(width, layers)

    autocast = 'torch.autocast("cpu", bfloat16)'
    cases = []
    for name, kind, whole, empty in _ENGINES:
        cases += [
            Case(f"{name} bfloat16, {what}", autocast, Goal("at most", whole), partial(_against_autocast, kind, make))
            for what, make in (("MLP 512", mlp_512), ("small transformer", transformer))
        ]
        idle = partial(_nothing_to_cast, kind)
        cases.append(Case(f"{name} with nothing to cast, tiny MLP", "no engine", Goal("at most", empty), idle))
    o1 = partial(_o1_against_float32, transformer)
    return [*cases, Case("O1 float16, small transformer", "float32", Goal("at most", 1.5), o1)]


def _against_autocast(kind: type[CastingEngine], make: Make) -> Pair:
    ours, theirs = make(), make()
    engine = kind(PrecisionPolicy(compute_dtype=torch.bfloat16))
    return Pair(
        Contestant(lambda: ours.step(engine.active)),
        Contestant(lambda: theirs.step(lambda: torch.autocast("cpu", torch.bfloat16))),
        {"policy": str(engine.policy)},
    )


def _nothing_to_cast(kind: type[CastingEngine]) -> Pair:
    ours, theirs = tiny_mlp(), tiny_mlp()
    engine = kind(PrecisionPolicy(compute_dtype=torch.float32))
    return Pair(
        Contestant(lambda: ours.step(engine.active)),
        Contestant(lambda: theirs.step(contextlib.nullcontext)),
        {"policy": str(engine.policy)},
    )


def _o1_against_float32(make: Make) -> Pair:
    ours, theirs = make(), make()
    session = Session()
    session.initialize(ours.model, ours.optimizer, opt_level="O1", verbosity=0)

    def step() -> None:
        with session.casting():
            loss = ours.loss()
        with session.scale_loss(loss, ours.optimizer) as scaled_loss:
            scaled_loss.backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()

    return Pair(Contestant(step), Contestant(theirs.step), {"opt_level": "O1"})
