"""Put amplab in place of apex in the Python processes that a script starts, through two environment variables.

    AMPLAB_AS_APEX   "apex", or "cpu" if CUDA calls are redirected too
    PYTHONPATH       starts with this room's folder ``in_children``; an interpreter runs its ``sitecustomize`` at start

This covers multiprocessing's "spawn" and "forkserver", workers of a DataLoader, ``torch.distributed.launch`` and
``subprocess``. Interpreters started with -E, -I or -S ignore these variables.
"""

import importlib
import os
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from amplab.scripts.apex_alias import as_apex
from amplab.scripts.local_rank import accept_both_spellings

__all__ = ["follow_parent", "let_children_follow"]

VARIABLE = "AMPLAB_AS_APEX"
FOLDER = str(Path(__file__).with_name("in_children"))


def let_children_follow(device: str | None) -> None:
    """Make every process that is started from now on do what this one does.

    Args:
        device: as in `run_script`.
    """
    os.environ[VARIABLE] = device or "apex"
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])


def follow_parent() -> None:
    """Do in this process, while it starts, what its parent does, if it was started under ``amplab run``.

    This does not import torch: CUDA calls are redirected when the program imports torch.
    """
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    mode = os.environ.get(VARIABLE)
    if mode is not None:
        as_apex()
        accept_both_spellings()
    if mode == "cpu":
        sys.meta_path.insert(0, _TorchOnCpu())


class _TorchOnCpu:
    """Finds torch once, with a loader that redirects its CUDA calls after loading it."""

    def find_spec(self, name: str, _path: object = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RedirectingLoader(spec.loader)
        return spec


class _RedirectingLoader(Loader):
    """Loads torch as the loader ``own`` does, then restores that loader on the module."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        importlib.import_module("amplab.scripts.cuda_on_cpu").cuda_on_cpu()
