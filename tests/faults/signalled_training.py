"""Train or save in a loop while SIGINT arrives at random times; print how many arrived, and after how many it is wrong.

Wrong is a cast after a step, or after a save a file that does not load whole, or another file beside it.

python signalled_training.py KIND SECONDS SEED
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.overrides import _get_current_function_mode_stack

import amplab
from amplab import amp
from amplab.policies import CastingEngine, thread_engines

X = torch.ones(4, 8)


class Signals:
    """Sends SIGINT to this process; `armed` says whether one may raise KeyboardInterrupt now."""

    def __init__(self, seed: int) -> None:
        self.armed, self._ended, self._random = False, False, random.Random(seed)
        signal.signal(signal.SIGINT, self._interrupt)
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def _interrupt(self, _number: int, _frame: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def _send(self) -> None:
        while not self._ended:
            time.sleep(self._random.uniform(0.0, 0.004))
            os.kill(os.getpid(), signal.SIGINT)

    def end(self) -> None:
        self._ended = True
        self._sender.join()


def saving_shards(path: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return a save of a sharded run, and whether it cannot be loaded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))))

    def is_wrong() -> bool:
        amp.load_run_state(path, model=model)
        return False

    return lambda: amp.save_run_state(path, model=model), is_wrong


def saving(path: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return a save of a run, and whether its folder holds anything else than one whole file."""
    layers = [nn.Linear(64, 64) for _ in range(20)]
    models = [nn.Sequential(*layers), nn.Linear(512, 512)]

    def is_wrong() -> bool:
        amp.load_run_state(path, model=models)
        return list(path.parent.iterdir()) != [path]

    return lambda: amp.save_run_state(path, model=models), is_wrong


def training(kind: str) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return a step of this kind, and whether the casts outside of it are wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if kind == "scale_loss":
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    engine = CastingEngine()

    def loss_of(output):
        return output.float().square().mean()

    def scale_loss():
        with amp.scale_loss(loss_of(model(X)), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def autocast():
        with amplab.autocast("cpu", torch.float16):
            loss = loss_of(model(X))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def engine_blocks():
        for _ in range(4):
            with engine.active():
                model(X)

    steps = {"scale_loss": scale_loss, "autocast": autocast, "engine": engine_blocks}
    outside = torch.float16 if kind == "scale_loss" else torch.float32
    steps[kind]()
    modes = _get_current_function_mode_stack()

    def is_wrong() -> bool:
        torch.set_grad_enabled(True)  # torch's own step leaves it off when it is interrupted as it ends
        thread_engines()
        return (X @ X.T).dtype is not outside or _get_current_function_mode_stack() != modes

    return steps[kind], is_wrong


def main(kind: str, seconds: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saves = {"save": (saving, "run.pt"), "save_wide_name": (saving, "ü.pt"), "save_shards": (saving_shards, "run")}
        made, name = saves.get(kind, (None, ""))
        step, is_wrong = training(kind) if made is None else made(Path(folder, name))
        step()
        signals, interrupts, lost = Signals(seed), 0, 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                signals.armed = True
                step()
                signals.armed = False
            except KeyboardInterrupt:
                interrupts += 1
            lost += is_wrong()
        signals.end()
        step()
    print(interrupts, lost)  # noqa: T201  read by the test


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
