"""Common mistakes, found in the syntax tree. Each check has a test that shows that it finds the mistake."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, parse, python_files, relative

Check = Callable[[ast.AST], Iterator[int]]


def name_of(node: ast.AST) -> str:
    """Return the last name of a (called) dotted name: ``raises`` for ``pytest.raises(ValueError)``."""
    match node:
        case ast.Call(func=func):
            return name_of(func)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def messages_as_tuples(tree: ast.AST) -> Iterator[int]:
    """Find ``raise E("text", value)`` and ``raise E("text"),``: the message prints as a tuple."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        match node.exc:
            case ast.Tuple() | ast.Call(args=[ast.Tuple(), *_]):
                yield node.lineno
            case ast.Call(args=[ast.Constant(value=str()) | ast.JoinedStr() | ast.BinOp(), _, *_]):
                yield node.lineno


def contexts_without_finally(tree: ast.AST) -> Iterator[int]:
    """Find a @contextmanager that skips what follows its yield when the body raises."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if {"contextmanager", "asynccontextmanager"} & {name_of(item) for item in node.decorator_list}:
            yield from unprotected_yields(node.body, followed=False)


def unprotected_yields(block: list[ast.stmt], *, followed: bool) -> Iterator[int]:
    """Yield the lines of yields after which something runs that no `finally` and no `with` protects."""
    for index, statement in enumerate(block):
        rest = block[index + 1 :]
        after = not isinstance(rest[0], ast.Return) if rest else followed
        nested = [
            field
            for name in ("body", "orelse", "handlers", "cases")
            for field in [getattr(statement, name, None)]
            if isinstance(field, list)
        ]
        if isinstance(statement, ast.With | ast.AsyncWith | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.Try) and statement.finalbody:
            continue
        for inner in nested:
            blocks = [part.body if isinstance(part, ast.ExceptHandler | ast.match_case) else [part] for part in inner]
            yield from unprotected_yields([line for part in blocks for line in part], followed=after)
        if not nested and after and any(isinstance(part, ast.Yield) for part in ast.walk(statement)):
            yield statement.lineno


def crowded_raises(tree: ast.AST) -> Iterator[int]:
    """Find several statements under one ``pytest.raises``: those after the first that raises never run."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.With | ast.AsyncWith) or len(node.body) == 1:
            continue
        if any(name_of(item.context_expr) in {"raises", "assertRaises"} for item in node.items):
            yield node.lineno


def mutable_defaults(tree: ast.AST) -> Iterator[int]:
    """Find a default argument that all calls share and can change."""
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                made = isinstance(default, ast.Call) and name_of(default) in {"list", "dict", "set", "deque"}
                if made or isinstance(default, displays):
                    yield default.lineno


def bare_excepts(tree: ast.AST) -> Iterator[int]:
    """Find ``except:``, which also swallows an interrupt."""
    return (node.lineno for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.type is None)


