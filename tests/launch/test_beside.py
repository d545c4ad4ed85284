"""The modules that a kernel can import from the folder of a notebook."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from amplab.launch import beside
from amplab.launch.beside import modules_beside


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("cuda.py", "cuda"),
        ("cuda/__init__.py", "cuda"),
        ("cuda/bindings/driver.py", "cuda.bindings.driver"),
        ("a/b/c/d/e.py", "a.b.c.d.e"),
        ("a/b/compiled.abi3.so", "a.b.compiled"),
    ],
)
def test_what_can_be_imported_is_found(tmp_path, path, name):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "03_loss_scale.ipynb").touch()
    assert modules_beside(str(tmp_path)) == [name]
    if path.endswith(".py"):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {name}"
        subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("ending", ["dist-info", "egg-info", "Dist-Info"])
def test_the_metadata_of_a_distribution_is_found_since_importing_torch_runs_what_it_names(tmp_path, ending):
    metadata = tmp_path / f"x-1.0.{ending}"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 1.0\n")
    (metadata / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: x\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nx = os:abort\n")
    run = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; sys.path.append(''); import torch"], cwd=tmp_path, check=False
    )
    assert run.returncode != 0
    assert modules_beside(str(tmp_path)) == [metadata.name]


def test_a_folder_that_no_import_can_name_is_not_searched(tmp_path):
    (tmp_path / "my-code").mkdir()
    (tmp_path / "my-code" / "code.py").touch()
    assert modules_beside(str(tmp_path)) == []


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_links_are_followed_and_end(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "module.py").touch()
    (tmp_path / "here" / "inner").mkdir(parents=True)
    (tmp_path / "here" / "inner" / "back").symlink_to(tmp_path / "here")
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "elsewhere")
    assert modules_beside(str(tmp_path / "here")) == ["linked.module"]


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_folder_that_cannot_be_listed_counts_as_modules():
    folder = Path(tempfile.mkdtemp())  # outside of pytest's, which another user may not enter
    package = folder / "tqdm"
    package.mkdir()
    (package / "__init__.py").touch()
    package.chmod(0o311)
    folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:  # who lists every folder
            os.setuid(65534)
        os._exit(int(modules_beside(str(folder)) != ["tqdm.…"]))
    _, status = os.waitpid(child, 0)
    shutil.rmtree(folder)
    assert os.waitstatus_to_exitcode(status) == 0


def test_more_folders_than_are_searched_count_as_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "_MOST_FOLDERS", 3)
    for number in range(3):
        (tmp_path / f"folder_{number}").mkdir()
    assert modules_beside(str(tmp_path)) == ["…"]
