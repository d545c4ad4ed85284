"""Paste a printed remedy where a user would: over the line that it rewrites, or in place of amp.initialize."""

import ast
import importlib.util
import itertools
import sys
from pathlib import Path

import torch
from patients import Patient, Ward, train
from torch.nn import functional as F

import amplab

__all__ = ["final_loss", "mended", "pasted_source"]

_numbers = itertools.count()


def mended(wards: str, name: str, finding, size: int, seed: int, folder: Path) -> Patient:
    """Admit a broken patient with the finding's remedy applied.

    Args:
        wards: the module of the ward and the name of its table, `value_wards.VALUE_WARDS`.
        name: the ward's.
        finding: whose first suggestion is used.
        folder: for the file with the pasted line.
    """
    module, _, table = wards.partition(".")
    remedy = finding.remedy.partition("\n# or")[0]
    if finding.name == "bce-after-sigmoid":
        return _with_logits(getattr(sys.modules[module], table)[name].admit(size, seed, True), remedy)
    if "amp.initialize" not in remedy:
        module = _with_line_replaced(sys.modules[module].__file__, finding.line, remedy, folder)
        return getattr(_loaded(module), table)[name].admit(size, seed, True)
    ward: Ward = getattr(sys.modules[module], table)[name]
    patient = ward.admit(size, seed, True)
    patient.amp.reset()
    optimizer = patient.optimizers[0]
    names = {"amplab": amplab, "amp": amplab.amp, "torch": torch, "model": patient.model, "optimizer": optimizer}
    exec(remedy.replace("policy=policy)", "policy=policy, verbosity=0)"), names)
    patient.amp = amplab.amp.default_session()
    return patient


def _with_logits(patient: Patient, remedy: str) -> Patient:
    """Compute the loss of a detector as the remedy does, without the sigmoid at its end."""
    body, (layer, _) = patient.model.body, patient.model.out

    def loss(x):
        names = {"F": F, "logits": layer(body(x.to(layer.weight.dtype))).flatten(), "target": (x.mean(1) > 0).float()}
        exec(remedy, names)
        return names["loss"]

    patient.loss = loss
    return patient


def _with_line_replaced(file: str, line: str, remedy: str, folder: Path) -> Path:
    pasted = folder / f"pasted_{next(_numbers)}.py"
    pasted.write_text(pasted_source(Path(file).read_text(), int(line.rpartition(":")[2]), remedy))
    return pasted


def pasted_source(source: str, number: int, remedy: str) -> str:
    """Replace the statement on a line by the last one of the remedy, and those that set its other names before it.

    A remedy that is the whole body of a function replaces the body.
    """
    lines = source.splitlines(keepends=True)
    statements = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.stmt)]
    if "# the whole body of " in remedy:
        around = [e for e in statements if isinstance(e, ast.FunctionDef) and e.lineno <= number <= e.end_lineno]
        body = max(around, key=lambda each: each.lineno).body
        indent = " " * body[0].col_offset
        lines[body[0].lineno - 1 : body[-1].end_lineno] = [f"{indent}{each}\n" for each in remedy.split("\n")]
        return "".join(lines)
    *earlier, last = _pieces(remedy)
    at = max((each for each in statements if each.lineno <= number <= each.end_lineno), key=lambda each: each.lineno)
    replaced = [(at, last)]
    for piece in earlier:
        target = ast.unparse(ast.parse(piece).body[0].targets[0])
        same = [e for e in statements if isinstance(e, ast.Assign) and ast.unparse(e.targets[0]) == target]
        replaced.append((max((e for e in same if e.lineno < number), key=lambda each: each.lineno), piece))
    for old, new in sorted(replaced, key=lambda pair: pair[0].lineno, reverse=True):
        indent = " " * old.col_offset
        lines[old.lineno - 1 : old.end_lineno] = [f"{indent}{each}\n" for each in new.split("\n")]
    return "".join(lines)


def _pieces(remedy: str) -> list[str]:
    body = ast.parse(f"def pasted():\n{_indented(remedy)}").body[0].body
    pieces = remedy.split("\n")
    return ["\n".join(pieces[each.lineno - 2 : each.end_lineno - 1]) for each in body]


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.split("\n"))


def _loaded(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    module.amplab, module.amp = amplab, amplab.amp  # as the user's file has imported them
    spec.loader.exec_module(module)
    return module


def final_loss(patient: Patient, steps: int) -> float:
    """Train, and return the mean of the last quarter of the losses."""
    patient.steps = steps
    losses = [each.loss for each in train(patient)]
    last = losses[-max(1, steps // 4) :]
    return sum(last) / len(last)
