"""A module whose import was interrupted is imported again, and defines its operators again."""

import subprocess
import sys

import pytest

MODULES = [
    "kernels.unscale",
    "kernels.update_scale",
    "kernels.tensor_stats",
    "kernels.tensor_table",
    "kernels.gradient_places",
    "kernels.steps",
    "kernels.adaptive_steps",
    "kernels.layerwise_steps",
    "policies.casting.simulated_rounding",
]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_is_imported_again_after_an_interrupt_works(module, tmp_path):
    script = f"""
import importlib, sys, torch
name = "amplab.{module}"
def interrupt(frame, event, arg):
    if event == "return" and frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == name:
        raise KeyboardInterrupt
    return interrupt
sys.settrace(interrupt)
try:
    importlib.import_module(name)
except KeyboardInterrupt as error:
    kept = error  # and with it what the module held, as a shell does
sys.settrace(None)
assert name not in sys.modules and kept
importlib.import_module(name)
import amplab
from amplab.kernels import unscale_
found_inf = torch.zeros(1)
gradient = torch.tensor([2.0, 4.0])
unscale_([gradient], found_inf, torch.tensor([0.5]))
assert gradient.tolist() == [1.0, 2.0]
model, x = torch.nn.Linear(2, 1), torch.ones(3, 2)
optimizer = amplab.optimizers.FusedAdam(model.parameters())
model(x).sum().backward()
optimizer.step()
amplab.doctor(model, x)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
