"""Lesson 04, opt levels: what each level changes (measured), which overrides it takes, and the ladder of three levels.

Everything is measured on real steps: dtypes by hooks, bytes by `level_memory`, speed by interleaved runs.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amplab.amp import OPT_LEVELS, Session, explain_override
from amplab.diagnose import LadderReport, ladder
from amplab.display.charts import bar_chart
from amplab.display.html import dtype_chips, page
from amplab.display.table import Column, Table
from amplab.lab import ExperimentConfig, Trainer, build_model, load_task, models_of
from amplab.lab.memory_count import level_memory
from amplab.lab.memory_fit import LevelMemory
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import keys_fault, shown

__all__ = [
    "OVERRIDES",
    "RUNGS",
    "LevelFacts",
    "OverrideTable",
    "check_dtypes",
    "check_o3_as_o2",
    "check_one_override",
    "climb",
    "level_facts",
    "level_picture",
    "memory_of_levels",
    "overrides",
    "score_after",
    "seconds_per_step",
    "trained",
]

_LEVELS = tuple(OPT_LEVELS)
RUNGS: dict[str, Any] = {
    "O2 with 128": {"opt_level": "O2", "loss_scale": 128.0},
    "O1 with 128": {"opt_level": "O1", "loss_scale": 128.0},
    "O1 dynamic": {"opt_level": "O1"},
    "O0": {"opt_level": "O0"},
}
"""The ladder of this lesson, from the level that saves most to the reference."""

OVERRIDES: dict[str, Any] = {
    "cast_model_type": torch.float16,
    "patch_torch_functions": True,
    "keep_batchnorm_fp32": True,
    "master_weights": True,
    "loss_scale": 128.0,
}
"""Each property that can be overridden, and a value that is tried at each level."""

_WIDTH, _BATCH = 256, 64
_LOSS_WEIGHT = 2.0**-6  # of the small targets, as of an auxiliary loss; their learning rate is larger by its inverse
_CLIMBS = {"digits": (0.1, 1.0), "pressure": (0.03, 1.0), "small-targets": (2.0 / _LOSS_WEIGHT, _LOSS_WEIGHT)}


# ---- what a level changes -----------------------------------------------------------------------


@dataclass(frozen=True)
class LevelFacts:
    """What was seen in one step of a small CNN after `initialize` at a level.

    Attributes:
        level: "O0" to "O3".
        rows: what was looked at -> what was seen.
    """

    level: str
    rows: dict[str, str]


@functools.cache
def level_facts(level: str) -> LevelFacts:
    """Initialize a CNN at a level, run one step on real digits, and note the dtypes that are seen."""
    session, model = Session(), build_model("cnn", _WIDTH, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some levels warn about themselves, which is what the lesson is about
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
    images, labels = load_task("digits", 0).batch(0, _BATCH)
    with _outputs_noted(model) as outputs, session.casting():
        loss = F.cross_entropy(model(images), labels)
    weights = dict(model.named_parameters())
    dtypes = {
        "weights of a convolution": weights["conv1.weight"].dtype,
        "weights of BatchNorm": weights["norm1.weight"].dtype,
        "a convolution returns": outputs["conv1"],
        "BatchNorm returns": outputs["norm1"],
        "the loss": loss.dtype,
        "the optimizer updates": next(session.master_params(optimizer)).dtype,
    }
    session.reset()
    rows = {what: str(dtype).removeprefix("torch.") for what, dtype in dtypes.items()}
    scale = OPT_LEVELS[level].properties.loss_scale
    return LevelFacts(level, rows | {"loss scale": "dynamic" if scale == "dynamic" else f"{scale:g}"})


@contextmanager
def _outputs_noted(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Note the dtype of what each submodule returns: name -> dtype."""
    outputs: dict[str, torch.dtype] = {}

    def noted(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _inputs, output: outputs.update({name: output.dtype})

    handles = [module.register_forward_hook(noted(name)) for name, module in model.named_modules() if name]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, repr=False)
