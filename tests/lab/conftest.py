"""Run logs of these tests go to a folder of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that $AMPLAB_RUNS names."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("AMPLAB_RUNS", str(folder))
    monkeypatch.setenv("AMPLAB_KERNELS", "reference")  # for the processes started here: they compile nothing
    return folder
