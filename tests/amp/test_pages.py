"""The pages beside the code: their examples run, their links lead somewhere, their arguments exist."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import amplab
from amplab import amp

FOLDER = Path(amplab.__file__).parent / "amp"
PAGES = ("README.md", "MIGRATION.md")


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_examples_run_in_their_order(name):
    torch.manual_seed(0)
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", read(name), flags=re.DOTALL):
        exec(compile(block, name, "exec"), scope)
    assert "loss" in scope


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)\)", read(name))
    assert links
    assert all((FOLDER / link).exists() for link in links)


def test_the_table_of_differences_names_every_argument_that_apex_lacks():
    parameters = list(inspect.signature(amp.initialize).parameters)
    assert len(parameters) > 14
    assert [name for name in parameters[14:] if f"`{name}`" not in read("README.md")] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_name_of_amp_exists(name):
    named = set(re.findall(r"\bamp\.([a-zA-Z]\w+)", re.sub(r"(torch|apex|amplab|torch_npu)\.amp\b\S*", "", read(name))))
    assert named
    assert [each for each in named if each not in amp.__all__] == []
