"""The packaging files are consistent, and a wheel contains all files of the package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from source_tree import PACKAGE, ROOT, files_under

CONDA_NAMES = {"pytorch": "torch"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(project: dict) -> set[str]:
    """Return every requirement in pyproject.toml, including all extras and the Python version."""
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    own = {line for lines in lists for line in lines if not line.startswith(project["name"])}
    return own | {f"python{project['requires-python']}"}


def conda_requirements(text: str) -> set[str]:
    """Return the requirements in environment.yml, including those under ``pip:``, by their PyPI names."""
    lines = re.findall(r"^ +- +([A-Za-z][\w.-]*[<>=!~][^\s#]*)", text, flags=re.MULTILINE)
    return {re.sub(r"^[\w.-]+", lambda match: CONDA_NAMES.get(match[0], match[0]), line) for line in lines}


def pins(text: str) -> dict[str, str]:
    """Return name and version of each line of constraints.txt, with normalized names."""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def build_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel of `source` without the network, as a release does, and return it."""
    script = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1767225600"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def copy_source(target: Path) -> Path:
    """Copy the sources of the wheel, so that the build does not change the checkout."""
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    shutil.copytree(PACKAGE, target / "amplab", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return target


def package_files() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in files_under(PACKAGE) if path.suffix != ".so"}


def test_conda_says_the_same() -> None:
    assert conda_requirements((ROOT / "environment.yml").read_text(encoding="utf-8")) == declared(PROJECT)


def test_the_check_of_conda_fires() -> None:
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert conda_requirements(text.replace("pytorch>=2.12", "pytorch>=2.11")) != declared(PROJECT)
    assert conda_requirements(text.replace("  - nbval>=0.11\n", "")) != declared(PROJECT)


def test_every_requirement_is_pinned_within_its_range() -> None:
    # pyproject.toml contains lower bounds only.
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    for line in declared(PROJECT) - {f"python{PROJECT['requires-python']}"}:
        name, bound = re.fullmatch(r"([\w.-]+)>=([\d.]+)", line).groups()
        assert numbers(pinned[normal(name)]) >= numbers(bound), line
    assert pinned["torch"] == "2.13.0"


def test_the_hashes_are_of_the_pinned_versions() -> None:
    text = (ROOT / "requirements-hashes.txt").read_text(encoding="utf-8")
    entries = re.findall(
        r"^([\w.-]+)==(\S+) \\((?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+)$", text, flags=re.MULTILINE
    )
    assert len(entries) == len(re.findall(r"^\w", text, flags=re.MULTILINE))
    hashed = {normal(name): version for name, version, _ in entries}
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert {name: hashed.get(name) for name in pinned} == pinned
    of_torch = re.compile(r"nvidia-|cuda-|triton$")  # on Linux torch requires its CUDA libraries
    assert [name for name in hashed.keys() - pinned if not of_torch.match(name)] == []


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    names = names_in(build_wheel(copy_source(tmp_path / "source"), tmp_path))
    assert package_files() - names == set()
    # Check that the package has at least one file of each kind.
    assert {".py", ".js", ".css", ".cpp", ".cu"} <= {Path(name).suffix for name in names}
    assert not [name for name in names if name.startswith(("tests/", "notebooks/"))]


def test_a_wheel_built_twice_has_the_same_bytes(tmp_path: Path) -> None:
    wheels = []
    for copy, age in (("first", 0), ("second", 86400)):
        (tmp_path / f"{copy}_wheel").mkdir()
        source = copy_source(tmp_path / copy)
        for path in source.rglob("*"):
            os.utime(path, (1.6e9 + age, 1.6e9 + age))
        wheels.append(build_wheel(source, tmp_path / f"{copy}_wheel"))
    assert wheels[0].name == wheels[1].name
    assert wheels[0].read_bytes() == wheels[1].read_bytes()


def test_the_check_of_the_wheel_fires(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    settings = (source / "pyproject.toml").read_text(encoding="utf-8")
    (source / "pyproject.toml").write_text(settings.replace('"**/*.js", ', ""), encoding="utf-8")
    missing = package_files() - names_in(build_wheel(source, tmp_path))
    assert missing
    assert {Path(name).suffix for name in missing} == {".js"}
