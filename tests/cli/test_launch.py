"""Opening JupyterLab: which notebook, which port, whose settings; and one real server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from jupyter_client.blocking import BlockingKernelClient

import amplab
from amplab.launch import LaunchError, choose_notebook, find_notebooks, lab_environment, plan_launch

ROOT = Path(__file__).resolve().parents[2]
SERVER = re.escape("http://127.0.0.1")


@pytest.fixture
def lessons(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("00_the_lab", "03_loss_scale", "10_formats", "11_kernels"):
        (folder / f"{name}.ipynb").write_text("{}")
    (folder / "scratch.ipynb").write_text("{}")
    return folder


def test_finds_the_notebooks_of_the_checkout() -> None:
    assert find_notebooks() == ROOT / "notebooks"


def test_missing_notebooks_are_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"found no notebooks in .*notebooks: .* clone the repository"):
        find_notebooks(tmp_path)


@pytest.mark.parametrize(("prefix", "name"), [("00", "00_the_lab"), ("03", "03_loss_scale"), ("10_f", "10_formats")])
def test_chooses_the_lesson_by_its_first_letters(lessons: Path, prefix: str, name: str) -> None:
    assert choose_notebook(lessons, prefix).stem == name


@pytest.mark.parametrize(
    ("prefix", "problem"), [("07", "no lesson"), ("1", "2 lessons"), ("", "no lesson"), ("s", "no lesson")]
)
def test_unclear_lesson_says_which_there_are(lessons: Path, prefix: str, problem: str) -> None:
    with pytest.raises(LaunchError, match=f"{prefix!r}: {problem}.* 00_the_lab, 03_loss_scale, 10_formats, 11_kernels"):
        choose_notebook(lessons, prefix)


def test_command_opens_one_document_on_this_machine(lessons: Path) -> None:
    plan = plan_launch(lessons / "03_loss_scale.ipynb", browser=False, extra=["--debug"])
    assert plan.command[:4] == (sys.executable, "-P", "-m", "jupyterlab")
    assert plan.command[-1] == "--debug"
    assert {
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={lessons.parent}",
        "--LabApp.default_url=/doc/tree/notebooks/03_loss_scale.ipynb",
        "--LabApp.extension_manager=readonly",
        "--no-browser",
    } <= set(plan.command)
    assert ("--allow-root" in plan.command) == (os.geteuid() == 0)
    # The next free port is JupyterLab's own default, and the token is not ours to touch.
    assert not [word for word in plan.command if "port" in word or "token" in word]


def test_taken_port_is_said(lessons: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--port {port}: unavailable"):
            plan_launch(lessons / "00_the_lab.ipynb", port=port)
    assert f"--ServerApp.port={port}" in plan_launch(lessons / "00_the_lab.ipynb", port=port).command


@pytest.mark.parametrize("port", [0, 65536])
def test_impossible_port_is_said(lessons: Path, port: int) -> None:
    with pytest.raises(LaunchError, match=f"--port {port}: expected"):
        plan_launch(lessons / "00_the_lab.ipynb", port=port)


def test_missing_jupyterlab_is_said(lessons: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:] = [path for path in sys.path if 'site-packages' not in path]\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from amplab.launch import Path, choose_notebook, plan_launch\n"
        f"plan_launch(choose_notebook(Path({str(lessons)!r})))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "LaunchError: JupyterLab is not installed" in result.stderr
    assert "python -m pip install 'amplab[lab]'" in result.stderr


def test_the_users_settings_take_precedence() -> None:
    environment = lab_environment({"JUPYTER_CONFIG_PATH": "/mine", "HOME": "/me"})
    mine, ours = environment["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    assert mine == "/mine"
    assert (Path(ours) / "labconfig" / "default_setting_overrides.json").exists()
    assert environment["HOME"] == "/me"
    assert environment["JUPYTER_PREFER_ENV_PATH"] == "1"


def fetch(url: str, content: bytes | None = None, *, patience: float = 20.0) -> str:
    """Return a page, or the answer to content; JupyterLab prints its address a moment before it listens there."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(url, content, timeout=patience) as reply:
                return reply.read().decode()
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def running_lab(tmp_path: Path, cwd: Path, *command: str) -> Iterator[str]:
    """Start the lab without a browser, as a user without any configuration; yield the address it prints."""
    folders = {
        name: str(tmp_path / name)
        for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    # Without the working folder on the path, as the installed command; with the checkout, if amplab is not installed.
    command = [sys.executable, "-P", *command]
    environment = {**os.environ, **folders, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # Ends the loop below where the server never prints an address.
    watchdog = threading.Timer(60, server.kill)
    watchdog.start()
    try:
        printed = []
        for line in server.stdout:
            printed.append(line)
            if found := re.search(SERVER + r"\S+", line):
                yield found[0]
                break
        else:
            pytest.fail(f"amplab lab printed no address: {''.join(printed)}")
    finally:
        watchdog.cancel()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)


@pytest.mark.skipif(os.name != "posix", reason="the server is stopped by a signal")
def test_real_server_keeps_its_token_and_asks_no_questions(tmp_path: Path) -> None:
    page = rf"({SERVER}:\d+)/doc/tree/notebooks/00_the_lab\.ipynb\?token=(\w+)"
    with running_lab(tmp_path, ROOT, "-m", "amplab", "lab", "--no-browser") as address:
        server, token = re.fullmatch(page, address).groups()
        assert "jupyter-config-data" in fetch(address)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch(f"{server}/api/contents")
        settings = fetch(f"{server}/lab/api/settings/@jupyterlab/apputils-extension:notification?token={token}")
    defaults = json.loads(settings)["schema"]["properties"]
    assert defaults["fetchNews"]["default"] == "false"
    assert defaults["checkForUpdates"]["default"] is False


@pytest.mark.skipif(os.name != "posix", reason="the server is stopped by a signal")
def test_no_code_of_the_working_folder_runs_but_kernels_import_files_next_to_a_notebook(tmp_path: Path) -> None:
    here, notebook = tmp_path / "here", tmp_path / "root" / "lessons" / "a.ipynb"
    here.mkdir()
    notebook.parent.mkdir(parents=True)
    for name in ("jupyterlab", "jupyter_server", "torch", "tornado", "jupyter_config"):
        (here / f"{name}.py").write_text(f"open({str(here / 'executed')!r}, 'a').write({name!r})")
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    notebook.with_name("beside.py").write_text("VALUE = 42")
    start = f"from amplab.launch import *; from pathlib import Path; launch(plan_launch(Path({str(notebook)!r})))"
    with running_lab(tmp_path, here, "-c", start) as address:
        server, token = re.fullmatch(rf"({SERVER}:\d+)/.*\?token=(\w+)", address).groups()
        assert "jupyter-config-data" in fetch(address)
        wanted = {"path": "lessons/a.ipynb", "name": "a", "type": "notebook", "kernel": {"name": "python3"}}
        session = json.loads(fetch(f"{server}/api/sessions?token={token}", json.dumps(wanted).encode()))
        (connection,) = (tmp_path / "JUPYTER_RUNTIME_DIR").glob(f"kernel-{session['kernel']['id']}*.json")
        code = "import amplab, beside, torch; print(beside.VALUE, amplab.__version__, torch.__version__)"
        assert run_in_kernel(connection, code) == f"42 {amplab.__version__} {torch.__version__}\n"
    assert not (here / "executed").exists()


def run_in_kernel(connection: Path, code: str) -> str:
    """Return what code prints in the kernel of a connection file."""
    client = BlockingKernelClient(connection_file=str(connection))
    client.load_connection_file()
    client.start_channels()
    printed = []
    try:
        client.wait_for_ready(timeout=60)
        client.execute_interactive(
            code, timeout=60, output_hook=lambda message: printed.append(message["content"].get("text", ""))
        )
    finally:
        client.stop_channels()
    return "".join(printed)
