"""The ranks, the drawing and the checks of lesson 14: two real processes that train together over gloo.

    run_ranks(gradients)        starts two processes, calls gradients(rank) in each, returns what both return
    gradients, rounds, traffic  what the ranks of the lesson do

A rank is a child process without children of its own. `run_ranks` waits for both, kills what is left at the limit, and
returns when both have ended.
"""

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import amplab.parallel  # noqa: F401  before there is a process group, which torch would otherwise keep
from amplab.amp import Session
from amplab.display.charts import Chart, line_chart
from amplab.display.numbers import power
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import shown
from amplab.lessons.lesson_16 import batches, in_half, network

__all__ = [
    "RankError",
    "Round",
    "check_order",
    "check_skipping_ranks",
    "check_thread",
    "gradient_of",
    "gradients",
    "in_a_thread",
    "rounds",
    "run_ranks",
    "skipped_share",
    "traffic",
]

RANKS = 2


class RankError(Exception):
    """A rank raised, or reached the limit."""


def run_ranks(*functions: Callable[[int], Any], limit: float = 100.0) -> list[dict[str, Any]]:
    """Call functions of the rank in two processes of one gloo group; return for each rank name -> what it returned.

    Args:
        functions: of this module. A start takes seconds, since each process imports torch, so one start does all.
        limit: seconds until the processes are killed.

    Raises:
        ValueError: a function of another module, which a new process cannot find.
        RankError: a rank raised, died or reached the limit; the message has the end of what it printed.
    """
    names = [getattr(function, "__name__", "") for function in functions]
    for name, function in zip(names, functions, strict=True):
        if globals().get(name) is not function:
            raise ValueError(f"{function!r}: expected a function of {__name__}, such as gradients.")
    with tempfile.TemporaryDirectory(prefix="amplab-ranks-") as folder:
        with _started(names, Path(folder), limit) as ranks:
            until = time.monotonic() + limit
            for rank, process in enumerate(ranks):
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise RankError(f"rank {rank} did not end within {limit:g} s.") from None
        for rank, process in enumerate(ranks):
            if process.returncode:
                raise RankError(f"rank {rank}: {(Path(folder) / f'{rank}.txt').read_text()[-2000:]}")
        return [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(RANKS)]


@contextmanager
def _started(names: list[str], folder: Path, limit: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of all ranks; none of them is alive after the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            # -P: no module beside the notebook hides an installed one
            code = f"from {__name__} import _rank; _rank({names!r}, {str(folder)!r}, {rank}, {limit})"
            with (folder / f"{rank}.txt").open("wb") as printed:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-c", code], env=environment, stdout=printed, stderr=subprocess.STDOUT
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _rank(names: list[str], folder: str, rank: int, limit: float) -> None:
    """The process of one rank."""
    store = f"file://{Path(folder) / 'store'}"
    timeout = timedelta(seconds=limit)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timeout)
    try:
        value = {name: globals()[name](rank) for name in names}
    finally:
        dist.destroy_process_group()
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(value))


# What the ranks do


def gradient_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the mean cross entropy, all parameters in one tensor."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def gradients(rank: int) -> dict[str, Tensor]:
    """Return the gradient of this rank's half of a batch, without and with DistributedDataParallel."""
    images, labels = (each.chunk(RANKS)[rank] for each in batches(1)[0])
    model = network()
    alone = gradient_of(model, images, labels)
    return {"alone": alone, "averaged": gradient_of(DistributedDataParallel(model), images, labels)}


class Round(NamedTuple):
    """One step of one rank.

    Attributes:
        scale: the loss scale of the step.
        stepped: whether the optimizer stepped.
        finite: whether all weights are finite after it.
    """

    scale: float
    stepped: bool
    finite: bool

    def __str__(self) -> str:
        """Return the scale and what came of the step, such as `2^16 step`."""
        outcome = "step" if self.stepped else "skip"
        return f"{power(self.scale)} {outcome if self.finite else 'NaN!'}"


