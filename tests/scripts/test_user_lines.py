"""A warning of a redirected call points at the line of the script, once for each line."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from amplab.scripts.cuda_on_cpu import cuda_on_cpu

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """import torch
x = torch.ones(2).cuda()
for _ in range(2):
    torch.tensor(x, device="cuda")
torch.tensor(x, device="cuda")
torch.range(0, 1, device="cuda")
with torch.cuda.amp.autocast():
    pass
torch.range(0, 1, device="cuda")
"""


def test_each_line_of_a_script_has_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "amplab", "run", "--device", "cpu", str(script)]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()
    located = [line.removeprefix(f"{script}:").partition(" ")[0] for line in said if line.startswith(str(script))]
    assert located == ["4:", "5:", "6:", "7:", "9:"]
    assert not any("amplab/scripts" in line for line in said)
    assert '  torch.tensor(x, device="cuda")' in said


def test_filters_and_recorders_see_the_line_and_the_module_of_the_caller():
    with cuda_on_cpu(lambda line: None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.tensor(torch.ones(1), device="cuda")
        assert [each.filename for each in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="To copy construct"):
                torch.tensor(torch.ones(1), device="cuda")
    shown = warnings._showwarnmsg
    with cuda_on_cpu(lambda line: None):
        assert warnings._showwarnmsg is not shown
    assert warnings._showwarnmsg is shown
