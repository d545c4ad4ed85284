"""Every file has a descriptive name and a docstring, and links only to allowed hosts and paths."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, files_under, parse, python_files, relative

CODE = {".py", ".js", ".css", ".cpp", ".cu", ".cuh", ".h"}
# Names that do not describe the content.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "handle", "stuff"}
TOP = {
    *("amplab", "notebooks", "tests"),
    *(
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        "pyproject.toml",
        "constraints.txt",
        "requirements-hashes.txt",
        "environment.yml",
    ),
    *(".gitignore", ".gitattributes", ".ci", ".git"),
}
# Hosts that the project may link to; package indexes are not among them.
HOSTS = {
    *("arxiv.org", "doi.org", "docs.nvidia.com", "docs.pytorch.org", "pytorch.org", "github.com", "www.w3.org"),
    *("127.0.0.1", "localhost"),
}
FOLDER_OF_ONE_MACHINE = re.compile(r"(?<![\w.$}/])/(?:root|home|work|opt|Users|mnt)/\w")


def source_files() -> list[Path]:
    """Return the code and documentation files of the project."""
    tops = [path for path in ROOT.iterdir() if path.is_file() and path.name in TOP and path.name != ".git"]
    folders = [ROOT / name for name in ("amplab", "notebooks", "tests", ".ci")]
    return sorted(tops + [path for path in files_under(*folders) if path.suffix not in {".png", ".jpg", ".so"}])


def foreign_hosts(text: str) -> list[str]:
    """Return the hosts that `text` links to and that are not allowed."""
    return [host for host in re.findall(r"https?://([\w.-]*\w)", text) if host not in HOSTS]


def machine_paths(text: str) -> list[str]:
    """Return the absolute paths in `text` that are specific to one machine."""
    return FOLDER_OF_ONE_MACHINE.findall(text)


def empty_names(path: Path) -> set[str]:
    """Return the words in the name of a file that do not describe its content."""
    return set(re.split(r"[_\W]+", path.stem.lower())) & EMPTY_NAMES


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Yield the public names of a module that lack a docstring, and ``__all__`` where it is missing."""
    if not ast.get_docstring(tree):
        yield "the module"
    public = exported(tree)
    if public is None:
        yield "__all__ is missing"
    for node in tree.body:
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if documented and node.name in (public or ()) and not ast.get_docstring(node):
            yield node.name


def exported(tree: ast.Module) -> list[str] | None:
    """Return the names in ``__all__``."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return None


def test_top_level_holds_nothing_else() -> None:
    made = re.compile(r"\.(?!ci$|git)|__pycache__|build|dist|.*\.egg-info|shared")
    assert {path.name for path in ROOT.iterdir() if not made.match(path.name)} <= TOP


@pytest.mark.parametrize("path", [path for path in source_files() if path.suffix in CODE], ids=relative)
def test_the_name_of_a_file_says_what_it_holds(path: Path) -> None:
    assert empty_names(path) == set()


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=relative)
def test_modules_and_public_names_are_documented(path: Path) -> None:
    assert list(undocumented(parse(path))) == []


@pytest.mark.parametrize("path", python_files(ROOT / "tests"), ids=relative)
def test_test_files_say_what_they_hold(path: Path) -> None:
    assert ast.get_docstring(parse(path))


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_no_foreign_host_and_no_path_of_one_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert foreign_hosts(text) == []
    assert machine_paths(text) == []


def test_the_checks_fire() -> None:
    slash = "/"
    assert foreign_hosts(f"see https:{slash}{slash}files.example.net/simple") == ["files.example.net"]
    assert machine_paths(f"open {slash}home{slash}ada") == [f"{slash}home{slash}a"]
    assert empty_names(Path("amplab/train_utils.py")) == {"utils"}
    assert list(undocumented(ast.parse("def f(): ..."))) == ["the module", "__all__ is missing"]
    assert list(undocumented(ast.parse("'''x'''\n__all__ = ['f']\ndef f(): ..."))) == ["f"]


def test_the_checks_let_the_rest_pass() -> None:
    assert foreign_hosts("[1] https://arxiv.org/abs/1710.03740 http://127.0.0.1:8888") == []
    assert machine_paths("/usr/bin/chromium, ./work/a, $HOME/work/a, /doc/tree/notebooks") == []
    assert empty_names(Path("amplab/handles_half.py")) == set()
    assert list(undocumented(ast.parse("'''x'''\n__all__: list[str] = ['f']\ndef f():\n    '''f'''"))) == []
