"""A JupyterLab and Chromium for each session, a new page for each test, and checks that every page must pass."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The modules beside this one, which measure.py imports as a script.
sys.path.insert(0, str(Path(__file__).parent))

from lab_page import NOTEBOOKS, LabPage, chromium_path, launch_chromium, sound_page
from lab_server import LabServer, running_server
from playwright.sync_api import Browser, sync_playwright


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium; without one the tests are skipped here and fail in CI."""
    if chromium_path() is None:
        missing = "found no Chromium or Chrome; install one, or name it in AMPLAB_CHROMIUM."
        pytest.fail(missing) if os.environ.get("CI", "").lower() == "true" else pytest.skip(missing)
    with sync_playwright() as playwright, launch_chromium(playwright) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab, started once."""
    with running_server(tmp_path_factory.mktemp("jupyterlab")) as lab_server:
        yield lab_server


@pytest.fixture
def page(server: LabServer, browser: Browser) -> Iterator[LabPage]:
    """A page for one test."""
    with sound_page(server, browser) as lab_page:
        yield lab_page


@pytest.fixture
def lab(page: LabPage) -> LabPage:
    """The lab's notebook with all cells run."""
    page.open(NOTEBOOKS / "00_the_lab.ipynb")
    page.run_all()
    page.show_dashboard()
    return page
