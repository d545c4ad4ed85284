"""The doctor's look at the machine: every fact is the machine's own."""

import os
import subprocess
import sys

import torch
from html_outline import outline

from amplab import diagnose
from amplab.policies import cpu_half


def facts() -> dict[str, str]:
    return dict(diagnose.doctor().facts)


def test_versions_are_those_that_run():
    assert torch.__version__ in facts()["torch"]
    assert torch.backends.cpu.get_cpu_capability() in facts()["CPU"]
    assert facts()["CUDA"].startswith("none") == (not torch.cuda.is_available())


def test_it_says_how_halves_are_multiplied():
    with cpu_half("fp32_accumulate"):
        assert "accumulated in float32 and rounded once" in facts()["float16 on CPU"]
    with cpu_half("native"):
        assert facts()["float16 on CPU"].startswith("native")


def told_by_the_command(**variables: str) -> str:
    command = [sys.executable, "-m", "amplab", "doctor"]
    environment = {**os.environ, **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_the_command_prints_it_one_fact_after_the_other():
    printed = told_by_the_command().splitlines()
    assert max(map(len, printed)) <= 100
    assert [line.split("  ")[0] for line in printed if not line.startswith(" ")] == [
        *("This machine", "", "what"),
        *(name for name, _ in diagnose.doctor().facts),
    ]


def test_without_a_compiler_it_says_what_to_install():
    printed = told_by_the_command(CXX="no-such-compiler")
    said = "cannot be built: no C++ compiler: 'no-such-compiler' is not on PATH. To enable them: "
    assert said in " ".join(printed.split())


def test_it_is_a_table_in_a_page_and_one_line_in_a_list():
    read = outline(diagnose.doctor()._repr_html_())
    assert read.counts["tr"] == 1 + len(facts())
    assert all(" ".join(sentence.split()) in read.words for sentence in facts().values())
    assert repr(diagnose.doctor()).startswith("<MachineReport: amplab, torch, CPU")
