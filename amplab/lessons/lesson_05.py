"""Lesson 05, casting policies: one op on the three lists, the X-ray of a small model, a run that a module rule saves.

The lists are `amplab.policies.tables`; the X-ray is `amplab.xray`.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from amplab.amp import autocast
from amplab.display.html import dtype_chips, page
from amplab.display.table import Column, Table
from amplab.lab import ExperimentConfig, Trainer, build_model, load_task
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import keys_fault
from amplab.policies import TABLES, CastPolicy, PrecisionPolicy, cpu_half
from amplab.policies.policy.module_rules import names_in
from amplab.trace import XRay, xray

__all__ = [
    "OpOnLists",
    "TransformerRun",
    "check_dtypes_at_o1",
    "check_float32_rule",
    "check_saving_rule",
    "op_on_lists",
    "transformer_run",
    "xray_at",
]

_RUNS_IN = {
    CastPolicy.LOWER_PRECISION_FP: "float16",
    CastPolicy.FP32: "float32",
    CastPolicy.FP32_SET_OPT_DTYPE: "float32",
    CastPolicy.PROMOTE: "the widest dtype of its arguments",
    CastPolicy.SEQUENCE_PROMOTE: "the widest dtype of its arguments",
    CastPolicy.MATCH_SELF: "the dtype of the tensor that it changes",
    CastPolicy.BANNED: "refused",
    CastPolicy.FALL_THROUGH: "the dtype that arrives",
}
_STEPS = 60
_WIDTH = 64
_MODEL = {"task": "text", "model": "handmade-softmax", "hidden": _WIDTH, "batch_size": 4, "lr": 0.02}


# ---- lists --------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class OpOnLists:
    """What three lists say about one op.

    Attributes:
        op: its name.
        rows: list -> what the op runs in, and why.
    """

    op: str
    rows: Mapping[str, tuple[str, str]]

    def __repr__(self) -> str:
        return f"{self.op}: " + "; ".join(f"{table} {runs_in}" for table, (runs_in, _) in self.rows.items())

    def _repr_html_(self) -> str:
        columns = ("list", Column(f"{self.op} runs in", as_html=dtype_chips), "why")
        lines = [(table, *row) for table, row in self.rows.items()]
        return page("", Table(columns, lines, f"{self.op} on the lists").html())


def op_on_lists(op: str) -> OpOnLists:
    """Return in which dtype an op runs by each list, and why."""
    rows = {name: PrecisionPolicy(name).explain(op) for name in TABLES}
    return OpOnLists(op, {name: (_RUNS_IN[row.cast], row.reason.partition(": ")[2]) for name, row in rows.items()})


# ---- one step -----------------------------------------------------------------------------------


def xray_at(opt_level: str) -> XRay:
    """Return the X-ray of one step of the lab's CNN on 16 digits at a level, the same on every CPU."""
    model, batch = build_model("cnn", 32, seed=0), load_task("digits", 0).batch(0, 16)
    with warnings.catch_warnings(), cpu_half("fp32_accumulate"):
        warnings.simplefilter("ignore")
        return xray(model, tuple(batch), loss=F.cross_entropy, opt_level=opt_level)


# ---- a run that overflows -----------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class TransformerRun:
    """A short training of the transformer whose softmax is written by hand.

    Attributes:
        skipped: whether each step was skipped.
    """

    skipped: tuple[bool, ...]

    @property
    def lost(self) -> int:
        """How many of the last 20 steps were skipped."""
        return sum(self.skipped[-20:])

    def __repr__(self) -> str:
        """Say it without a number, which differs between CPUs once the run is broken."""
        share = "most" if self.lost > 10 else "some" if self.lost else "none"
        return f"<{share} of the last 20 steps skipped>"


