"""Processes that a script starts see apex, and the CPU for CUDA, as the script does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
START = """
import sys
sys.path.insert(0, {root!r})
import amplab.cli
sys.path.pop(0)
sys.exit(amplab.cli.main({words!r}))
"""
SPAWNS = """
import sys, torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
from apex import amp
import apex

class Ones(Dataset):
    def __len__(self): return 3
    def __getitem__(self, index): return torch.ones(1).cuda() * index

def work(rank, queue):
    import amplab
    queue.put((rank, apex is amplab, torch.cuda.is_available(), str(torch.ones(1).cuda().device)))

if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(queue,), nprocs=2)
    print(sorted(queue.get() for _ in range(2)))
    print([batch.item() for batch in DataLoader(Ones(), num_workers=1, multiprocessing_context=sys.argv[1])])
"""
RANK = """
import argparse, sys, torch, torch.distributed as dist
from apex.parallel import DistributedDataParallel, create_syncbn_process_group
from apex.parallel.distributed import flat_dist_call
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int)
parser.parse_args()
dist.init_process_group("nccl")
tensors = [torch.full((2,), 1.0 + dist.get_rank()), torch.full((3,), 1.0 + dist.get_rank()).half()]
flat_dist_call(tensors, dist.all_reduce)
flat_dist_call(own := [torch.tensor(float(dist.get_rank()))], dist.broadcast, (1,))
sizes = [create_syncbn_process_group(size).size() for size in (1, 2)]
try:
    create_syncbn_process_group(3)
except ValueError as error:
    said = str(error)
words = dist.get_rank(), [each.tolist() for each in tensors + own], sizes, create_syncbn_process_group(0), said
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: the launcher runs both without a buffer
dist.destroy_process_group()
"""


def run(folder, *words, check=True, **variables):
    """Start ``amplab run`` in ``folder`` as the installed command does: amplab is on no path of the program."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = START.format(root=str(ROOT), words=["run", *words])
    return subprocess.run(
        [sys.executable, "-c", command], cwd=folder, capture_output=True, text=True, check=check,
        env={**environment, **variables},
    )  # fmt: skip


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_processes_and_workers_of_a_loader(tmp_path, method):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    result = run(tmp_path, "--device", "cpu", "spawns.py", method)
    assert result.stdout.splitlines() == ["[(0, True, True, 'cpu'), (1, True, True, 'cpu')]", "[0.0, 1.0, 2.0]"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_the_launcher_of_the_time(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    words = ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "rank.py"]
    result = run(tmp_path, "--device", "cpu", *words, OMP_NUM_THREADS="1")
    said = "group_size=3: expected a divisor of the 2 processes; 0 means one group of all."
    ranks = [f"{rank} [[1.5, 1.5], [1.5, 1.5, 1.5], 1.0] [1, 2] None {said}" for rank in range(2)]
    assert sorted(result.stdout.splitlines()) == ranks


LOCAL_RANK = """
import argparse, sys
parser = argparse.ArgumentParser()
{declared}
print(parser.parse_args().local_rank, sys.argv[1:])
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_a_script_gets_its_rank_by_the_name_that_it_declares(tmp_path, spelling):
    declared = f"parser.add_argument({spelling!r}, default=7, type=int)"
    (tmp_path / "rank.py").write_text(LOCAL_RANK.format(declared=declared))
    words = ["-m", "torch.distributed.launch", "--nproc_per_node", "1", "rank.py"]
    assert run(tmp_path, *words, OMP_NUM_THREADS="1").stdout == f"0 ['{spelling}=0']\n"


WRAPPER = "from training import main\nmain()\n"
TRAINING = """
import argparse
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument({spelling!r}, dest="rank", default=7, type=int)
    print(parser.parse_args().rank)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
@pytest.mark.parametrize("started", [["wrapper.py"], ["-m", "wrapper"]], ids=["file", "module"])
def test_a_wrapper_around_the_training_gets_its_rank_too(tmp_path, spelling, started):
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    (tmp_path / "training.py").write_text(TRAINING.format(spelling=spelling))
    words = ["-m", "torch.distributed.launch", "--nproc_per_node", "1", *started]
    assert run(tmp_path, *words, OMP_NUM_THREADS="1").stdout == "0\n"


WRAPPED = """
import torch, torch.distributed as dist
from torch import nn
from apex.parallel import DistributedDataParallel
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
model(torch.ones(3, 2)).sum().backward()
print(model.broadcast_buffers)
del model  # it would keep gloo's threads, and Python may abort when they outlive it
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_apexs_wrapper_prints_no_warning_of_amplabs_own_call(tmp_path):
    (tmp_path / "script.py").write_text(WRAPPED)
    result = run(tmp_path, "script.py")
    assert (result.stdout, "broadcast_buffers" in result.stderr) == ("False\n", False)


def child(code):
    return f"import subprocess, sys\nprint(subprocess.run([sys.executable, *{code!r}], capture_output=True, text=True))"


def test_nothing_is_redirected_that_was_not_asked_for(tmp_path):
    code = "import apex, amplab, sys, torch; print(apex is amplab, torch.Tensor.cuda.__qualname__)"
    (tmp_path / "script.py").write_text(child(["-c", code]))
    assert "stdout='True TensorBase.cuda\\n', stderr=''" in run(tmp_path, "script.py").stdout
    (tmp_path / "script.py").write_text(child(["-I", "-c", "import sys, apex"]))
    assert "ModuleNotFoundError: No module named" in run(tmp_path, "script.py").stdout


def test_a_child_waits_for_no_torch_and_has_its_own_paths(tmp_path):
    code = "import sys; print('torch' in sys.modules, [path for path in sys.path if 'in_children' in path])"
    (tmp_path / "script.py").write_text(child(["-c", code]))
    assert "stdout='False []\\n', stderr=''" in run(tmp_path, "--device", "cpu", "script.py").stdout


def test_torch_keeps_its_loader(tmp_path):
    code = "import torch, importlib.resources as r; print(type(torch.__loader__).__name__, r.files('torch').is_dir())"
    (tmp_path / "script.py").write_text(child(["-c", code]))
    assert "stdout='SourceFileLoader True\\n'" in run(tmp_path, "--device", "cpu", "script.py").stdout


def test_the_users_sitecustomize_runs_too(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')\n")
    (tmp_path / "script.py").write_text(child(["-c", "import apex, sitecustomize; print(sitecustomize.__file__)"]))
    printed = run(tmp_path, "script.py", PYTHONPATH=str(tmp_path / "own")).stdout
    assert f"own\\n{tmp_path}/own/sitecustomize.py" in printed


def test_beside_a_folder_called_amplab_it_is_still_amplab(tmp_path):
    """A checkout: python takes the folder for a package wherever amplab itself is found by a finder only."""
    (tmp_path / "amplab" / "docs").mkdir(parents=True)
    (tmp_path / "script.py").write_text(
        "import multiprocessing\nfrom apex import amp\nimport amplab.policies\n"
        "def work(): print(amplab.__file__, amp.__name__)\n"
        "if __name__ == '__main__':\n"
        "    work()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    process.start(); process.join()\n"
    )
    assert run(tmp_path, "script.py").stdout == f"{ROOT}/amplab/__init__.py amplab.amp\n" * 2
