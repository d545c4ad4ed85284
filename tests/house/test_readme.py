"""README and CONTRIBUTING are correct: the example prints its number, commands match CI, links have targets."""

import re
import subprocess
import sys

import pytest
from source_tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LONGEST = 150


def blocks(language: str, text: str = README) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def local_links(text: str = README) -> list[str]:
    """Return the targets of the links within the repository."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def last_command(script: str) -> str:
    """Return the last command of a shell script."""
    return [line for line in script.splitlines() if line.strip() and not line.startswith("#")][-1]


def test_is_short() -> None:
    length = len(README.splitlines())
    assert length <= LONGEST


def test_example_prints_its_number() -> None:
    (example,), (printed,) = blocks("python"), blocks("text")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1:] == printed.splitlines()


def test_there_are_two_commands_and_ci_runs_the_second() -> None:
    install_lab, install_test = (block.strip() for block in blocks("bash"))
    assert install_lab == "python -m pip install -c constraints.txt -e '.[lab]' && amplab lab"
    assert last_command((ROOT / ".ci" / "run").read_text(encoding="utf-8")) == install_test


@pytest.mark.parametrize("link", [*local_links(), *local_links(GUIDE)])
def test_each_link_has_a_target(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_reference_is_cited() -> None:
    body, references = README.split("## References")
    numbered = re.findall(r"^(\d+)\. ", references, flags=re.MULTILINE)
    cited = {number for group in re.findall(r"\[([\d, ]+)\](?!\()", body) for number in group.split(", ")}
    assert cited == set(numbered)


def test_the_picture_of_a_step_has_at_most_ten_boxes() -> None:
    (picture,) = blocks("text", GUIDE)
    boxes = [int(number) for number in re.findall(r"^ *(\d+)  ", picture, flags=re.MULTILINE)]
    assert boxes == list(range(1, len(boxes) + 1))
    assert len(boxes) <= 10


def test_readers_of_the_text_find_what_they_look_for() -> None:
    text = "```python\nprint(1)\n```\n[a](b/c.md) [d](https://arxiv.org/abs/1)\n```bash\ntrue\n```\n"
    assert blocks("python", text) == ["print(1)\n"]
    assert local_links(text) == ["b/c.md"]
    assert last_command("#!/bin/sh\nset -e\n\npytest\n# end\n") == "pytest"