def rounds(rank: int) -> dict[str, list[Round]]:
    """Train six steps in each of two ways; the data of rank 1 has an inf in step 2.

    "unscaled, then averaged"   each rank checks its own gradients, and averages them after that
    "averaged, then unscaled"   what DistributedDataParallel does: the ranks check what all have
    """
    ways = {"unscaled, then averaged": False, "averaged, then unscaled": True}
    return {way: _rounds(rank, average_first) for way, average_first in ways.items()}


def _rounds(rank: int, average_first: bool) -> list[Round]:
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu")
    made = []
    for number, batch in enumerate(batches(6)):
        images, labels = (each.chunk(RANKS)[rank].clone() for each in batch)
        if (rank, number) == (1, 2):
            images[0, 20] = float("inf")
        optimizer.zero_grad()
        with in_half():
            loss = F.cross_entropy(model(images).float(), labels)
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        for act in (_average, scaler.unscale_) if average_first else (scaler.unscale_, _average):
            act(optimizer)
        scaler.step(optimizer)
        scaler.update()
        finite = all(bool(each.isfinite().all()) for each in model.parameters())
        made.append(Round(scale, scaler.get_scale() >= scale, finite))
    return made


def _average(optimizer: torch.optim.Optimizer) -> None:
    """Average the gradients over the ranks, one by one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS


def traffic(rank: int) -> dict[str, Any]:
    """Train ten steps in three ways; return the messages and the time of a step, and the weights.

    "one by one"                an all-reduce for each parameter
    "DistributedDataParallel"   gradients in buckets
    "combine_ddp"               the flat gradients of `amp.initialize(..., combine_grad=True, combine_ddp=True)`
    """
    return {way: _traffic(way, rank) for way in ("one by one", "DistributedDataParallel", "combine_ddp")}


def _traffic(way: str, rank: int) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(24)))
    optimizer, session = torch.optim.SGD(model.parameters(), lr=0.01), Session()
    combine = True if way == "combine_ddp" else None
    session.initialize(model, optimizer, opt_level="O1", verbosity=0, combine_grad=combine, combine_ddp=combine)
    called = DistributedDataParallel(model) if way == "DistributedDataParallel" else model
    images = batches(1)[0][0].chunk(RANKS)[rank]

    def step() -> None:
        optimizer.zero_grad()
        with session.casting(), session.scale_loss(called(images).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        if way == "one by one":
            _average(optimizer)
        optimizer.step()

    seconds = [_seconds(step) for _ in range(9)]  # the first ones prepare buffers
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    messages = sum(each.count for each in profile.key_averages() if each.key == "gloo:all_reduce")
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    session.reset()
    return {"messages": messages, "seconds": statistics.median(seconds[3:]), "weights": weights}


def _seconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


# What a reader moves


def skipped_share(ranks: int, once_in: int) -> Chart:
    """Draw the share of skipped steps over the number of ranks, up to 2^ranks.

    Args:
        ranks: exponent of the number of ranks.
        once_in: exponent: each rank has an inf of its own once in 2^once_in steps.
    """
    share = [1 - (1 - 2.0**-once_in) ** (2**each) for each in range(ranks + 1)]
    what = "share of skipped steps"
    return line_chart({what: share}, x_label="number of ranks, as a power of two", y_label=what)


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, wait for it, and return its value."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# Exercises


@exercise("14-1")
def check_skipping_ranks(answer: int) -> str | None:
    """How many of eight ranks under DistributedDataParallel skip a step, if one of them has an inf.

    Right:
        The average of eight gradients contains the inf, and every rank checks that average.
    """
    own = [torch.ones(3) for _ in range(8)]
    own[5][1] = float("inf")
    averaged = torch.stack(own).mean(0)  # what each rank has after the all-reduce
    skipping = sum(not bool(averaged.isfinite().all()) for _ in own)
    if answer == skipping:
        return None
    if answer == 1:
        return "1 rank has the inf before the all-reduce. Which ranks have it after the all-reduce?"
    return f"{answer!r} is neither all ranks nor one. An all-reduce gives the same average to each rank."


ACTS = ("backward", "average", "unscale", "clip", "step")


@exercise("14-2")
def check_order(answer: Sequence[str]) -> str | None:
    """The order of `ACTS` in a step of several ranks; it runs with two models that stand for two ranks.

    Form:
        write a list of the five words in order.

    Right:
        The ranks average what they all check, clip what they all have, and so they stay equal.
    """
    if sorted(answer) != sorted(ACTS):
        return f"{shown(answer)}: write a list with each of these once: {', '.join(ACTS)}."
    if answer[0] != "backward" or answer[-1] != "step":
        return "backward makes the gradients and step uses them, so they are first and last."
    first, second = _two_ranks(answer, overflows=True)
    if not all(bool(each.isfinite().all()) for each in (first, second)):
        return "one rank has an inf in its data. With this order the other rank steps with it, and has NaN weights."
    if not torch.equal(first, second):
        return "one rank has an inf in its data. With this order only that rank skips, and the weights differ."
    expected, _ = _two_ranks(ACTS, overflows=False)
    first, second = _two_ranks(answer, overflows=False)
    if not torch.equal(first, second):
        return "with this order each rank clips by its own norm before the average, or averages too late."
    return (
        None if torch.allclose(first, expected) else "with this order clipping reads gradients that are still scaled."
    )


def _two_ranks(order: Sequence[str], *, overflows: bool) -> list[Tensor]:
    """Return the weights of both ranks after three steps, in one of which rank 1 has an inf if `overflows`."""
    models = [network() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in models]
    for number, (images, labels) in enumerate(batches(3)):
        parts = [(part.clone(), labels.chunk(RANKS)[rank]) for rank, part in enumerate(images.chunk(RANKS))]
        if overflows and number == 1:
            parts[1][0][0, 20] = float("inf")
        for act in order:
            _act(act, models, optimizers, scalers, parts)
    return [torch.cat([each.detach().flatten() for each in model.parameters()]) for model in models]


def _act(act: str, models: list[nn.Sequential], optimizers: list[Any], scalers: list[Any], parts: list[Any]) -> None:
    """Do one act of a step on both ranks."""
    if act == "average":
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([each.grad for each in pair]).mean(0)
            for each in pair:
                each.grad = mean.clone()
        return
    for model, optimizer, scaler, (images, labels) in zip(models, optimizers, scalers, parts, strict=True):
        match act:
            case "backward":
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(images), labels)).backward()
            case "unscale":
                scaler.unscale_(optimizer)
            case "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            case "step":
                scaler.step(optimizer)
                scaler.update()


@exercise("14-3")
def check_thread(answer: Callable[[nn.Module, Tensor], Tensor]) -> str | None:
    """A function of (model, images) that computes the model in half, also in a thread of its own.

    Form:
        write def answer(model, images).

    Right:
        The region is entered in the thread that computes, so it does not matter where the caller is.
    """
    model, (images, _) = network(), batches(1)[0]
    dtypes: list[torch.dtype] = []
    for layer in model:
        layer.register_forward_hook(lambda _layer, _inputs, output: dtypes.append(output.dtype))
    with in_half():
        got = in_a_thread(lambda: answer(model, images))
    if not isinstance(got, Tensor):
        return f"it returns {shown(got)}, not the output of the model."
    if any(each.dtype != torch.float32 for each in model.parameters()):
        return "it changes the dtype of the weights. Enter a region instead; the weights stay in float32."
    if not dtypes:
        return "it does not call the model."
    if got.dtype == torch.float16 != dtypes[0]:
        return f"the layers compute in {dtypes[0]}, and only the result is half. Enter a region of autocast."
    if got.dtype != torch.float16:
        return f"in a new thread it returns {got.dtype}. Enter the region inside of the function."
    return None
