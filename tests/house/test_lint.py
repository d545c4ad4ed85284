"""`.ci/lint` passes on the repository and fails on lint, format and type errors."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

# One fault for each of the three tools.
FAULTS = {
    "ruff check": "import os\n",
    "ruff format": "x  =  1\n",
    "mypy": 'x: int = "one"\n',
}


def lint(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run `.ci/lint` of a checkout with the tools of this environment."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", ".ci/lint"], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def small_checkout(folder: Path, source: str) -> Path:
    """Return a checkout whose package is one module."""
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "amplab").mkdir()
    (folder / "amplab" / "__init__.py").write_text(f'"""A package."""\n\n{source}')
    return folder


def test_the_checkout_is_clean() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("source", FAULTS.values(), ids=FAULTS)
def test_each_tool_fires(tmp_path: Path, source: str) -> None:
    assert lint(small_checkout(tmp_path, source)).returncode != 0


def test_a_sound_package_passes(tmp_path: Path) -> None:
    result = lint(small_checkout(tmp_path, "x = 1\n"))
    assert result.returncode == 0, result.stdout + result.stderr