class LevelPicture:
    """One level beside O0: what it sets and what was seen, and the bytes of a step.

    Attributes:
        facts: of the level.
        memory: bytes of a step at the level.
    """

    facts: LevelFacts
    memory: LevelMemory

    def __repr__(self) -> str:
        """The rows that differ from O0."""
        base = level_facts("O0").rows
        changed = [f"{what}: {seen}" for what, seen in self.facts.rows.items() if seen != base[what]]
        return f"{self.facts.level}: {'; '.join(changed) or 'the baseline'}"

    def _repr_html_(self) -> str:
        level, base = OPT_LEVELS[self.facts.level], level_facts("O0").rows
        lines = [(what, base[what], seen) for what, seen in self.facts.rows.items()]
        chosen = {place for place, (_, before, seen) in enumerate(lines) if seen != before}
        columns = (Column(""), Column("O0", as_html=dtype_chips), Column(level.name, as_html=dtype_chips))
        table = Table(columns, lines, f"What {level.name} changes", chosen=chosen)
        bars = bar_chart(_parts_in_kilobytes(self.memory), unit="kB", label=f"memory of a step at {level.name}")
        return page(f"{level.name}: {level.explanation}", table.html(), bars.html())


def level_picture(level: str) -> LevelPicture:
    """Return what a level changes, for the CNN of the lab."""
    return LevelPicture(level_facts(level), memory_of_levels()[level])


@functools.cache
def memory_of_levels() -> dict[str, LevelMemory]:
    """Count the bytes that one step of the CNN with Adam keeps, level by level."""
    config = {"model": "cnn", "optimizer": "adam", "hidden": _WIDTH, "batch_size": _BATCH}
    return {level: level_memory(ExperimentConfig(opt_level=level, **config)) for level in _LEVELS}  # type: ignore[arg-type]


def _parts_in_kilobytes(memory: LevelMemory) -> dict[str, float]:
    parts = {
        "weights": memory.parameters,
        "half copies of weights": memory.weight_casts,
        "masters": memory.masters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer_state,
        "activations": memory.activations or 0,
    }
    return {name: round(nbytes / 1000) for name, nbytes in parts.items()}


# ---- overrides ----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class OverrideTable:
    """What `initialize` says to each override at each level.

    Attributes:
        answers: property -> level -> "accepted", "no use" or "refused".
    """

    answers: dict[str, dict[str, str]]

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return page("", self._table().html())

    def _table(self) -> Table:
        lines = [(f"{name}={_spelled(OVERRIDES[name])}", *answer.values()) for name, answer in self.answers.items()]
        return Table(("override", *_LEVELS), lines, "What initialize says to each override at each level")


def overrides() -> OverrideTable:
    """Call `initialize` with each override of `OVERRIDES` at each level, and note whether it refuses.

    "no use" is an override that is accepted although the level is not made for it; `amplab.amp.explain_override`
    says why.
    """
    return OverrideTable({name: {level: _answer(level, name) for level in _LEVELS} for name in OVERRIDES})


def _answer(level: str, name: str) -> str:
    session = Session()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **{name: OVERRIDES[name]})
    except RuntimeError:
        return "refused"
    finally:
        session.reset()
    return "no use" if explain_override(level, name) else "accepted"


