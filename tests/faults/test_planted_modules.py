"""A working folder with modules that somebody planted: no `amplab` command runs them.

Every module of the standard library and of every installed package has a namesake in the folder, as a file and as a
package. Each writes its name to a file and raises. `python -m amplab` is another matter: by Python's own rule it puts
the working folder first on the path, before a line of amplab runs; `python -P -m amplab` does not.
"""

import argparse
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from amplab.cli import build_parser
from amplab.launch.server import lab_environment

AMPLAB = str(Path(sys.executable).with_name("amplab"))
OTHERS = {"amplab", "torch", "triton", "plotly", "sitecustomize", "usercustomize"}
PLANTED = """
import os, sys
with open({ran!r}, "a") as file:
    file.write(f"{{__file__}} in {{sys.orig_argv}}\\n")
raise ImportError("planted")
"""
SCRIPT = "from apex import amp\nimport inspect, json, numpy\nprint(amp.__name__)\n"
DDP = """
from amplab.bench.ddp import Exchange, run_ddp

if __name__ == "__main__":
    run_ddp([Exchange(2, 10, 2, 1.0)], rounds=1)
"""
TINY = ("--steps", "2", "--hidden=4")
COMMANDS = {
    "lab": [["--list"]],
    "train": [TINY, ["--nproc", "2", *TINY]],
    "bench": [],  # minutes: `-m long`; `DDP` starts the processes of a suite
    "doctor": [["{scripts}/step.py:step"]],
    "run": [["--device", "cpu", "{scripts}/script.py"]],
}
STEP = """
import torch

def step():
    model = torch.nn.Linear(2, 2)
    return model, lambda: model(torch.ones(1, 2)).sum()
"""


def subcommands():
    (action,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return set(action.choices)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A working folder with the planted modules, and a folder beside it with scripts."""
    folder = tmp_path_factory.mktemp("planted") / "here"
    scripts = folder.parent / "scripts"
    scripts.mkdir()
    for name, text in (("script", SCRIPT), ("ddp", DDP), ("step", STEP)):
        (scripts / f"{name}.py").write_text(text)
    text = PLANTED.format(ran=str(folder.parent / "ran"))
    for name in sorted({*sys.stdlib_module_names, *packages_distributions(), *OTHERS} - {"__main__"}):
        if name.isidentifier():
            (folder / name).mkdir(parents=True)
            (folder / name / "__init__.py").write_text(text)
            (folder / f"{name}.py").write_text(text)
    return folder


def ran(folder, *commands, kernels="reference"):
    """Run commands in the folder, side by side; return what of the folder ran."""
    settings = {"AMPLAB_KERNELS": kernels, "AMPLAB_RUNS": str(folder.parent / "runs"), "HOME": str(folder.parent)}
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ends = [
        subprocess.Popen(
            [word.format(scripts=folder.parent / "scripts") for word in command],
            cwd=folder,
            env=others | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    told = [end.communicate(timeout=200)[0] for end in ends]
    marks = folder.parent / "ran"
    found = marks.read_text() if marks.exists() else ""
    marks.unlink(missing_ok=True)
    if not found:
        assert [(end.args, end.returncode, text) for end, text in zip(ends, told, strict=True) if end.returncode] == []
    return found


def test_every_command_is_attacked():
    assert set(COMMANDS) == subcommands()


def test_no_command_runs_a_module_of_the_working_folder(planted):
    commands = [[AMPLAB, name, *words] for name, each in COMMANDS.items() for words in each]
    safe = [sys.executable, "-P", "-m", "amplab", "--version"]
    assert ran(planted, safe, [sys.executable, "{scripts}/ddp.py"], *commands) == ""


def test_the_attack_is_one(planted):
    """Python's own rule for -m, which runs them before a line of amplab."""
    assert ran(planted, [sys.executable, "-m", "amplab", "--version"])


@pytest.mark.long
@pytest.mark.parametrize("suite", ["scaler", "casting", "kernels", "xray", "diagnose", "ddp"])
def test_no_suite_of_measurements_runs_one(planted, suite):
    kernels = "require" if suite == "casting" else "reference"  # it has no reference, so a build is attacked too
    assert ran(planted, [AMPLAB, "bench", suite, "--rounds", "1"], kernels=kernels) == ""


def test_no_module_beside_a_notebook_hides_one_that_is_installed(tmp_path, monkeypatch):
    """The others can be imported: who runs a cell beside them wants that.

    PathFinder alone is asked: the finder of setuptools warns once something has imported distutils.
    """
    for name in {*packages_distributions(), *OTHERS, *sys.stdlib_module_names} - {"distutils"}:
        if name.isidentifier() and (name == "amplab" or PathFinder.find_spec(name) is not None):
            (tmp_path / f"{name}.py").write_text(PLANTED.format(ran=str(tmp_path / "ran")))
    (tmp_path / "beside.py").write_text("")
    with kernel_in(tmp_path, monkeypatch) as client:
        reply = client.execute("import amplab.lab, torch, plotly, beside", reply=True, timeout=100)
        assert reply["content"]["status"] == "ok"
    assert not (tmp_path / "ran").exists()


CODE = ("impor", "import mine.", "from mine import ", "import mine; mine.", "'a'.", "import zlib; zlib.", "mine")


def test_no_module_beside_a_notebook_runs_before_a_cell_does(tmp_path, monkeypatch):
    """On Tab, for example, IPython and jedi look for modules that need not be installed. Silent code is no cell."""
    for name in {"colorama", "ctags", "docrepr", "gi", "mine", "numpydoc", "sphinx", *sys.stdlib_module_names}:
        (tmp_path / f"{name}.py").write_text(PLANTED.format(ran=str(tmp_path / "ran")))
    (tmp_path / "beside.py").write_text("")
    with kernel_in(tmp_path, monkeypatch) as client:
        for code in CODE:  # Tab and Shift-Tab
            client.complete(code, reply=True, timeout=100)
            client.inspect(code, reply=True, timeout=100)
            client.inspect(code, detail_level=1, reply=True, timeout=100)
        silent = client.execute("import mine", silent=True, reply=True, timeout=100)["content"]
        client.execute("", reply=True, timeout=100)
        client.execute("1", silent=True, user_expressions={"a": "__import__('mine')"}, reply=True, timeout=100)
        assert not (tmp_path / "ran").exists()
        assert silent["ename"] == "ModuleNotFoundError"
        for _ in range(2):
            cell = "import beside, sys; assert (sys.path[-1], sys.path.count('')) == ('', 1), sys.path"
            assert client.execute(cell, reply=True, timeout=100)["content"]["status"] == "ok"
    assert not (tmp_path / "ran").exists()


@contextmanager
def kernel_in(folder, monkeypatch):
    """Start a kernel of the lab in the folder, and yield a client."""
    for name, value in lab_environment(os.environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder))
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=100)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
