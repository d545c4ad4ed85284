"""Memory counters: the peak since the last reset, in a process of its own, as a training script reads it."""

import subprocess
import sys
from pathlib import Path

import pytest

from amplab.scripts.host_memory import HostMemory

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
from torch import nn
MB = 2**20
def peak_of(work):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    return (torch.cuda.max_memory_allocated() - before) / MB, kept
print(peak_of(lambda: [torch.ones(64 * MB // 4, device="cuda"), None][1])[0])   # freed at once
print(peak_of(lambda: [torch.ones(MB // 16, device="cuda") for _ in range(160)] and None)[0])  # small ones
print(peak_of(lambda: None)[0])
kept = peak_of(lambda: torch.ones(32 * MB // 4).cuda())[1]
print(torch.cuda.memory_allocated() / MB)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda()  # 8 MB
def step():
    model(torch.ones(4096, 512).cuda()).sum().backward()   # 64 MB of activations, 8 MB of input, 8 MB of gradients
step()  # the libraries of the CPU keep buffers from their first product on
print(peak_of(step)[0])
"""


@pytest.mark.skipif(not HostMemory().resets, reason="the system tells only the peak since the start")
def test_the_peak_is_that_of_the_tensors_since_the_last_reset(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "amplab", "run", "--device", "cpu", str(tmp_path / "script.py")]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    freed, small, nothing, held, step = map(float, result.stdout.split())
    assert freed == pytest.approx(64, abs=4)
    assert small == pytest.approx(40, abs=4)
    assert nothing < 2
    assert held == pytest.approx(32, abs=4)
    assert 72 < step < 200
    assert result.stderr.count("memory counters of torch.cuda are those of the process") == 1


def test_where_the_system_cannot_count_it_says_so(monkeypatch):
    monkeypatch.setattr("amplab.scripts.host_memory.sys.platform", "win32")
    memory = HostMemory()
    assert not memory.resets
    assert memory.held() == memory.peak() > 2**20
    assert "since its start" in memory.note
