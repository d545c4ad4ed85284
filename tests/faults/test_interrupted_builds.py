"""Ctrl-C while a kernel is built, in a process of its own: the next build in that process is complete."""

import os
import subprocess
import sys

import pytest
from torch.utils.cpp_extension import load_inline

from amplab.kernels.builder.recipe import obstacle
from amplab.lessons import lesson_07 as lesson

pytestmark = pytest.mark.skipif(
    os.name != "posix" or obstacle() is not None, reason=f"SIGINT to a compiler; {obstacle()}"
)

INTERRUPT = """
import os, signal, sys, threading, time
from pathlib import Path

def interrupt_when_there_is(pattern):
    def wait():
        while not list(Path(os.environ["XDG_CACHE_HOME"]).rglob(pattern)):
            time.sleep(0.001)
        if sys.argv[1] == "process":
            os.kill(os.getpid(), signal.SIGINT)
        else:  # also the compiler, as in a terminal
            os.killpg(0, signal.SIGINT)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
"""
# It takes a compiler long enough that the signal comes while it runs.
LESSON = """
from torch.utils.cpp_extension import load_inline
from amplab.lessons import lesson_07 as lesson

source = '#include <iostream>\\nextern "C" void interrupted() { std::cout << 7; }'

def build():
    with lesson.build_folder(source) as folder:
        load_inline("interrupted", source, build_directory=folder, is_python_module=False, no_implicit_headers=True)
    return Path(folder)

def libraries():
    return list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.so"))

for pattern in ("build.ninja", "after-1/build.ninja"):
    thread = interrupt_when_there_is(pattern)
    try:
        build()
        sys.exit("no interrupt came")
    except KeyboardInterrupt:
        thread.join()
    assert not libraries(), "the interrupt came after the build"
built = build()
assert [each.parent for each in libraries()] == [built]
assert build() == built and len(libraries()) == 1  # loaded, not built
"""
WAITS_AGAIN = """
import torch
from amplab import kernels

thread = interrupt_when_there_is("scratch-*/*/lock")
try:
    kernels.ensure(wait=True, on_report=lambda _: None)
    sys.exit("no interrupt came")
except KeyboardInterrupt:
    thread.join()
report = kernels.ensure(wait=True)
"""
FAILED = 'assert report.status == "failed", report'
BUILT = """
assert report.status == "built", report
grads = [torch.tensor([2.0, float("inf")])]
kernels.unscale_(grads, found := torch.zeros(1), torch.tensor([0.5]))
assert grads[0].tolist() == [1.0, float("inf")] and found.item() == 1.0
"""


def run(script, reached, folder, **variables):
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder), **variables}
    command = [sys.executable, "-c", INTERRUPT + script, reached]
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, timeout=400, start_new_session=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reached", ["process", "group"])
def test_a_build_of_lesson_07_that_is_interrupted_twice_begins_anew(reached, tmp_path):
    run(LESSON, reached, tmp_path)


def test_a_build_of_lesson_07_that_fails_says_so_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = "int broken = ;"
    for _ in range(2):
        with (
            pytest.raises(RuntimeError, match="Error building extension"),
            lesson.build_folder(source) as folder,
        ):
            load_inline("fails", source, build_directory=folder, is_python_module=False, no_implicit_headers=True)


def test_a_wait_for_the_kernels_after_an_interrupt_lasts_until_the_build_ends(tmp_path):
    compiler = tmp_path / "slow-compiler"
    compiler.write_text("#!/bin/sh\nsleep 2\nexit 1\n")
    compiler.chmod(0o755)
    run(WAITS_AGAIN + FAILED, "process", tmp_path, AMPLAB_KERNELS="auto", CXX=str(compiler))


@pytest.mark.long
@pytest.mark.parametrize("reached", ["process", "group"])
@pytest.mark.parametrize("mode", ["auto", "require"])
def test_the_kernels_are_built_after_an_interrupt(mode, reached, tmp_path):
    run(WAITS_AGAIN + BUILT, reached, tmp_path, AMPLAB_KERNELS=mode)
    assert len(list(tmp_path.rglob("built/*.so"))) == 2
