"""A script under `amplab run` sees, prints, raises and returns what it does under `python`."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from amplab.scripts import ScriptError, run_module, run_script

ROOT = Path(__file__).resolve().parents[2]
SELF = """
import os, sys
print(sys.argv, sys.path[0], __name__, __file__, __doc__, __package__, __spec__)
print(__builtins__, type(__loader__).__name__, sys.modules["__main__"].__dict__ is globals())
import neighbour
print(neighbour.NAME)
"""
ENDS = """
import atexit, sys, threading
atexit.register(print, "goodbye")
how = sys.argv[1]
print("start")
class Broken(Exception): pass
def fail():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise Broken("é") from error
if how == "error": fail()
if how == "hook":
    sys.excepthook = lambda kind, error, traceback: print("hooked", kind.__name__, traceback.tb_frame.f_code.co_name)
    fail()
if how == "text": sys.exit("sorry")
if how == "three": sys.exit(3)
if how == "none": sys.exit()
if how == "os": import os; os._exit(7)
if how == "interrupt": raise KeyboardInterrupt
print("end")
"""


def run(*words, cwd, check=False, stdout=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True, check=check,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (inner / "self.py").write_text(SELF)
    (inner / "ends.py").write_text(ENDS)
    (inner / "wrong.py").write_text("print('never')\nif True\n    pass\n")
    (inner / "latin.py").write_bytes("# coding: latin-1\nprint('é')\n".encode("latin-1"))
    (tmp_path / "link.py").symlink_to(inner / "self.py")
    return tmp_path


def both(folder, *words):
    """Return what python and what amplab makes of the same words."""
    return run(*words, cwd=folder), run("-m", "amplab", "run", *words, cwd=folder)


@pytest.mark.parametrize("path", ["inner/self.py", "link.py", "./inner/../inner/self.py"])
def test_a_script_finds_itself_where_python_puts_it(folder, path):
    direct, here = both(folder, path, "-h", "--device", "cpu", "--", "--x=1", "")
    assert direct.returncode == here.returncode == 0, here.stderr
    assert here.stdout == direct.stdout
    assert "neighbour" in here.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["inner/self.py", "--"],
        ["inner/self.py", "--", "x"],
        ["inner/self.py", "x", "--", "y", "--"],
        ["inner/self.py", "--", "--"],
        ["--", "inner/self.py", "--", "-h"],
    ],
)
def test_words_after_the_script_are_handed_on(folder, words):
    direct, here = both(folder, *words)
    assert here.stdout == direct.stdout
    assert here.stdout.startswith(f"{words[words[0] == '--' :]!r} ")


@pytest.mark.parametrize("how", ["error", "hook", "text", "three", "none", "os", "fall"])
def test_ends_are_those_of_a_direct_start(folder, how):
    direct, here = both(folder, "inner/ends.py", how)
    assert (here.returncode, here.stdout, here.stderr) == (direct.returncode, direct.stdout, direct.stderr)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("how", ["error", "hook", "text", "three", "fall"])
@pytest.mark.parametrize("output", ["full", "closed"])
def test_an_end_is_the_same_where_the_output_cannot_be_written(folder, how, output):
    ends = []
    for words in ["inner/ends.py", how], ["-m", "amplab", "run", "inner/ends.py", how]:
        if output == "closed":
            reader, written = os.pipe()
            os.close(reader)
        else:
            written = os.open("/dev/full", os.O_WRONLY)
        ends.append(run(*words, cwd=folder, stdout=written))
        os.close(written)
    direct, here = ends
    assert (here.returncode, here.stderr) == (direct.returncode, direct.stderr)
    assert ("Broken" in here.stderr) == (how == "error" or output == "closed")


@pytest.mark.parametrize("end", ["", "1 / 0", "sys.exit(3)"])
@pytest.mark.parametrize(
    "line", ["sys.stdout.close()", "sys.stdout = None", "sys.stdout = object()", "sys.stdout = sys.stderr = None"]
)
def test_a_script_may_do_without_its_output(folder, line, end):
    (folder / "without.py").write_text(f"import sys\nprint('trained')\n{line}\n{end}\n")
    direct, here = both(folder, "without.py")
    assert (here.returncode, here.stdout, without_addresses(here.stderr)) == (
        direct.returncode,
        direct.stdout,
        without_addresses(direct.stderr),
    )


def without_addresses(text):
    return re.sub("0x[0-9a-f]+", "0x", text)


def test_ctrl_c_ends_with_the_status_that_a_shell_reports(folder):
    direct, here = both(folder, "inner/ends.py", "interrupt")
    assert (here.stdout, here.stderr) == (direct.stdout, direct.stderr)
    assert here.returncode == 130


@pytest.mark.parametrize("path", ["inner/wrong.py", "inner/latin.py"])
def test_sources_are_read_as_python_reads_them(folder, path):
    direct, here = both(folder, path)
    assert (here.returncode, here.stdout, here.stderr) == (direct.returncode, direct.stdout, direct.stderr)


def test_a_module_is_run_as_python_does(folder):
    direct, here = (
        run(*words, "inner.ends", "three", "-m", cwd=folder) for words in (["-m"], ["-m", "amplab", "run", "-m"])
    )
    assert (here.returncode, here.stdout, here.stderr) == (direct.returncode, direct.stdout, direct.stderr)


def test_a_module_finds_itself(folder):
    (folder / "inner" / "where.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __name__, __package__, __spec__.name)"
    )
    direct, here = (run(*words, "inner.where", "-x", cwd=folder) for words in (["-m"], ["-m", "amplab", "run", "-m"]))
    assert here.stdout == direct.stdout != ""


def test_a_module_that_fails_says_so_without_our_frames(folder):
    result = run("-m", "amplab", "run", "-m", "inner.ends", "error", cwd=folder)
    assert result.returncode == 1
    assert "run_script.py" not in result.stderr
    assert result.stderr.endswith("Broken: é\n")


def test_apex_is_amplab_and_nothing_else_is_changed(folder):
    (folder / "old.py").write_text(
        "from apex import amp\nimport apex, amplab, torch\n"
        "print(apex is amplab, torch.cuda.is_available.__module__, torch.Tensor.cuda.__qualname__)\n"
    )
    result = run("-m", "amplab", "run", "old.py", cwd=folder)
    assert result.stdout == "True torch.cuda TensorBase.cuda\n"
    assert result.stderr == ""


def test_on_the_cpu_it_says_what_it_redirected(folder):
    (folder / "old.py").write_text(
        "import torch\nassert torch.cuda.is_available()\nfor _ in range(3): print(torch.ones(2).cuda().device)\n"
    )
    result = run("-m", "amplab", "run", "--device", "cpu", "old.py", cwd=folder)
    assert result.stdout == "cpu\n" * 3
    assert result.stderr.splitlines() == [
        "amplab --device cpu: torch.cuda.is_available() is True",
        "amplab --device cpu: .cuda() copies tensors, which stay on the CPU",
    ]


def test_classes_of_the_script_can_be_pickled(folder):
    (folder / "pickles.py").write_text(
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)\n"
    )
    assert run("-m", "amplab", "run", "pickles.py", cwd=folder).stdout == "True\n"


@pytest.mark.parametrize(
    ("path", "said"), [("no.py", "no such file"), (".", "a directory"), ("", "directory"), ("a\0b", "null")]
)
def test_what_is_no_script_is_refused(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match=said):
        run_script(path)


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "json.no_such", "", ".relative"])
def test_what_is_no_module_is_refused(monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ScriptError, match=re.escape(f"-m {name}")):
        run_module(name)
    assert importlib.util.find_spec("apex") is None


def test_an_unknown_device_is_refused_before_anything_runs(folder):
    with pytest.raises(ScriptError, match="tpu: expected cpu"):
        run_script(folder / "inner" / "self.py", device="tpu")


@pytest.mark.parametrize(
    ("lines", "advice"),
    [
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "`amplab run --device cpu`"),
        (
            "import argparse, io, torch\nfile = io.BytesIO()\ntorch.save({'args': argparse.Namespace(lr=1)}, file)\n"
            "file.seek(0)\nprint(torch.load(file)['args'].lr)",
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1",
        ),
    ],
)
def test_an_error_with_a_known_remedy_is_followed_by_it(folder, monkeypatch, lines, advice):
    (folder / "fails.py").write_text(f"{lines}\n")
    result = run("-m", "amplab", "run", "fails.py", cwd=folder)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("amplab run: ")
    assert advice in result.stderr.splitlines()[-1]
    if "TORCH" in advice:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert run("-m", "amplab", "run", "fails.py", cwd=folder).stdout == "1\n"


@pytest.mark.skipif(os.name != "posix", reason="a working folder cannot be deleted there")
def test_a_script_runs_in_a_working_folder_that_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("print('ran')", encoding="utf-8")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ended = run("-m", "amplab", "run", str(tmp_path / "script.py"), cwd=None)
    assert (ended.returncode, ended.stdout) == (0, "ran\n"), ended.stderr