@functools.lru_cache(maxsize=4)
def transformer_run(float32_modules: str | None = None) -> TransformerRun:
    """Train it for 60 steps at O2 on the text of Python's help, with a float32 rule for some modules.

    Args:
        float32_modules: patterns of module names, separated by commas; None for no rule.

    Raises:
        ValueError: a pattern matches no module.
    """
    trainer = Trainer(ExperimentConfig(opt_level="O2", float32_modules=float32_modules, **_MODEL))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that every step is skipped, which the lesson is about
        history = trainer.run(_STEPS)
    return TransformerRun(tuple(history.column("skipped").astype(bool).tolist()))


# ---- exercises ----------------------------------------------------------------------------------


def _seen_at_o1() -> dict[str, torch.dtype]:
    """Run five ops on half inputs at O1 and return the dtypes of their results."""
    half = torch.ones(2, 2, dtype=torch.float16)
    wide = torch.ones(2, 2)
    with autocast("cpu", dtype=torch.float16, policy=PrecisionPolicy()):
        results: dict[str, Tensor] = {
            "wide @ wide": wide @ wide,
            "half.exp()": half.exp(),
            "half.relu()": half.relu(),
            "half + wide": half + wide,
            "half.mean()": half.mean(),
        }
    return {op: result.dtype for op, result in results.items()}


@exercise("05-1")
def check_dtypes_at_o1(answer: Mapping[str, torch.dtype]) -> str | None:
    """Check the dtypes that five ops return at O1.

    Form:
        write a dtype behind each op, such as "float16".

    Right:
        Matrix products go to half, exp to float32, a sum of two dtypes to the wider one; relu and mean are on no list.
    """
    seen = _seen_at_o1()
    if fault := keys_fault(answer, seen):
        return fault
    for op, dtype in seen.items():
        if answer[op] != dtype:
            given = str(answer[op]).removeprefix("torch.")
            return f"{op} does not return {given}. Look at its list: PrecisionPolicy().explain(…) says why."
    return None


@exercise("05-2")
def check_float32_rule(answer: PrecisionPolicy) -> str | None:
    """Check that a policy runs matmul in float32 and every other op as the list of apex does.

    Form:
        write PrecisionPolicy(op_rules={…}).

    Right:
        One op rule replaces one row of the list; all other rows stay.
    """
    cast = answer.explain(torch.matmul).cast
    if cast is not CastPolicy.FP32:
        return f"matmul is still {cast.value} with {answer}."
    asked, runs_in = PrecisionPolicy(op_rules={"matmul": torch.float32}), operator.itemgetter("op", "runs in")
    if others := sorted(set(map(runs_in, answer.rows())) - set(map(runs_in, asked.rows()))):
        return f"{others[0][0]} has changed too, to {others[0][1]}: write a rule for matmul only."
    if answer.module_rules:
        return f"the policy also has rules for modules, {answer.module_rules}: write a rule for matmul only."
    return None


@exercise("05-3")
def check_saving_rule(answer: str) -> str | None:
    """Check that float32 modules save the run, and that half of the model's weights stay half at least.

    Form:
        write a pattern such as "output", or several with commas between them.

    Right:
        Only attention computes exp(x), so it is enough to keep attention in float32.
    """
    if "block" in answer:
        return f"{answer!r} has the letters 'block': what stands for any letters in a pattern?"
    try:
        run = transformer_run(answer)
    except ValueError as refused:  # a pattern that matches nothing
        return f"{answer!r} cannot be used: {str(refused).rstrip('.')}."
    if run.lost:
        return f"{run.lost} of the last 20 steps are still skipped: which module computes exp(x)?"
    share = _share_of_weights(answer)
    if share > 0.5:
        return f"the run is saved, but {share:.0%} of the weights are float32 now: name fewer modules."
    return None


def _share_of_weights(patterns: str) -> float:
    """Return the share of the transformer's weights that are in modules with such a name."""
    model = build_model("handmade-softmax", _WIDTH, seed=0)
    rules = PrecisionPolicy(module_rules=dict.fromkeys(patterns.split(","), torch.float32)).module_rules
    names = {name for rule in rules for name in names_in(model, rule)}
    inside = {weight for name in names for weight in model.get_submodule(name).parameters()}
    return sum(weight.numel() for weight in inside) / sum(weight.numel() for weight in model.parameters())