def properties_with_a_lock(tree: ast.AST) -> Iterator[int]:
    """Find functools.cached_property, whose lock in Python 3.11 stops a forked process; `kept_property` has none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if ast.unparse(decorator).rpartition(".")[2] == "cached_property":
                    yield decorator.lineno


def locks_left_to_forks(tree: ast.AST) -> Iterator[int]:
    """Find a lock, kept in an attribute or a module, that another thread may have at a fork: the child waits for it."""
    cared_for = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="renew_lock_in_forks"), args=[_, ast.Constant(value=name)]):
                cared_for.add(name)
            case ast.Call(func=ast.Name(id="hold_over_forks"), args=[lock, *_]):
                cared_for.add(name_of(lock))
    local = {id(line) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for line in ast.walk(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=ast.Call() as made) if name_of(made) in {"Lock", "RLock"}:
                is_kept = isinstance(target, ast.Attribute) or id(node) not in local
                if is_kept and name_of(target) not in cared_for:
                    yield node.lineno


FREE_IN_FORKS = {
    "amplab/lab/checkpoints.py": 1,  # `_guard_anew` makes a new one
    "amplab/lab/worker.py": 1,  # `_claim`: a forked process has no worker
}


CHECKS: tuple[Check, ...] = (
    messages_as_tuples,
    contexts_without_finally,
    crowded_raises,
    mutable_defaults,
    bare_excepts,
)


@pytest.mark.parametrize("path", python_files(PACKAGE, ROOT / "tests"), ids=relative)
def test_no_slips(path: Path) -> None:
    tree = parse(path)
    assert [f"{relative(path)}:{line}: {check.__name__}" for check in CHECKS for line in check(tree)] == []


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=relative)
def test_no_property_has_a_lock(path: Path) -> None:
    assert list(properties_with_a_lock(parse(path))) == []


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=relative)
def test_a_forked_process_waits_for_no_lock(path: Path) -> None:
    assert len(list(locks_left_to_forks(parse(path)))) == FREE_IN_FORKS.get(relative(path), 0)


CONTEXT = "@contextmanager\ndef scope():\n"


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (messages_as_tuples, "raise ValueError('expected a number, got', value)"),
        (messages_as_tuples, "raise ValueError(f'expected a number {x}', value)"),
        (messages_as_tuples, "raise (ValueError('expected a number'),)"),
        (messages_as_tuples, "raise ValueError(('expected', 'a number'))"),
        (contexts_without_finally, CONTEXT + "    push()\n    yield\n    pop()"),
        (contexts_without_finally, CONTEXT + "    if on:\n        yield\n    pop()"),
        (contexts_without_finally, CONTEXT + "    for x in y:\n        value = yield x\n        pop()"),
        (contexts_without_finally, CONTEXT + "    try:\n        yield\n    except OSError:\n        pass\n    pop()"),
        (crowded_raises, "with pytest.raises(ValueError):\n    build()\n    run()"),
        (crowded_raises, "with pytest.raises(ValueError, match='x') as e, other():\n    build()\n    run()"),
        (mutable_defaults, "def run(steps=[]): ..."),
        (mutable_defaults, "def run(*, options=dict()): ..."),
        (mutable_defaults, "run = lambda steps={}: steps"),
        (bare_excepts, "try:\n    run()\nexcept:\n    pass"),
        (properties_with_a_lock, "class Rule:\n    @cached_property\n    def scale(self): ..."),
        (properties_with_a_lock, "class Rule:\n    @functools.cached_property\n    def scale(self): ..."),
        (locks_left_to_forks, "_lock = threading.Lock()"),
        (locks_left_to_forks, "class Runs:\n    def __init__(self):\n        self._lock = RLock()"),
    ],
)
def test_each_check_fires(check: Check, source: str) -> None:
    assert len(list(check(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (messages_as_tuples, "raise ValueError(f'expected {x}') from error"),
        (messages_as_tuples, "raise subprocess.CalledProcessError(1, command)"),
        (contexts_without_finally, CONTEXT + "    push()\n    try:\n        yield\n    finally:\n        pop()"),
        (contexts_without_finally, CONTEXT + "    if x:\n        yield\n        return\n    with y:\n        yield"),
        (crowded_raises, "with pytest.raises(ValueError):\n    build()"),
        (mutable_defaults, "def run(steps=(), options=None, *, scale=float('inf')): ..."),
        (bare_excepts, "try:\n    run()\nexcept OSError:\n    pass"),
        (properties_with_a_lock, "from functools import cache"),
        (locks_left_to_forks, '_lock = threading.Lock()\nrenew_lock_in_forks(sys.modules[__name__], "_lock")'),
        (locks_left_to_forks, "self._lock = RLock()\nhold_over_forks(self._lock, LockOrder.HISTORY)"),
        (locks_left_to_forks, "def wait():\n    done = threading.Lock()"),
    ],
)
def test_no_check_fires_on_good_code(check: Check, source: str) -> None:
    assert list(check(ast.parse(source))) == []
