"""Let the Python processes that a script starts find amplab in the place of apex, too.

    AMPLAB_AS_APEX   "apex" or "cpu": what is in force        in the environment, which every child inherits
    PYTHONPATH       this room's folder ``in_children`` first, whose ``sitecustomize`` an interpreter runs as it starts

So it holds for multiprocessing's "spawn" and "forkserver", for workers of a DataLoader, for
``torch.distributed.launch`` and for ``subprocess``. Interpreters that are started with -E, -I or -S ignore it, as
they are asked to.
"""

import importlib
import os
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from amplab.scripts.apex_alias import as_apex

__all__ = ["follow_parent", "let_children_follow"]

VARIABLE = "AMPLAB_AS_APEX"
FOLDER = str(Path(__file__).with_name("in_children"))


def let_children_follow(device: str | None) -> None:
    """Tell every process that is started from here on what this one does.

    Args:
        device: as `run_script`.
    """
    os.environ[VARIABLE] = device or "apex"
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])


def follow_parent() -> None:
    """Do in this process, while it starts, what its parent does; nothing where no parent says so.

    Torch is not imported here: its CUDA calls are redirected when the program imports it.
    """
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    said = os.environ.get(VARIABLE)
    if said is not None:
        as_apex()
        sys.argv[:] = _with_local_rank(sys.argv)
    if said == "cpu":
        sys.meta_path.insert(0, _TorchOnCpu())


def _with_local_rank(words: list[str]) -> list[str]:
    """Hand a script its rank as ``--local_rank``, as ``torch.distributed.launch`` did before torch 2.0.

    So for a script whose source has that spelling alone; every other one gets what there is.
    """
    script = Path(words[0]) if words else Path()
    if "TORCHELASTIC_RUN_ID" not in os.environ or not script.is_file():
        return words
    source = script.read_bytes()
    if b"--local_rank" not in source or b"--local-rank" in source:
        return words
    return [word.replace("--local-rank=", "--local_rank=", 1) for word in words]


class _TorchOnCpu:
    """Finds torch once, with a loader that redirects its CUDA calls when it is there."""

    def find_spec(self, name: str, _path: object = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RedirectingLoader(spec.loader)
        return spec


class _RedirectingLoader(Loader):
    """Loads torch as ``own`` does, whose place it then gives back."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        importlib.import_module("amplab.scripts.cuda_on_cpu").cuda_on_cpu()
