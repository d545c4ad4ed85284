"""Opening JupyterLab: which port, which browser, whose settings; and one real server."""

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

import nbformat
import psutil
import pytest
import torch
from jupyter_client.blocking import BlockingKernelClient

import amplab
from amplab.cli import main
from amplab.launch import LaunchError, plan_launch
from amplab.launch.server import lab_environment
from amplab.lessons.progress import PROGRESS

ROOT = Path(__file__).resolve().parents[2]
SERVER = re.escape("http://127.0.0.1")
LOOPBACK = SERVER[:-1] + r"\d"


@pytest.fixture
def lessons(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("00_the_lab", "03_loss_scale", "10_formats", "11_kernels"):
        (folder / f"{name}.ipynb").write_text("{}")
    (folder / "scratch.ipynb").write_text("{}")
    return folder


def test_command_opens_one_document_on_this_machine(lessons: Path) -> None:
    plan = plan_launch(lessons / "03_loss_scale.ipynb", browser=False, extra=["--debug"])
    assert plan.command[:4] == (sys.executable, "-P", "-m", "jupyterlab")
    assert plan.command[-1] == "--debug"
    assert {
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={lessons}",
        "--LabApp.default_url=/doc/tree/03_loss_scale.ipynb",
        "--LabApp.extension_manager=readonly",
        "--no-browser",
    } <= set(plan.command)
    assert ("--allow-root" in plan.command) == (os.geteuid() == 0)
    # The next free port is JupyterLab's own default, and the token is not ours to touch.
    assert not [word for word in plan.command if "port" in word or "token" in word]


def test_a_kernel_starts_without_its_folder_and_then_has_it_last(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "folder").mkdir()
    for name in ("torch", "IPython", "ipykernel_launcher", "json", "debugpy", "pkgutil"):
        (tmp_path / "folder" / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')\n")
    (tmp_path / "folder" / "mine.py").write_text("NUMBER = 7\n")
    code = "import mine, subprocess, sys, torch; print(mine.NUMBER, torch.ones(1).item(), sys.path[-1] == '')"
    plain = "print(subprocess.call([sys.executable, '-c', 'import mine']))"  # a process that a notebook starts
    environment = {**lab_environment(os.environ), "HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-P", "-c", RUN_IN_KERNEL, str(tmp_path / "folder"), f"{code}; {plain}"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["7", "1.0", "True", "0"]
    assert not ran.exists()


RUN_IN_KERNEL = """
import sys
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name="python3")
manager.start_kernel(cwd=sys.argv[1])
client = manager.client()
client.start_channels()
try:
    client.wait_for_ready(timeout=60)
    client.execute_interactive(sys.argv[2], timeout=60)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""


def test_kernels_know_where_the_progress_is_kept(lessons: Path) -> None:
    (lessons / "zh").mkdir()
    plan = plan_launch(lessons / "zh" / "03_loss_scale.ipynb", folder=lessons)
    assert plan.environment[PROGRESS] == str(lessons / "progress.json")
    assert {f"--ServerApp.root_dir={lessons}", "--LabApp.default_url=/doc/tree/zh/03_loss_scale.ipynb"} <= set(
        plan.command
    )
    assert PROGRESS not in lab_environment({})


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


@pytest.mark.parametrize(
    "words",
    [
        ["--ip=0.0.0.0"],
        ["--ip", "0.0.0.0"],
        ["--ServerApp.ip=*"],
        ["--LabApp.ip=0.0.0.0"],
        ["--NotebookApp.ip=0.0.0.0"],
        ["--ip="],
        ["--ip=::"],
    ],
)
def test_an_address_that_other_machines_reach_is_warned_of_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setenv("AMPLAB_LESSONS", str(tmp_path / "lessons"))
    monkeypatch.setattr("amplab.cli.launch", lambda plan: 0)
    assert main(["lab", "--no-browser", "--", *words]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert "--ip" in said
    for loopback in (["--ip=127.0.0.1"], ["--ip=::1"], ["--ip", "localhost"], [*words, "--ip=127.0.0.1"], ["--debug"]):
        assert main(["lab", "--no-browser", "--", *loopback]) == 0
        assert capsys.readouterr().err == ""


def test_missing_jupyterlab_is_said(lessons: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:] = [path for path in sys.path if 'site-packages' not in path]\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path; from amplab.launch import choose_lesson, plan_launch\n"
        f"plan_launch(choose_lesson(Path({str(lessons)!r})))"
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


def addresses_that_listen(port: int) -> set[str]:
    """Return the addresses on which the server behind `port` and its kernels listen."""
    listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    server = next(psutil.Process(each.pid) for each in listening if each.laddr.port == port)
    family = {server.pid, *(child.pid for child in server.children(recursive=True))}
    return {each.laddr.ip for each in listening if each.pid in family}


def fetch(url: str | urllib.request.Request, content: bytes | None = None, *, patience: float = 20.0) -> str:
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
    environment = {**os.environ, **folders, "PYTHONPATH": str(ROOT), "DISPLAY": ":0", "BROWSER": ""}
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
            if found := re.search(LOOPBACK + r"\S+", line):
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
    page = rf"({SERVER}:\d+)/doc/tree/00_the_lab\.ipynb\?token=(\w+)"
    with running_lab(tmp_path, ROOT, "-m", "amplab", "lab", "--no-browser") as address:
        server, token = re.fullmatch(page, address).groups()
        assert "jupyter-config-data" in fetch(address)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch(f"{server}/api/contents")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch(urllib.request.Request(f"{server}/api/contents?token={token}", headers={"Host": "attacker.example"}))
        for outside in ("..", "%2e%2e", "..%2f..%2fetc", "../pyproject.toml", ".hidden"):
            with pytest.raises(urllib.error.HTTPError, match=r"40\d"):
                fetch(f"{server}/api/contents/{outside}?token={token}")
        assert addresses_that_listen(int(server.rpartition(":")[2])) == {"127.0.0.1"}
        served = json.loads(fetch(f"{server}/api/contents?token={token}"))["content"]
        settings = fetch(f"{server}/lab/api/settings/@jupyterlab/apputils-extension:notification?token={token}")
    lessons = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} | {"zh"}  # the translations
    assert {entry["name"] for entry in served} == lessons == set(os.listdir(tmp_path / "HOME" / "amplab-lessons"))
    defaults = json.loads(settings)["schema"]["properties"]
    assert defaults["fetchNews"]["default"] == "false"
    assert defaults["checkForUpdates"]["default"] is False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_arguments_of_jupyterlab_replace_those_of_the_lab(tmp_path: Path) -> None:
    """It refuses a setting that is given twice."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.txt").touch()
    words = ["--ip", "127.0.0.2", "--port=0", f"--notebook-dir={here}", "--log-level=ERROR"]
    with running_lab(tmp_path, ROOT, "-m", "amplab", "lab", "--no-browser", "--", *words) as address:
        server, token = re.fullmatch(rf"({LOOPBACK}:\d+)/.*\?token=(\w+)", address).groups()
        served = json.loads(fetch(f"{server}/api/contents?token={token}"))["content"]
        assert addresses_that_listen(int(server.rpartition(":")[2])) == {"127.0.0.2"}
    assert [entry["name"] for entry in served] == ["mine.txt"]


@pytest.mark.skipif(os.name != "posix", reason="the server is stopped by a signal")
def test_no_code_of_the_working_folder_runs_but_kernels_import_files_next_to_a_notebook(tmp_path: Path) -> None:
    here, notebook = tmp_path / "here", tmp_path / "root" / "lessons" / "a.ipynb"
    here.mkdir()
    notebook.parent.mkdir(parents=True)
    for name in ("jupyterlab", "jupyter_server", "torch", "tornado", "jupyter_config"):
        (here / f"{name}.py").write_text(f"open({str(here / 'executed')!r}, 'a').write({name!r})")
    notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    notebook.with_name("beside.py").write_text("VALUE = 42")
    imports = "from pathlib import Path; from amplab.launch import launch, plan_launch"
    start = f"{imports}; launch(plan_launch(Path({str(notebook)!r})))"
    with running_lab(tmp_path, here, "-c", start) as address:
        server, token = re.fullmatch(rf"({SERVER}:\d+)/.*\?token=(\w+)", address).groups()
        assert "jupyter-config-data" in fetch(address)
        wanted = {"path": "a.ipynb", "name": "a", "type": "notebook", "kernel": {"name": "python3"}}
        session = json.loads(fetch(f"{server}/api/sessions?token={token}", json.dumps(wanted).encode()))
        (connection,) = (tmp_path / "JUPYTER_RUNTIME_DIR").glob(f"kernel-{session['kernel']['id']}*.json")
        code = "import amplab, beside, torch; print(beside.VALUE, amplab.__version__, torch.__version__)"
        assert run_in_kernel(connection, code) == f"42 {amplab.__version__} {torch.__version__}\n"
    assert not (here / "executed").exists()


WIDGETS = {"application/vnd.jupyter.widget-state+json": {"state": {}, "version_major": 2, "version_minor": 0}}


@pytest.mark.skipif(os.name != "posix", reason="the server is stopped by a signal")
def test_only_a_signed_notebook_comes_with_its_saved_widgets(tmp_path: Path) -> None:
    """The page restores them when it opens, and the state of an anywidget is JavaScript."""
    folder = tmp_path / "lessons"
    folder.mkdir()
    for name in ("own", "foreign"):
        notebook = nbformat.v4.new_notebook(metadata={"widgets": WIDGETS, "name": name})
        nbformat.write(notebook, folder / f"{name}.ipynb")
    before = (folder / "foreign.ipynb").read_bytes()
    imports = "from pathlib import Path; from amplab.launch import launch, plan_launch"
    start = f"{imports}; launch(plan_launch(Path({str(folder / 'own.ipynb')!r})))"
    with running_lab(tmp_path, ROOT, "-c", start) as address:
        data = {"JUPYTER_DATA_DIR": str(tmp_path / "JUPYTER_DATA_DIR")}
        trust = [sys.executable, "-m", "jupyter", "trust", str(folder / "own.ipynb")]
        subprocess.run(trust, env={**os.environ, **data}, check=True, capture_output=True, timeout=60)
        server, token = re.fullmatch(rf"({SERVER}:\d+)/.*\?token=(\w+)", address).groups()

        def metadata(name: str) -> dict[str, object]:
            return json.loads(fetch(f"{server}/api/contents/{name}.ipynb?token={token}"))["content"]["metadata"]

        assert metadata("own") == {"widgets": WIDGETS, "name": "own"}
        assert metadata("foreign") == {"name": "foreign"}
        for name in ("own", "uploaded"):
            sent = nbformat.v4.new_notebook(metadata={"widgets": WIDGETS, "name": f"saved {name}"})
            body = json.dumps({"type": "notebook", "format": "json", "content": sent}).encode()
            place = f"{server}/api/contents/{name}.ipynb?token={token}"
            fetch(urllib.request.Request(place, data=body, method="PUT"))
        assert metadata("own") == {"widgets": WIDGETS, "name": "saved own"}
        assert metadata("uploaded") == {"name": "saved uploaded"}
    assert (folder / "foreign.ipynb").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="the server is stopped by a signal")
def test_no_language_server_of_the_working_folder_is_found(tmp_path: Path) -> None:
    here = tmp_path / "here" / "node_modules" / "pyright"
    here.mkdir(parents=True)
    (here / "langserver.index.js").write_text("")
    with running_lab(tmp_path, tmp_path / "here", "-m", "amplab", "lab", "--no-browser") as address:
        server, token = re.fullmatch(rf"({SERVER}:\d+)/.*\?token=(\w+)", address).groups()
        assert json.loads(fetch(f"{server}/lsp/status?token={token}"))["sessions"] == {}


def run_in_kernel(connection: Path, code: str) -> str:
    """Return what code prints in the kernel of a connection file."""
    client = BlockingKernelClient(connection_file=str(connection))
    client.load_connection_file()
    client.hb_channel.time_to_dead = 60.0  # on a busy machine a kernel may be silent for longer than a second
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


REFUSES = "#!/bin/sh\necho 'Running as root without --no-sandbox is not supported.' >&2\nexit 1\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about the browsers of Linux")
@pytest.mark.parametrize(("is_root", "opens"), [(True, False), (False, True)])
def test_a_browser_that_refuses_root_is_not_said_to_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_root: bool, opens: bool
) -> None:
    for name in ("chromium", "google-chrome", "x-www-browser", "xdg-open"):
        (tmp_path / name).write_text(REFUSES)
        (tmp_path / name).chmod(0o755)
    for name, value in {"PATH": str(tmp_path), "DISPLAY": ":0", "AMPLAB_LESSONS": str(tmp_path / "lessons")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("BROWSER", raising=False)
    monkeypatch.setattr("amplab.launch.server.runs_as_root", lambda: is_root)
    monkeypatch.setattr("amplab.cli.launch", lambda plan: int(plan.opens_browser))
    assert main(["lab"]) == opens
    said = capsys.readouterr().out
    assert ("in your browser" in said) == opens
    assert "open the address that JupyterLab prints" in said
    monkeypatch.setenv("BROWSER", "chromium")  # whoever names one knows
    assert main(["lab"]) == 1
