"""A JupyterLab server for one test session, on this machine only, with its own settings and data folders."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LabServer", "free_port", "own_folders", "running_amplab_lab", "running_server", "wait_until_ready"]

START_SECONDS = 60.0


@dataclass(frozen=True)
class LabServer:
    """A server that answers.

    Attributes:
        port: Its port on 127.0.0.1.
        token: What a page must know to talk to it.
        root: Folder that it serves.
    """

    port: int
    token: str
    root: Path

    @property
    def runs(self) -> Path:
        """Folder of the run logs."""
        return self.root.parent / "amplab_runs"

    def url(self, path: str) -> str:
        """Return the address of `path` on the server, with the token."""
        return f"http://127.0.0.1:{self.port}{path}?token={self.token}"


@contextmanager
def running_server(folder: Path) -> Iterator[LabServer]:
    """Start JupyterLab in `folder`; its process, and with it every kernel, ends with the block."""
    root = folder / "root"
    root.mkdir()
    server = LabServer(free_port(), secrets.token_hex(16), root)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(_command(server), env=own_folders(folder), stdout=log, stderr=log)
        try:
            wait_until_ready(server, process, folder / "server.log")
            yield server
        finally:
            _end(process)


@contextmanager
def running_amplab_lab(folder: Path, *options: str) -> Iterator[LabServer]:
    """Start `amplab lab` as a user without any configuration; the lessons are copied into `folder`."""
    server = LabServer(free_port(), secrets.token_hex(16), folder / "lessons")
    own = {**own_folders(folder), "AMPLAB_LESSONS": str(server.root), "HOME": str(folder)}
    further = (f"--IdentityProvider.token={server.token}", "--expose-app-in-browser")
    command = [sys.executable, "-m", "amplab", "lab", "--no-browser", f"--port={server.port}", *options, "--", *further]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=own, stdout=log, stderr=log)
        try:
            wait_until_ready(server, process, folder / "server.log")
            yield server
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server, with its kernels. Seldom a thread of anyio that JupyterLab started late keeps it from ending."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _command(server: LabServer) -> list[str]:
    is_root = os.name == "posix" and os.geteuid() == 0
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser"),
        *(["--allow-root"] if is_root else []),
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={server.port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={server.root}",
        f"--IdentityProvider.token={server.token}",
        "--expose-app-in-browser",  # window.jupyterapp, which the tests drive
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]


def own_folders(folder: Path) -> dict[str, str]:
    """Return the environment with every Jupyter folder, the run logs and IPython's in `folder`."""
    own = {
        name: str(folder / name.lower())
        for name in (
            *("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "AMPLAB_RUNS"),
            *("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"),
        )
    }
    settings = folder / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    return {**os.environ, "OMP_NUM_THREADS": "1", **own}


def free_port() -> int:
    """Return a port on this machine that nothing listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(server: LabServer, process: subprocess.Popen, log: Path) -> None:
    """Wait until the server answers; raise RuntimeError with its log where it does not."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(server.url("/api/status"), timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start; its log:\n{log.read_text()[-3000:]}")
