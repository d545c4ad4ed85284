"""The input of `.ci/api`: every room is named, and its public names exist and have docstrings that pdoc shows."""

import importlib
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from source_tree import ROOT
from test_layers import ROOMS


def documented_rooms(script: str) -> list[str]:
    """Return the rooms that the script names."""
    (named,) = re.findall(r"^rooms=\(\n(.*?)^\)", script, re.MULTILINE | re.DOTALL)
    return named.split()


def undocumented_names(module: object) -> list[str]:
    """Return the public functions and classes of a room without a docstring, and the names that do not exist."""
    found = []
    for name in module.__all__:
        value = getattr(module, name, None)
        if value is None or ((inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value)):
            found.append(name)
    return found


def test_there_is_a_page_for_each_room() -> None:
    assert documented_rooms((ROOT / ".ci" / "api").read_text(encoding="utf-8")) == list(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_of_a_room_are_documented(room: str) -> None:
    module = importlib.import_module(f"amplab.{room}")
    assert module.__doc__
    assert undocumented_names(module) == []


def test_without_pdoc_the_script_says_what_to_install(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    result = subprocess.run(
        [ROOT / ".ci" / "api"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "pdoc" in result.stderr
    assert "python -m pip install" in result.stderr


def test_the_checks_fire() -> None:
    class Room:
        __all__ = ("absent", "bare", "told", "NUMBER")
        NUMBER = 1

        @staticmethod
        def bare() -> None: ...

        @staticmethod
        def told() -> None:
            """Say it."""

    assert undocumented_names(Room) == ["absent", "bare"]
    assert documented_rooms("a\nrooms=(\n  b c\n  d\n)\n") == ["b", "c", "d"]