def _spelled(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")


# ---- trained, timed -----------------------------------------------------------------------------


def trained(steps: int, **settings: Any) -> Trainer:
    """Train one experiment of the lab and return its trainer.

    Args:
        steps: how many.
        settings: fields of `amplab.lab.ExperimentConfig`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(ExperimentConfig(**settings))
        trainer.run(steps)
    return trainer


def score_after(steps: int, **settings: Any) -> float:
    """Train as `trained` does and return the score on held-out data."""
    score = trained(steps, **settings).history.last_score
    assert score is not None  # the lab measures it every 25 steps
    return score


def seconds_per_step(device: str = "cpu", *, width: int = 512, batch: int = 512, rounds: int = 5) -> dict[str, float]:
    """Measure a training step of an MLP at each level: the median of interleaved rounds, after a first one.

    Sync: one per step.
    """
    steps = {level: _step_of(level, device, width, batch) for level in _LEVELS}
    taken: dict[str, list[float]] = {level: [] for level in _LEVELS}
    for _ in range(rounds + 1):
        for level, step in steps.items():
            began = time.perf_counter()
            step()
            taken[level].append(time.perf_counter() - began)
    return {level: statistics.median(seconds[1:]) for level, seconds in taken.items()}


def _step_of(level: str, device: str, width: int, batch: int) -> Callable[[], None]:
    session = Session()
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
    inputs = torch.ones(batch, width, device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)

    def step() -> None:
        with session.casting():
            loss = F.cross_entropy(model(inputs), labels)
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device

    return step


def climb(task: str, *, steps: int = 40) -> LadderReport:
    """Train a task of the lab on each rung of `RUNGS`, with `amplab.ladder`; the loss of small-targets has a weight.

    Args:
        task: "digits", "pressure" or "small-targets".
        steps: of each rung.
    """
    loaded, model = load_task(task, 0), build_model(next(iter(models_of(task))), 128, seed=0)
    lr, weight = _CLIMBS[task]

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return weight * loaded.losses[0].of(model, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ladder(
            model,
            lambda step: loaded.batch(step, _BATCH),
            step=loss_of,
            optimizer=lambda weights: torch.optim.SGD(weights, lr=lr, momentum=0.9),
            steps=steps,
            rungs=RUNGS,
            tell=lambda _line: None,
        )


# ---- exercises ----------------------------------------------------------------------------------

_ASKED = ("weights of a convolution", "weights of BatchNorm", "the optimizer updates")


@exercise("04-1")
def check_dtypes(answer: Mapping[str, tuple[torch.dtype, torch.dtype, torch.dtype]]) -> str | None:
    """Check the dtypes of three kinds of weights at O1, O2 and O3.

    Form:
        write three dtypes for each level, such as ("float16", "float32", "float32").

    Right:
        O1 casts no weight. O2 casts all but BatchNorm's, and updates masters. O3 casts all and has no masters.
    """
    levels = ("O1", "O2", "O3")
    if fault := keys_fault(answer, levels):
        return fault
    for level in levels:
        for what, dtype in zip(_ASKED, answer[level], strict=True):
            given = str(dtype).removeprefix("torch.")
            if given != level_facts(level).rows[what]:
                return f"{level}, {what}: it is not {given}. Choose {level} in the widget of section 4.2 and look."
    return None


@exercise("04-2")
def check_o3_as_o2(answer: Mapping[str, Any]) -> str | None:
    """Check the overrides that make O3 the same as O2.

    Form:
        write the overrides as dict(loss_scale=128.0).

    Right:
        A level is nothing but its properties: O3 with these three overrides is O2.
    """
    if fault := _fault_of_overrides(answer):
        return fault
    found, wanted = OPT_LEVELS["O3"].properties.with_overrides(**answer), OPT_LEVELS["O2"].properties
    for name in OVERRIDES:
        have, want = getattr(found, name), getattr(wanted, name)
        if have != want:
            return f"with these overrides {name} is {have}, and O2 has {want}."
    return None


def _fault_of_overrides(answer: Mapping[str, Any]) -> str | None:
    """Return which key of an answer is no property of a level, or why O3 does not take the overrides."""
    if unknown := [name for name in answer if name not in OVERRIDES]:
        return f"{shown(unknown[0])} is no property of a level: choose among {', '.join(OVERRIDES)}."
    try:
        OPT_LEVELS["O3"].properties.with_overrides(**answer)
    except (AssertionError, RuntimeError, TypeError, ValueError) as refused:
        return f"O3 refuses {shown(answer)}: {str(refused).rstrip('.')}."
    return None


_SLOW_STEPS = 300
_SLOW = {"task": "digits-16", "lr": 4e-5}


@exercise("04-3")
def check_one_override(answer: Mapping[str, Any]) -> str | None:
    """Check that one override of O3 lets the run with a small learning rate learn.

    Form:
        write the override as dict(loss_scale=128.0).

    Right:
        With float32 masters the small updates add up; the weights that compute are still half.
    """
    if fault := _fault_of_overrides(answer):
        return fault
    if len(answer) != 1:
        return f"{shown(answer)} has {len(answer)} overrides: exactly one is enough."
    (name,) = answer
    if name not in ("keep_batchnorm_fp32", "master_weights", "loss_scale"):
        return f"{name} would turn O3 into another level: keep the weights that compute in half."
    try:
        score = score_after(_SLOW_STEPS, opt_level="O3", **_SLOW, **answer)
    except ValueError as refused:
        return f"O3 refuses {shown(answer)}: {str(refused).rstrip('.')}."
    if score < 0.6:
        return f"after {_SLOW_STEPS} steps the model gets {score:.0%} of the held-out digits right: too few, see 4.3."
    return None
