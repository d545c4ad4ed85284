"""Ctrl-C while a room of amplab is imported at its first use: it waits for the import, and amplab works afterwards."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
import torch
import amplab

class InterruptsAt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, InterruptsAt())
handler = signal.getsignal(signal.SIGINT)
try:
    amplab.watch
except KeyboardInterrupt:
    print("stopped")
assert {module!r} in sys.modules, "the import went on"
assert signal.getsignal(signal.SIGINT) is handler

model = torch.nn.Linear(2, 1)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), amplab.GradScaler("cpu")
with amplab.watch(model, optimizer, scaler=scaler) as watched:
    for batch in watched.batches([torch.ones(2, 2)] * 2):
        optimizer.zero_grad()
        scaler.scale(watched.loss(model(batch).mean())).backward()
        scaler.step(optimizer)
        scaler.update()
print(len(watched.history))
"""


@pytest.mark.parametrize(
    "module", ["amplab.lab", "amplab.policies.signals", "amplab.amp.pytorch.grad_scaler", "amplab.lab.watch"]
)
def test_ctrl_c_in_the_first_use_of_a_name_waits_for_the_import(module):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["stopped", "2"]
