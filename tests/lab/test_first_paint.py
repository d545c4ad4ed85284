"""A cell that opens the lab in a new kernel shows a line at once, before torch is imported, and then the dashboard."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "00_the_lab.ipynb"
WIDGET = "application/vnd.jupyter.widget-view+json"
TORCH = "import sys; print('torch' in sys.modules)"
PATIENCE = 120
QUICK = 1.0  # s


@pytest.fixture
def client(runs: Path) -> Iterator:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=PATIENCE)
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def messages(client, code: str) -> list[tuple[float, str, dict]]:
    """Run a cell and return what it shows: (seconds since it began, kind of message, content)."""
    asked, began, shown = client.execute(code), 0.0, []
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "execute_input":
            began = time.monotonic()
        elif kind == "status" and content["execution_state"] == "idle":
            return shown
        elif kind not in ("status", "comm_open", "comm_msg"):
            shown.append((time.monotonic() - began, kind, content))


def lab_source() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "".join(next(cell["source"] for cell in cells if cell["id"] == "the-lab"))


@pytest.mark.skipif(sys.platform == "win32", reason="measured on systems with signals")
def test_a_line_is_shown_within_a_second_and_gives_way_to_the_dashboard(client) -> None:
    assert messages(client, TORCH)[0][2]["text"] == "False\n"
    shown = messages(client, lab_source())
    seconds, kind, first = shown[0]
    assert (kind, "importing PyTorch" in first["data"]["text/plain"]) == ("display_data", True)
    assert seconds < QUICK
    (line,) = {content["transient"]["display_id"] for _, kind, content in shown if kind.endswith("display_data")}
    assert line == first["transient"]["display_id"]  # one line, whose text changes
    later, last = shown[-2:]
    assert (later[1], later[2]) == ("clear_output", {"wait": True})
    assert last[1] == "execute_result"
    assert WIDGET in last[2]["data"]
    assert "press <b>Shift+Enter</b>" in last[2]["data"]["text/html"]  # where widgets cannot be shown
    assert last[0] > 2 * seconds
    again = messages(client, lab_source())
    assert [kind for _, kind, _ in again] == ["execute_result"]
