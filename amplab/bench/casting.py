"""What casting costs: whole training steps under amplab's engine, against torch.autocast and against float32."""

import contextlib
from collections.abc import Callable

import torch

from amplab.amp import Session
from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import Workload, mlp_512, small_transformer, tiny_mlp
from amplab.policies import CastingEngine, PrecisionPolicy

__all__ = ["casting_cases"]

Make = Callable[[], Workload]


def casting_cases(width: int = 128, layers: int = 4) -> list[Case]:
    """Return the cases of ``amplab bench casting``; all of them time forward, backward and optimizer.

    Args:
        width: of the small transformer.
        layers: of the same.
    """

    def transformer() -> Workload:
        return small_transformer(width, layers)

    autocast = 'torch.autocast("cpu", bfloat16)'
    return [
        Case("engine bfloat16, MLP 512", autocast, Goal("at most", 1.08), lambda: _against_autocast(mlp_512)),
        Case(
            "engine bfloat16, small transformer",
            autocast,
            Goal("at most", 1.08),
            lambda: _against_autocast(transformer),
        ),
        Case("engine with nothing to cast, tiny MLP", "no engine", Goal("at most", 1.25), _nothing_to_cast),
        Case(
            "O1 float16, small transformer", "float32", Goal("at most", 1.5), lambda: _o1_against_float32(transformer)
        ),
    ]


def _against_autocast(make: Make) -> Pair:
    ours, theirs = make(), make()
    engine = CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16))
    return Pair(
        Contestant(lambda: ours.step(engine.active)),
        Contestant(lambda: theirs.step(lambda: torch.autocast("cpu", torch.bfloat16))),
        {"policy": str(engine.policy)},
    )


def _nothing_to_cast() -> Pair:
    ours, theirs = tiny_mlp(), tiny_mlp()
    engine = CastingEngine(PrecisionPolicy(compute_dtype=torch.float32))
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
