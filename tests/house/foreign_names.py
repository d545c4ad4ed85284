"""The private names of torch and of other packages that the source uses, found in the syntax trees."""

import ast
import re
from collections.abc import Iterator

from source_tree import PACKAGE, files_under, parse, python_files, relative

__all__ = ["names_in", "page_names", "private_names"]

_OWNERS = ("torch", "ipywidgets", "anywidget", "jupyterlab", "jupyter_server", "comm", "IPython", "traitlets")


def private_names() -> dict[str, set[str]]:
    """Return private name -> files that use it: dotted where the source names its module, else ``.attribute``."""
    return names_in({relative(path): parse(path) for path in python_files(PACKAGE)})


def names_in(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return the same for syntax trees by file."""
    own = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in _used(tree):
            if name.lstrip(".") not in own:
                found.setdefault(name, set()).add(file)
    modules = {name for name in found for other in found if other.startswith(f"{name}.")}
    return {name: files for name, files in found.items() if name not in modules}


def page_names() -> dict[str, set[str]]:
    """Return class of an element of JupyterLab or ipywidgets -> scripts and style sheets that use it."""
    found: dict[str, set[str]] = {}
    for path in files_under(PACKAGE):
        if path.suffix not in (".js", ".css", ".py"):
            continue
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w-])\.((?:jp|lm|jupyter)-[A-Za-z-]+|widget-[a-z-]+)", text):
            found.setdefault(f".{name}", set()).add(relative(path))
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def _defined(tree: ast.Module) -> Iterator[str]:
    """The private names that a file defines: functions, classes, variables, attributes, arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name


def _used(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in _OWNERS:
                for each in names:
                    if any(map(_is_private, (*module.split("."), each.name))):
                        yield f"{module}.{each.name}"
            case ast.Attribute(attr=attr):
                yield from _chain(node, attr)


def _chain(node: ast.Attribute, attr: str) -> Iterator[str]:
    parts, value = [attr], node.value
    while isinstance(value, ast.Attribute):
        parts.insert(0, value.attr)
        value = value.value
    if isinstance(value, ast.Name) and value.id in _OWNERS:
        if any(map(_is_private, parts)):
            yield ".".join((value.id, *parts))
    elif _is_private(attr):
        yield f".{attr}"
