"""Read from the syntax tree which modules a source file imports, at module level and inside functions."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Import", "imports_of"]


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        target: what is imported, dotted: ``from a import b`` gives ``a.b`` (b may be a module or a name of a).
        line: line number in the source.
        function: the innermost function around it, None at module level.
        for_types: under ``if TYPE_CHECKING``, so never executed.
    """

    target: str
    line: int
    function: str | None
    for_types: bool = False


def imports_of(source: str, *, module: str, is_package: bool = False) -> list[Import]:
    """Return every import of a module's source, `importlib.import_module("…")` with a literal included."""
    package = module if is_package else module.rpartition(".")[0]
    return list(_walk(ast.parse(source), package, function=None, for_types=False))


def _walk(node: ast.AST, package: str, *, function: str | None, for_types: bool) -> Iterator[Import]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            function = name
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            for_types = True
    for target in _targets(node, package):
        yield Import(target, node.lineno, function, for_types)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, function=function, for_types=for_types)


def _targets(node: ast.AST, package: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=name, names=names, level=level):
            parts = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            base = ".".join([*parts, *([name] if name else [])])
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
            literals = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            return [value for value in literals if isinstance(value, str)]
    return []
