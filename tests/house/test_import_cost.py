"""`import amplab` loads, compiles, opens and starts nothing, and the core needs only torch and numpy.

Each check runs in a fresh interpreter and has a test that shows that it fails when it should.
"""

import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from source_tree import ROOT, module_name, python_files
from test_layers import CORE, room_of

IMPORT_ALL = "import amplab\nfor room in amplab.__all__: getattr(amplab, room)\n"

# Record the modules, processes, sockets and threads that an import adds to those of torch.
WATCH = """
import sys, threading
import torch, numpy
before = set(sys.modules)
events = []
sys.addaudithook(lambda event, arguments: events.append(event))
{code}
watched = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.startfile",
           "socket.bind", "socket.connect", "socket.sendto")
costly = ("ipywidgets", "anywidget", "plotly", "traitlets", "IPython", "sklearn", "scipy", "jupyterlab",
          "torch._dynamo", "torch._inductor", "torch.utils.cpp_extension", "torch.onnx")
loaded = set(sys.modules) - before
for name in costly:
    if name in loaded: print("loaded", name)
for event in sorted(set(events) & set(watched)): print("did", event)
for thread in threading.enumerate():
    if thread is not threading.main_thread(): print("started", thread.name)
"""

# Hide all packages except torch, numpy, their requirements and the standard library.
HIDE = """
import sys
class Hiding:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hiding, sys.meta_path)
{code}
"""

OF_TORCH = """
import time
begun = time.process_time()
import torch
middle = time.process_time()
{code}
print((time.process_time() - middle) / (middle - begun))
"""

TRAIN_TWO_STEPS = """
import torch
from amplab import amp
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for _ in range(2):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 0, 1]))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter in the checkout."""
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)


def watch(code: str) -> list[str]:
    """Return the forbidden modules, events and threads of `code`."""
    result = run(WATCH.format(code=code))
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(*names: str) -> set[str]:
    """Return the normalized names of `names` and of the distributions that they require, without extras."""
    needed, queue = set(), list(names)
    while queue:
        name = normal(queue.pop())
        if name in needed:
            continue
        needed.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        queue += [re.match(r"[\w.-]+", line)[0] for line in requirements if "extra ==" not in line]
    return needed


def foreign_packages() -> set[str]:
    """Return the installed top-level packages that the core must not need."""
    # setuptools, a requirement of torch, bundles its own dependencies.
    carried = {path.name for path in (Path(find_spec("setuptools").origin).parent / "_vendor").iterdir()}
    allowed = required_by("torch", "numpy") | {"amplab"}
    return {
        package
        for package, distributions in metadata.packages_distributions().items()
        if package not in carried and not allowed & {normal(name) for name in distributions}
    }


def run_core(code: str) -> subprocess.CompletedProcess[str]:
    return run(HIDE.format(hidden=foreign_packages(), code=code))


def test_import_loads_and_starts_nothing() -> None:
    assert watch(IMPORT_ALL) == []


def test_the_watch_sees() -> None:
    slips = {
        "loaded plotly": "import plotly",
        "loaded torch._dynamo": "import torch._dynamo",
        "did subprocess.Popen": "import subprocess; subprocess.run([sys.executable, '-c', ''])",
        "did socket.bind": "import socket; socket.socket().bind(('127.0.0.1', 0))",
        "started x": "threading.Thread(target=threading.Event().wait, name='x', daemon=True).start()",
    }
    # Importing plotly imports others of these packages too.
    assert set(slips) <= set(watch("\n".join(slips.values())))


def test_import_alone_does_not_even_load_torch() -> None:
    result = run("import sys, amplab, amplab.cli\nprint([name for name in ('torch', 'numpy') if name in sys.modules])")
    assert result.stdout == "[]\n", result.stderr


def test_import_is_quick() -> None:
    # All rooms take 0.6 to 0.75 of the processor time that torch takes: 0.4 to 0.8 s on a quick machine, twice
    # as much on a slow one or beside other processes.
    assert any(float(run(OF_TORCH.format(code=IMPORT_ALL)).stdout) < 1 for _ in range(5))


def test_core_runs_with_torch_and_numpy_alone() -> None:
    modules = [name for name in map(module_name, python_files(ROOT / "amplab")) if room_of(name) in CORE]
    result = run_core("\n".join(f"import {name}" for name in modules) + TRAIN_TWO_STEPS)
    assert result.returncode == 0, result.stderr


def test_the_rest_is_hidden_indeed() -> None:
    names = ["ipywidgets", "sklearn", "plotly", "pytest"]
    code = f"for name in {names}:\n    try: __import__(name)\n    except ModuleNotFoundError as error: print(error)"
    assert run_core(code).stdout.splitlines() == [f"No module named {name!r}" for name in names]
