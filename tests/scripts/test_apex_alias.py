"""amplab under the name apex: the same modules, wherever and however a script imports them, and gone afterwards."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import amplab
from amplab import amp

ROOT = Path(__file__).resolve().parents[2]


def names_of_apex():
    return [name for name in sys.modules if name == "apex" or name.startswith("apex.")]


def test_every_way_to_import_gives_the_same_module():
    with amplab.as_apex():
        import apex
        import apex.amp as amp_of_apex
        from apex import amp as from_apex
        from apex.amp import initialize

        assert apex is amplab
        assert amp_of_apex is from_apex is apex.amp is amp is importlib.import_module("apex.amp")
        assert initialize is amp.initialize
        assert sys.modules["apex.amp"] is sys.modules["amplab.amp"]


def test_a_module_below_is_not_loaded_twice():
    with amplab.as_apex():
        session = importlib.import_module("apex.amp.apex.session")
    assert session.Session is amp.Session


def test_modules_keep_their_own_names_and_specs():
    before = amplab.amp.__spec__
    with amplab.as_apex():
        importlib.import_module("apex.amp")
    assert (amplab.amp.__spec__, amplab.__spec__.name) == (before, "amplab")
    assert importlib.reload(importlib.import_module("amplab.formats")).__name__ == "amplab.formats"


def test_there_is_no_apex_after_undo():
    with amplab.as_apex():
        importlib.import_module("apex.amp")
        assert "apex.amp" in names_of_apex()
    assert names_of_apex() == []
    assert importlib.util.find_spec("apex") is None
    with pytest.raises(ModuleNotFoundError, match="apex"):
        importlib.import_module("apex")


def test_an_exception_in_the_block_takes_it_back_too():
    def fail():
        with amplab.as_apex():
            importlib.import_module("apex")
            raise ValueError("a")

    with pytest.raises(ValueError, match="a"):
        fail()
    assert names_of_apex() == []


def test_it_holds_until_undone_and_until_the_last_one_is():
    first, second = amplab.as_apex(), amplab.as_apex()
    first.undo()
    assert importlib.import_module("apex.amp") is amp
    second.undo()
    second.undo()
    assert importlib.util.find_spec("apex") is None


def test_undo_while_other_threads_import():
    def import_for_ever():
        while not ended.is_set():
            for number in range(50):
                sys.modules[f"other_{number}"] = amplab
            for number in range(50):
                del sys.modules[f"other_{number}"]

    ended, before = threading.Event(), sys.getswitchinterval()
    other = threading.Thread(target=import_for_ever)
    other.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            amplab.as_apex().undo()
    finally:
        sys.setswitchinterval(before)
        ended.set()
        other.join()


def test_those_who_look_for_an_installed_apex_find_one():
    with amplab.as_apex():
        assert importlib.util.find_spec("apex.amp") is not None
        assert importlib.metadata.version("apex") == "0.1"
        assert importlib.metadata.distribution("apex").metadata["Name"] == "apex"
        assert importlib.metadata.version("torch")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_what_amplab_lacks_is_not_found():
    with amplab.as_apex():
        assert importlib.util.find_spec("apex.contrib") is None
        with pytest.raises(ModuleNotFoundError, match=r"apex\.contrib"):
            importlib.import_module("apex.contrib")


def test_too_late_is_said(monkeypatch):
    other = type(sys)("apex")
    other.__file__ = "elsewhere/apex/__init__.py"
    monkeypatch.setitem(sys.modules, "apex", other)
    with pytest.raises(RuntimeError, match="elsewhere/apex"):
        amplab.as_apex()
    assert sys.modules["apex"] is other


def test_it_comes_before_another_package_of_the_name(tmp_path):
    (tmp_path / "apex.py").write_text("amp = 'of somebody else'\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport amplab; amplab.as_apex()\nimport apex\n"
    result = subprocess.run(
        [sys.executable, "-c", script + "print(apex is amplab)"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "True\n"
