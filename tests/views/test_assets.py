"""The front end's files: joined within their limit, complete, and asking for nothing from elsewhere."""

import re
from pathlib import Path

import pytest

from amplab.views import assets
from amplab.views.assets import joined, stylesheet
from amplab.views.parts import Controls, LiveView, Notices, Panels

FOLDER = Path(assets.__file__).parent
LARGEST = 20_000  # bytes of a module on the wire
MODULES = {part.__name__: part._esm for part in (Controls, LiveView, Notices, Panels)}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_small_and_self_contained(name: str) -> None:
    module = str(MODULES[name])
    assert len(module.encode()) < LARGEST
    assert module.rstrip().endswith("export default { render };")
    assert not re.search(r"^\s*import\b|\bimport\(|\bfetch\(|XMLHttpRequest|<script", module, re.MULTILINE)
    assert set(re.findall(r"https?://([^/\"']+)", module)) <= {"www.w3.org"}


@pytest.mark.parametrize("name", MODULES)
def test_no_name_is_declared_twice(name: str) -> None:
    declared = re.findall(r"^(?:const|let|function|class) (\w+)", str(MODULES[name]), re.MULTILINE)
    assert len(declared) == len(set(declared))


def test_comments_stay_in_the_files_and_code_stays_whole() -> None:
    source = (FOLDER / "numbers.js").read_text(encoding="utf-8")
    sent = joined("numbers.js")
    assert "//" in source
    assert "//" not in sent
    code = [line for line in source.splitlines() if line and not line.startswith(("//", "/**"))]
    assert [line for line in sent.splitlines() if line] == code


def test_the_style_sheet_fetches_nothing_and_touches_only_its_own() -> None:
    css = re.sub(r"/\*.*?\*/", "", stylesheet(), flags=re.DOTALL)
    assert "url(" not in css
    assert "@import" not in css
    selectors = [part.strip() for rule in re.findall(r"([^{}]+)\{", css) for part in re.split(r",(?![^()]*\))", rule)]
    strays = [text for text in selectors if ".amp" not in text and not text.startswith(("@container", "@media"))]
    assert [text for text in strays if text] == []


def test_every_file_is_used() -> None:
    used = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    assert [path.name for path in FOLDER.iterdir() if path.suffix in {".js", ".css"} and path.name not in used] == []


def test_a_missing_file_says_its_name() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.js"):
        joined("nothing.js")
