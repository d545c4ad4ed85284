"""Train in a loop while SIGINT arrives at random times; print how many arrived, and after how many casts were wrong.

python signalled_training.py KIND SECONDS SEED
"""

import os
import random
import signal
import sys
import threading
import time

import torch
from torch import nn
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
        self._sender = threading.Thread(target=self._send)
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


def training(kind: str):
    """Return a step of this kind, and the dtype of a product outside of it."""
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
    return steps[kind], torch.float16 if kind == "scale_loss" else torch.float32


def main(kind: str, seconds: float, seed: int) -> None:
    step, outside = training(kind)
    step()
    modes = _get_current_function_mode_stack()
    signals, interrupts, lost = Signals(seed), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            signals.armed = True
            step()
            signals.armed = False
        except KeyboardInterrupt:
            interrupts += 1
        torch.set_grad_enabled(True)  # torch's own step leaves it off when it is interrupted as it ends
        wrong = (X @ X.T).dtype is not outside
        thread_engines()
        lost += wrong or _get_current_function_mode_stack() != modes
    signals.end()
    step()
    print(interrupts, lost)  # noqa: T201  read by the test


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
