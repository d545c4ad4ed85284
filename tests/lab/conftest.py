"""Run logs of these tests go to a folder of their own, and each test leaves the compute threads as they were."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that $AMPLAB_RUNS names."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("AMPLAB_RUNS", str(folder))
    return folder
