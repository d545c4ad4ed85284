"""What a call costs."""

import subprocess
import sys
import time

import torch

from amplab.lessons.cost import milliseconds, operators_called


def test_operators_are_counted():
    x = torch.ones(3)
    assert operators_called(lambda: None) == 0
    assert operators_called(lambda: x.mul_(2).add_(1)) == 2


def test_time_is_in_milliseconds():
    assert milliseconds(lambda: time.sleep(0.01), 0.02) >= 10


def test_no_import_looks_for_a_cuda_toolkit():
    """It prints a warning into the lesson where the toolkit is there without a GPU."""
    program = "import sys, amplab.lessons.cost; sys.exit('torch.utils.cpp_extension' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
