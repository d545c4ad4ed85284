"""Suite "diagnose": each step of a watched loop, and finding the first non-finite op of a step.

A watched step is timed between samples of the gradients, including what is kept to repeat it: batch, random state and
buffers. The explained step overflows in backward because of its loss scale alone, which takes the most replays.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from amplab.amp import GradScaler, Session
from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import Workload, mlp_512, small_transformer, tiny_mlp
from amplab.diagnose import first_nonfinite
from amplab.lab import watch

__all__ = ["diagnose_cases"]

_Scaler = torch.amp.GradScaler | Session | None
_MakeScaler = Callable[[Workload], _Scaler]

_WATCHED, _EXPLAINED = Goal("at most", 1.03), Goal("at most", 10.0)
_NEVER = 2**31  # steps from one sample to the next
_SCALE = 2.0**8
_SCALE_TOO_LARGE = 2.0**40


def diagnose_cases(width: int = 128, layers: int = 4) -> list[Case]:
    """Return the cases of ``amplab bench diagnose``.

    Args:
        width: width of the small transformer.
        layers: layers of the small transformer.
    """

    def transformer() -> Workload:
        return small_transformer(width, layers)

    scalers: tuple[tuple[str, _MakeScaler], ...] = (
        ("no scaler", lambda _: None),
        ("torch's scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=_SCALE)),
        ("amplab's scaler", lambda _: GradScaler("cpu", init_scale=_SCALE)),
        ("a session", _session),
    )
    models = (("tiny MLP", tiny_mlp), ("MLP 512", mlp_512), ("small transformer", transformer))
    watched = [
        Case(f"watch MLP 512, {name}", "the loop alone", _WATCHED, partial(_against_the_loop, mlp_512, scaler))
        for name, scaler in scalers
    ]
    return watched + [
        Case(f"first_nonfinite, {name}", "the step itself", _EXPLAINED, partial(_against_the_step, make))
        for name, make in models
    ]


def _session(work: Workload) -> Session:
    """Return a session that scales the loss and casts nothing."""
    session = Session()
    session.initialize(
        work.model,
        work.optimizer,
        opt_level="O0",
        loss_scale="dynamic",
        dynamic_init_scale=_SCALE,
        verbosity=0,
    )
    return session


def _against_the_loop(make: Callable[[], Workload], make_scaler: _MakeScaler) -> Pair:
    seen, unseen = make(), make()
    scaler = make_scaler(seen)
    watching = watch(seen.model, seen.optimizer, scaler=scaler, step=seen.loss, every=_NEVER)
    watching.__enter__()  # for as long as the pair lives
    batches = watching.batches(itertools.repeat(seen.inputs))

    def watched() -> None:
        next(batches)
        _train(seen, scaler, watching.loss)

    return Pair(Contestant(watched), Contestant(partial(_train, unseen, make_scaler(unseen), lambda loss: loss)))


def _train(work: Workload, scaler: _Scaler, noted: Callable[[Tensor], Tensor]) -> None:
    """Run one training step; its loss passes through `noted`."""
    loss = noted(work.loss())
    if scaler is None:
        loss.backward()
        work.optimizer.step()
    elif isinstance(scaler, Session):
        with scaler.scale_loss(loss, work.optimizer) as scaled_loss:
            scaled_loss.backward()
        work.optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(work.optimizer)
        scaler.update()
    work.optimizer.zero_grad()


def _against_the_step(make: Callable[[], Workload]) -> Pair:
    seen, unseen = make(), make()

    def step() -> None:
        (_loss_in_half(unseen) * _SCALE_TOO_LARGE).backward()
        unseen.model.zero_grad()

    def look() -> str:
        found = first_nonfinite(seen.model, step=partial(_loss_in_half, seen), loss_scale=_SCALE_TOO_LARGE)
        return "nothing" if found is None else found.cause

    return Pair(Contestant(look), Contestant(step), {"cause": look()})


def _loss_in_half(work: Workload) -> Tensor:
    """Return the loss of outputs rounded to float16, so that their gradient is float16."""
    outputs = work.model(work.inputs).half().float()
    return F.cross_entropy(outputs.flatten(0, -2), work.labels)
