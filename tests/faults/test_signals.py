"""Real signals, threads and forks: the casts of each thread and process are those of its own policies."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import amplab
from amplab.policies import CastingEngine, PrecisionPolicy, thread_engines

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
KINDS = ["scale_loss", "autocast", "engine", "save", "save_wide_name"]
SCRIPT = Path(__file__).with_name("signalled_training.py")


def interrupts_and_losses(kind, seconds, seed=1):
    command = [sys.executable, str(SCRIPT), kind, str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=False)
    assert done.returncode == 0, done.stderr
    interrupts, lost = map(int, done.stdout.split())
    return interrupts, lost


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_after_signals_at_random_times(kind):
    interrupts, lost = interrupts_and_losses(kind, 2.0)
    assert interrupts > 10
    assert lost == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_after_thousands_of_signals(kind, seed):
    interrupts, lost = interrupts_and_losses(kind, 60.0, seed)
    assert interrupts > 1000
    assert lost == 0


POLICIES = (
    {"enabled": False},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16},
    {"policy": PrecisionPolicy.parse("apex/float16")},
)


def trained(options, model, steps):
    """The weights after some steps in a region, with regions and engines nested inside."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16))
    for step in range(steps):
        with amplab.autocast("cpu", **options):
            output = model(X)
            with engine.active() if step % 3 == 0 else amplab.autocast("cpu", enabled=step % 2 == 0):
                loss = (output @ output.T).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert thread_engines() == ()
    return [param.detach().clone() for param in model.parameters()]


def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def test_eight_threads_with_other_policies_train_bitwise_as_each_alone():
    models = [made() for _ in range(8)]
    together = [None] * 8

    def work(place):
        together[place] = trained(POLICIES[place % 4], models[place], 30)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = [trained(options, made(), 30) for options in POLICIES]
    for place, weights in enumerate(together):
        assert weights is not None, f"thread {place} failed"
        assert all(map(torch.equal, weights, alone[place % 4])), f"thread {place}"
    assert not torch.equal(alone[0][0], alone[1][0])


FORKS = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
import amplab
from amplab.policies import CastingEngine, PrecisionPolicy

torch.set_num_threads(1)
X, ended = torch.ones(4, 4), threading.Event()


def busy():
    while not ended.is_set():
        CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16))
        with amplab.autocast("cpu", torch.bfloat16):
            X @ X


def child():
    inside = (X @ X).dtype
    with amplab.autocast("cpu", torch.bfloat16):
        nested = (X @ X).dtype
    with amplab.autocast("cpu", enabled=False):
        off = (X @ X).dtype
    CastingEngine(PrecisionPolicy(compute_dtype=torch.bfloat16))
    return (inside, nested, off) == (torch.float16, torch.bfloat16, torch.float32)


def ends(pid, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads:
    thread.start()
wrong = hung = 0
with amplab.autocast("cpu", torch.float16):
    X @ X
    for _ in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if child() else 1)
        right = ends(pid, 30)
        hung, wrong = hung + (right is None), wrong + (right is False)
ended.set()
for thread in threads:
    thread.join()
print(wrong, hung)
"""


def forks(number):
    command = [sys.executable, "-c", FORKS, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=number * 2 + 120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_casts_as_the_thread_that_forked_it():
    assert forks(20) == ["0", "0"]


FORK_WHILE_A_VALUE_IS_COMPUTED = """
import os, threading, warnings
warnings.simplefilter("ignore")
import torch
from amplab.policies import CastPolicy, OpRule, OpTable
from amplab.scalers import DynamicScale

reading, read = threading.Event(), threading.Event()


def wait():
    if threading.current_thread() is not threading.main_thread():
        reading.set()
        read.wait()


class Spellings(tuple):
    def __iter__(self):
        wait()
        return super().__iter__()


class Scale(float):
    def __lt__(self, other):
        wait()
        return super().__lt__(other)


def table(spellings):
    return OpTable("a table", (OpRule("mm", CastPolicy.FP32, "mm: a test", spellings),))


SLOW, OTHER, COMPUTE
thread = threading.Thread(target=lambda: compute(slow))
thread.start()
reading.wait()
pid = os.fork()
if pid == 0:
    compute(other)
    os._exit(7)
read.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
COMPUTED = {
    "table": (
        'slow, other = table(Spellings(["torch.mm"])), table(("torch.mm",))',
        "compute = lambda table: table.rule(torch.mm)",
    ),
    "scaling rule": (
        "slow, other = DynamicScale(Scale(8.0)), DynamicScale(4.0)",
        "compute = lambda rule: rule.recurrence",
    ),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_process_forked_while_another_thread_computes_a_value_does_not_wait_for_that_thread(kind):
    program = FORK_WHILE_A_VALUE_IS_COMPUTED.replace("SLOW, OTHER, COMPUTE", "\n".join(COMPUTED[kind]))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.communicate(timeout=60)[0].split() == ["7"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # with a child that waits


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_hundreds_of_forked_processes_cast_as_the_thread_that_forked_them():
    assert forks(400) == ["0", "0"]


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with amplab.autocast("cpu", torch.bfloat16):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        return product.float(), int(product.dtype is torch.bfloat16)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_workers_of_a_loader_that_start_inside_a_region_cast_by_their_own():
    loader = torch.utils.data.DataLoader(Images(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    with amplab.autocast("cpu", torch.float16):
        rows = list(loader)
        assert (X @ X.T).dtype is torch.float16
    assert len(rows) == 4
    assert all(cast.all() for _, cast in rows)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.6, 1.2])
def test_ctrl_c_while_a_command_imports_torch_prints_no_traceback(seconds, tmp_path):
    command = [str(Path(sys.executable).with_name("amplab")), "train", "--steps", "100000", "--log", str(tmp_path)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps, end = Path(f"/proc/{started.pid}/maps"), time.monotonic() + 60
    while "libtorch" not in maps.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(seconds)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=100)
    assert started.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in said
