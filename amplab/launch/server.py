"""The JupyterLab that shows one notebook: its command line, its environment, and the browser.

The server is the JupyterLab of the running interpreter, so that the widgets' extensions and the kernel come from one
environment. The user's Jupyter configuration stays in effect: the command line overrides only what the lab needs, and
the defaults in ``jupyter`` (no news pop-up) rank below the user's own settings. It serves the notebook's folder alone.

The server starts with ``-P``: it never imports from the folder in which ``amplab lab`` was called, and it starts no
language server that it finds there. Kernels start with ``-P``, too, by the kernel spec in ``jupyter/data``; Jupyter's
own would look for the kernel in the notebook's folder first. From its first cell on, this folder is the last one on
`sys.path` (``kernel.py``): a notebook can import the modules next to it, and none of them hides a module that is
installed. (Python finds an installed checkout after that; so amplab is imported before.) The lab's cell runs by itself
only where there are no such modules.
"""

import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from amplab.launch.lessons import LaunchError, progress_file
from amplab.launch.trust import HIDDEN_SOURCES
from amplab.lessons.progress import PROGRESS

__all__ = ["Launch", "has_browser", "lab_environment", "launch", "plan_launch", "runs_as_root"]

ADDRESS = "127.0.0.1"
SETTINGS = Path(__file__).parent / "jupyter"


@dataclass(frozen=True)
class Launch:
    """A command line and an environment that open JupyterLab.

    Attributes:
        command: program and arguments.
        environment: the whole environment of the new process.
        opens_browser: False if JupyterLab will print its address instead.
        warning: a sentence if other machines can reach the server, else "".
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    opens_browser: bool
    warning: str = ""


def plan_launch(
    notebook: Path,
    *,
    folder: Path | None = None,
    port: int | None = None,
    browser: bool = True,
    app: bool = False,
    extra: Sequence[str] = (),
) -> Launch:
    """Return the command that opens `notebook` as a single document.

    Args:
        notebook: a file in `folder`.
        folder: the folder that JupyterLab serves, with the progress of the exercises; None for that of the notebook.
        port: TCP port in [1, 65535]; None takes 8888 or the next free one.
        browser: whether to open a browser, if there is one.
        app: whether to hide the sources of the cells.
        extra: further arguments of JupyterLab, in place of those here that set the same, which it would refuse twice.

    Raises:
        LaunchError: JupyterLab is not installed, or the port is taken or invalid.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise LaunchError(
            f"JupyterLab is not installed in {sys.prefix}: run `python -m pip install 'amplab[lab]'` "
            "with that environment's Python (in a checkout: '.[lab]')."
        )
    if port is not None:
        check_port(port)
    opens_browser = browser and has_browser()
    root = folder or notebook.parent
    defaults = [
        "--log-level=WARN",
        f"--ServerApp.ip={ADDRESS}",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/doc/tree/{quote(notebook.relative_to(root).as_posix())}",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
        "--ServerApp.contents_manager_class=amplab.launch.contents.Contents",
        "--LanguageServerManager.autodetect=False",  # it would run those in ./node_modules
        f"--LabApp.extra_labextensions_path={SETTINGS / 'labextensions'}",
        *([] if port is None else [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]),
        *([] if opens_browser else ["--no-browser"]),
        *(["--allow-root"] if runs_as_root() else []),
    ]
    given = {option for option, _ in _options(extra)}
    kept = [word for word, (option, _) in zip(defaults, _options(defaults), strict=True) if option not in given]
    command = [sys.executable, "-P", "-m", "jupyterlab", *kept, *extra]
    environment = lab_environment(os.environ, app=app, progress=progress_file(root))
    return Launch(tuple(command), environment, opens_browser, warning_of_address(extra))


def warning_of_address(arguments: Sequence[str]) -> str:
    """Return a sentence if arguments of JupyterLab make it listen to other machines, else "".

    >>> warning_of_address(["--ip=127.0.0.1", "--debug"])
    ''
    >>> warning_of_address(["--ip", "0.0.0.0"])[:26]
    '--ip 0.0.0.0: other machin'
    """
    address = dict(_options(arguments)).get("--ServerApp.ip", ADDRESS)
    if _is_loopback(address):
        return ""
    return (
        f"--ip {address}: other machines can reach this server, and who has its token can run code here; leave --ip "
        "out, and forward the port with `ssh -L` to open the lab from elsewhere."
    )


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return each argument of JupyterLab as the setting that it stands for and its value, which may be the next one."""
    split = [word.partition("=") for word in arguments]
    following = [*arguments[1:], ""]
    return [
        (_SHORT.get(option, option), value if given else after)
        for (option, given, value), after in zip(split, following, strict=False)
    ]


_SHORT = {
    **dict.fromkeys(("--ip", "--LabApp.ip", "--NotebookApp.ip"), "--ServerApp.ip"),
    "--port": "--ServerApp.port",
    "--port-retries": "--ServerApp.port_retries",
    "--notebook-dir": "--ServerApp.root_dir",
    "--Application.log_level": "--log-level",
    "--LabApp.log_level": "--log-level",
}
"""Other names of JupyterLab's settings."""


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def launch(plan: Launch) -> int:
    """Replace this process by JupyterLab; on Windows, which cannot do that, run it and return its exit status."""
    sys.stdout.flush()
    if os.name != "nt":
        os.execve(plan.command[0], plan.command, dict(plan.environment))
    return subprocess.call(plan.command, env=dict(plan.environment))


def lab_environment(
    environment: Mapping[str, str], *, app: bool = False, progress: Path | None = None
) -> dict[str, str]:
    """Return `environment` with the lab's default settings after the user's, and this interpreter's kernel first."""

    def then(name: str, last: Path) -> str:
        return os.pathsep.join(path for path in (environment.get(name, ""), str(last)) if path)

    return {
        "JUPYTER_PREFER_ENV_PATH": "1",
        **environment,
        "JUPYTER_CONFIG_PATH": then("JUPYTER_CONFIG_PATH", SETTINGS),
        "JUPYTER_PATH": then("JUPYTER_PATH", SETTINGS / "data"),
        HIDDEN_SOURCES: "1" if app else "",
        **({} if progress is None else {PROGRESS: str(progress)}),
    }


def check_port(port: int) -> None:
    """Raise LaunchError unless a server can listen on `port` here."""
    if not 1 <= port <= 65535:
        raise LaunchError(f"--port {port}: expected a number from 1 to 65535; leave it out to take the next free port.")
    with socket.socket() as probe:
        # As the server does it. Without this, a port that was just released counts as taken (on Windows the option
        # means the opposite).
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise LaunchError(
                f"--port {port}: unavailable on {ADDRESS} ({error.strerror or error}); choose another port, "
                "or leave --port out to take the next free one."
            ) from error


def has_browser() -> bool:
    """Return whether a graphical browser can be opened (a text browser would occupy the terminal).

    As root on Linux, only the browser that $BROWSER names: Chromium and Chrome refuse to run as root, and end without a
    window.
    """
    if sys.platform.startswith("linux"):
        named = os.environ.get("BROWSER")
        if not named and (runs_as_root() or not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))):
            return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def runs_as_root() -> bool:
    """Return whether this process runs as root, where JupyterLab starts only with a flag that allows it."""
    return os.name == "posix" and os.geteuid() == 0
