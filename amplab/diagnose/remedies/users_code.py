"""The user's own code around one op, so that a remedy is written with its names: the call, its operands, its statement.

    scores = self.scale * torch.matmul(q, k.mT)    op matmul: operands `q` and `k.mT`, statement: the whole line

`call_on` parses the file of a line. It returns None where that is not possible, or where the line makes more than one
call of the op; a remedy then uses `x` and `y`.
"""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch

from amplab.trace.lines import CodeLine

__all__ = [
    "LEAST_EPS",
    "Edit",
    "UsersCall",
    "UsersFunction",
    "call_on",
    "edited",
    "function_around",
    "with_larger_eps",
    "with_smaller_number",
]

_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.MatMult: ("matmul",),
    ast.Add: ("add",),
    ast.Sub: ("sub", "rsub"),
    ast.Mult: ("mul",),
    ast.Div: ("div", "true_divide", "reciprocal"),
    ast.Pow: ("pow",),
}
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
_LONGEST = 60
"""Operands with more characters than this are not repeated in a remedy."""


@dataclass(frozen=True)
class UsersCall:
    """One call of an op in the user's code.

    Args:
        operands: the code of its tensors and other positional arguments, the object of a method first.
        statement: the statement that contains it, without indentation; in a lambda its expression.
        target: the variable that receives the value of the call, `y` where none does.
        start, end: places of the call in the statement.
        places: where each operand begins and ends in the statement.
        atoms: for each operand, whether it can be followed by a dot as it is.
        tensors: the operands that are not written as numbers, those that may be one last. An op reads as many of them
            as its record has inputs.
        is_operator: whether the call is written as an operator, such as `q @ k`.
        keywords: the names of its keyword arguments.
    """

    operands: tuple[str, ...]
    statement: str
    target: str
    start: int
    end: int
    places: tuple[tuple[int, int], ...]
    atoms: tuple[bool, ...]
    tensors: tuple[int, ...]
    is_operator: bool = False
    keywords: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The call itself."""
        return self.statement[self.start : self.end]

    @property
    def tensor(self) -> str:
        """The code of its first tensor, `x` where it has none."""
        return self.operands[self.tensors[0]] if self.tensors else "x"

    def operand_followed_by(self, method: str, operand: int | None = None) -> tuple[Edit, ...]:
        """Edits that put a method call behind an operand, the first tensor, in parentheses where it needs them."""
        operand = operand if operand is not None else next(iter(self.tensors), 0)
        begin, end = self.places[operand]
        if self.atoms[operand]:
            return (Edit(end, end, method),)
        return Edit(begin, begin, "("), Edit(end, end, f"){method}")

    def followed_by(self, method: str) -> tuple[Edit, ...]:
        """Edits that put a method call behind the call."""
        if not method:
            return ()
        if not self.is_operator:
            return (Edit(self.end, self.end, method),)
        return Edit(self.start, self.start, "("), Edit(self.end, self.end, f"){method}")

    def replaced_by(self, code: str) -> tuple[Edit, ...]:
        """The edit that writes other code in its place."""
        return (Edit(self.start, self.end, code),)


@dataclass(frozen=True)
class UsersFunction:
    """The function of the user's code that contains a line.

    Args:
        file: its file.
        name: its name.
        first, last: the lines of its body, without a docstring.
        arguments: the names of its arguments that may be tensors, without `self`.
        tensors: those of them that certainly are, as they are used.
        body: the code of its body, without indentation.
        names: number of a line -> the arguments that it reads.
        numbers: number of a line -> the numbers that are written in it.
    """

    file: str
    name: str
    first: int
    last: int
    arguments: tuple[str, ...]
    tensors: frozenset[str]
    body: str
    names: Mapping[int, frozenset[str]]
    numbers: Mapping[int, frozenset[float]]

    def contains(self, line: CodeLine | None) -> bool:
        """Whether a line belongs to its body."""
        return line is not None and line.file == self.file and self.first <= line.number <= self.last


def function_around(line: CodeLine | None) -> UsersFunction | None:
    """Return the innermost function that contains a line; None for a generator, or if the file cannot be parsed."""
    tree = None if line is None else _tree(line.file, len(linecache.getlines(line.file)))
    if line is None or tree is None:
        return None
    around = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and _is_on(each, line.number)]
    found = max(around, key=lambda each: each.lineno, default=None)
    if found is None or any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(found)):
        return None
    body = found.body[1:] if ast.get_docstring(found) is not None else found.body
    if not body or body[0].lineno == found.lineno:
        return None
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    arguments, tensors = _arguments(found, is_method=any(found in each.body for each in _classes(tree)))
    names: dict[int, frozenset[str]] = {}
    numbers: dict[int, frozenset[float]] = {}
    for each in ast.walk(found):
        if isinstance(each, ast.Name) and each.id in arguments:
            names[each.lineno] = names.get(each.lineno, frozenset()) | {each.id}
        if isinstance(each, ast.Constant) and isinstance(each.value, int | float):
            numbers[each.lineno] = numbers.get(each.lineno, frozenset()) | {float(each.value)}
    code = textwrap.dedent("".join(linecache.getlines(line.file)[first - 1 : last])).rstrip("\n")
    return UsersFunction(line.file, found.name, first, last, arguments, tensors, code, names, numbers)


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]


def _arguments(function: ast.FunctionDef, *, is_method: bool) -> tuple[tuple[str, ...], frozenset[str]]:
    """The arguments that may be tensors, and those that are: code reads an attribute that only tensors have."""
    given = [*function.args.posonlyargs, *function.args.args][is_method:]
    plain = given[: len(given) - len(function.args.defaults)] if function.args.defaults else given
    known = [each.arg for each in plain if "Tensor" in ast.unparse(each.annotation or ast.Name("Tensor"))]
    read: dict[str, set[str]] = {}
    for each in ast.walk(function):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            read.setdefault(each.value.id, set()).add(each.attr)
    possible = tuple(each for each in known if all(hasattr(torch.Tensor, attr) for attr in read.get(each, ())))
    certain = (each for each in possible if any(not hasattr(float, attr) for attr in read.get(each, ())))
    return possible, frozenset(certain)


@dataclass(frozen=True)
class Edit:
    """Text to write in place of a piece of a statement; of nothing where it begins and ends at one place."""

    start: int
    end: int
    text: str


def edited(statement: str, edits: tuple[Edit, ...]) -> str:
    """Return a statement with its edits made; of two insertions at one place the later one comes first.

    >>> edited("y = f(x)", (Edit(6, 7, "x.float()"), Edit(8, 8, ".half()")))
    'y = f(x.float()).half()'
    """
    for each in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        statement = statement[: each.start] + each.text + statement[each.end :]
    return statement


def call_on(line: CodeLine | None, op: str, *, outermost: bool = False, is_module: bool = False) -> UsersCall | None:
    """Return the only call of an op on a line; None if there is none or several, or the file cannot be parsed.

    Args:
        line: the line.
        op: the op, as a trace names it.
        is_module: `op` is the name of a submodule, so the object that has it is not an operand.
        outermost: if several match, return the one that contains the others, such as the outer addition of
            `a + b + c`.
    """
    if line is None:
        return None
    statement = _statement(line)
    if statement is None:
        return None
    calls = [each for each in ast.walk(statement) if _calls(each, op) and _is_on(each, line.number)]
    if outermost:
        calls = [each for each in calls if all(_holds(each, other) for other in calls)]
    if len(calls) != 1:
        return None
    call = cast("ast.Call | ast.BinOp", calls[0])
    inner = [each.body for each in ast.walk(statement) if isinstance(each, ast.Lambda) and _holds(each.body, call)]
    holder = inner[-1] if inner else statement
    operands = call.args if is_module and isinstance(call, ast.Call) else list(_operands(call))
    is_statement = bool(inner) or isinstance(statement, _SIMPLE)
    return _described(line.file, holder, call, operands) if is_statement else None


def _holds(node: ast.AST, other: ast.AST) -> bool:
    return any(each is other for each in ast.walk(node))


def _statement(line: CodeLine) -> ast.stmt | None:
    tree = _tree(line.file, len(linecache.getlines(line.file)))
    found = (
        [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and _is_on(each, line.number)] if tree else []
    )
    return max(found, key=lambda each: (each.lineno, each.col_offset), default=None)


@lru_cache(maxsize=64)
def _tree(file: str, _length: int) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _is_on(node: ast.AST, number: int) -> bool:
    return bool(getattr(node, "lineno", number + 1) <= number <= (getattr(node, "end_lineno", None) or 0))


def _calls(node: ast.AST, op: str) -> bool:
    if isinstance(node, ast.BinOp):
        return op in _OPERATORS.get(type(node.op), ())
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called.strip("_") == op.removeprefix("special_").removeprefix("linalg_")


def _described(
    file: str, statement: ast.stmt | ast.expr, node: ast.Call | ast.BinOp, operands: Sequence[ast.expr]
) -> UsersCall | None:
    text = _text(file, statement)
    if not operands or not text or any(len(ast.unparse(each)) > _LONGEST for each in operands):
        return None
    places = [_place(file, statement, each) for each in (node, *operands)]
    if any(text[start:end] == "" for start, end in places):
        return None
    only = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    holds = isinstance(statement, ast.Assign) and statement.value is node and isinstance(only, ast.Name)
    return UsersCall(
        tuple(ast.unparse(each) for each in operands),
        text,
        ast.unparse(only) if holds and only is not None else "y",
        *places[0],
        tuple(places[1:]),
        tuple(isinstance(each, _ATOMS) for each in operands),
        _tensors(operands),
        isinstance(node, ast.BinOp),
        tuple(each.arg or "" for each in node.keywords) if isinstance(node, ast.Call) else (),
    )


def _operands(node: ast.Call | ast.BinOp) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
        return
    if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
        yield node.func.value
    yield from node.args


def _tensors(operands: Sequence[ast.expr]) -> tuple[int, ...]:
    """The operands with a name in them; those that are only an attribute of `self`, such as an eps, last."""
    named = [place for place, each in enumerate(operands) if any(isinstance(e, ast.Name) for e in ast.walk(each))]
    return tuple(sorted(named, key=lambda place: _is_own_attribute(operands[place])))


def _is_own_attribute(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_module(node: ast.expr) -> bool:
    """Whether a name stands for a module of torch, as far as its spelling shows: `torch`, `F`, `nn.functional`."""
    return ast.unparse(node) in ("torch", "F", "nn.functional", "torch.nn.functional", "torch.special", "torch.linalg")


def _text(file: str, statement: ast.stmt | ast.expr) -> str:
    """The lines of a statement, with the indentation of its first line removed from each."""
    lines = linecache.getlines(file)[statement.lineno - 1 : statement.end_lineno]
    if not all(line.isascii() for line in lines):  # places count bytes
        return ""
    return "".join(_lines(lines, statement)).rstrip("\n")


def _lines(lines: list[str], statement: ast.stmt | ast.expr) -> list[str]:
    """Cut the indentation of the statement, and what follows it on its last line."""
    last = lines[-1][: statement.end_col_offset]
    return [line[statement.col_offset :] for line in [*lines[:-1], last]]


def _place(file: str, statement: ast.stmt | ast.expr, node: ast.expr) -> tuple[int, int]:
    """Where an expression begins and ends in the text of its statement."""
    lines = linecache.getlines(file)[statement.lineno - 1 : statement.end_lineno]
    begins = [0]
    for each in lines:
        begins.append(begins[-1] + max(len(each) - statement.col_offset, 0))

    def at(line: int, column: int) -> int:
        return begins[line - statement.lineno] + column - statement.col_offset

    return at(node.lineno, node.col_offset), at(node.end_lineno or node.lineno, node.end_col_offset or 0)


def with_smaller_number(line: CodeLine | None, op: str) -> str:
    """Return the user's statement with the number that an op receives limited to 1e4, which every dtype holds.

    A mask of -1e4 is 0 after a softmax, as one of -1e9 is. Without the statement the line is one with `mask` in it.
    """
    call = call_on(line, op)
    numbers = [] if call is None else [each for each in _number_operands(call, op) if "1e4" not in call.operands[each]]
    if call is None or len(numbers) != 1:
        return "scores = scores.masked_fill(mask, -1e4)"
    number = call.operands[numbers[0]]
    begin, end = call.places[numbers[0]]
    limited = f"max({number}, -1e4)" if not _is_literal(number) else ("-1e4" if number.startswith("-") else "1e4")
    return edited(call.statement, (Edit(begin, end, limited),))


LEAST_EPS = "1e-4"
"""The smallest eps that a remedy proposes: float16 holds it with all its bits, and its inverse."""


def with_larger_eps(line: CodeLine | None, op: str, eps: float) -> str:
    """Return the user's statement with the eps that an op receives raised to `LEAST_EPS`; empty if it is not found.

    Args:
        line: the line.
        op: the op, as a trace names it.
        eps: the number that it received.
    """
    call = call_on(line, op)
    if call is None:
        return ""
    written = [place for place, code in enumerate(call.operands) if eps in _literals(code)]
    own = [place for place, code in enumerate(call.operands) if code.startswith("self.") and "(" not in code]
    places = written or own
    if len(places) != 1:
        return ""
    begin, end = call.places[places[0]]
    code = call.operands[places[0]]
    return edited(call.statement, (Edit(begin, end, LEAST_EPS if _is_literal(code) else f"max({code}, {LEAST_EPS})"),))


def _literals(code: str) -> list[float]:
    """The numbers that an expression without calls contains."""
    nodes = list(ast.walk(ast.parse(code, mode="eval")))
    if any(isinstance(each, ast.Call) for each in nodes):
        return []
    return [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, float)]


def _number_operands(call: UsersCall, op: str) -> list[int]:
    """The operands that are numbers: the last one of a fill, else a literal or an attribute of `self`."""
    last = len(call.operands) - 1
    if op.startswith(("masked_fill", "fill", "full")):
        return [last] if last > 0 else []
    places = range(len(call.operands))
    literal = [each for each in places if each not in call.tensors]
    return literal or [each for each in places if call.operands[each].removeprefix("self.").isidentifier()]


def _is_literal(code: str) -> bool:
    try:
        float(code)
    except ValueError:
        return False
    return True
