"""The list of private names of torch, ipywidgets and JupyterLab is that of the source, and torch has them."""

import ast
import importlib
import re

import torch
from foreign_names import names_in, page_names, private_names
from source_tree import ROOT

ROWS = [
    line.strip("|").split("|")
    for line in (ROOT / "tests/house/private_names.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
LISTED = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]


def exists(name: str) -> bool:
    """Whether the installed packages have a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_the_list_names_what_the_source_uses() -> None:
    used = {*private_names(), *page_names()}
    assert used - set(LISTED) == set(), "add them to private_names.md: what for, what breaks, which fallback"
    assert set(LISTED) - used == set(), "no longer used: remove them from private_names.md"
    assert len(LISTED) == len(set(LISTED))


def test_every_row_says_what_breaks_and_the_fallback() -> None:
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in ROWS)


def test_the_installed_torch_has_the_names() -> None:
    only_with_cuda = set() if torch.backends.cuda.is_built() else {"torch._C._cuda_getDeviceCount"}
    missing = {name for name in LISTED if not name.startswith(".") and not exists(name)}
    assert missing == only_with_cuda


def test_the_search_finds_a_new_name() -> None:
    source = (
        "from torch._C import _new\nimport torch\ntorch._other.call(x)\nx._third\nclass A:\n  def _own(self): self._own"
    )
    assert set(names_in({"a.py": ast.parse(source)})) == {"torch._C._new", "torch._other.call", "._third"}
    assert not exists("torch._C._new")
