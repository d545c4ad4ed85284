"""The files of the checkout and their syntax trees, for the house tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ROOT", "PACKAGE", "files_under", "python_files", "parse", "module_name", "relative"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "amplab"
# Folders that tools create; hidden folders are skipped too.
SKIPPED = {"__pycache__", "build", "dist", "node_modules"}


def files_under(*folders: Path) -> Iterator[Path]:
    """Yield the files of the project, sorted, without caches and files from an installation."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            made = any(part in SKIPPED or part.startswith(".") or part.endswith(".egg-info") for part in parts)
            if path.is_file() and not made:
                yield path


def python_files(*folders: Path) -> list[Path]:
    """Return the Python files under `folders`."""
    return [path for path in files_under(*folders) if path.suffix == ".py"]


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name of a file of the package: ``amplab.formats`` for its ``__init__.py``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def relative(path: Path) -> str:
    """Return `path` as the id of a test."""
    return path.relative_to(ROOT).as_posix()
