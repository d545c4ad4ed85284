"""The front end's files: joined into small modules, complete, and fetching nothing from elsewhere."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from amplab.views import BitExplorer, assets
from amplab.views.assets import WEB, module, stylesheet
from amplab.views.parts import Controls, LiveView, Notices, Panels
from amplab.views.tabs import TABS

LARGEST = 160_000  # bytes of a module, which is sent once for each widget
MODULES = {part.__name__: str(part._esm) for part in (BitExplorer, Controls, LiveView, Notices, Panels)}
TESTS = sorted((Path(__file__).parents[1] / "js").glob("*.test.mjs"))
ENTRY = "export default { render };\n"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_small_and_self_contained(name: str) -> None:
    code = MODULES[name]
    assert len(code.encode()) < LARGEST
    assert code.endswith(ENTRY)
    assert code.count("export ") == 1
    assert not re.search(r"^\s*import\b|\bimport\(|\bfetch\(|XMLHttpRequest|<script", code, re.MULTILINE)
    assert set(re.findall(r"https?://([^/\"']+)", code)) <= {"www.w3.org"}


@pytest.mark.parametrize("name", MODULES)
def test_no_name_is_declared_twice(name: str) -> None:
    declared = re.findall(r"^(?:const|let|function|class) (\w+)", MODULES[name], re.MULTILINE)
    assert len(declared) == len(set(declared))


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the front end's."""
    monkeypatch.setattr(assets, "WEB", tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.js").write_text(text)


def test_imports_come_first_and_once(web: Path) -> None:
    write(
        web,
        base="export const base = 1;\n",
        left='import { base } from "./base.js";\n\nexport function left() { return base; }\n',
        right='import {\n  base,\n} from "./base.js";\nexport class right {}\n',
        view=f'import {{ left }} from "./left.js";\nimport {{ right }} from "./right.js";\nleft(right);\n{ENTRY}',
    )
    names = re.findall(r"^(?:const|function|class) (\w+)", module("view.js"), re.MULTILINE)
    assert names == ["base", "left", "right"]
    assert "import" not in module("view.js")


def test_comments_stay_in_the_files_and_code_stays_whole(web: Path) -> None:
    code = 'const link = "http://localhost"; // kept\n'
    write(web, view=f"// gone\n/** gone */\n/**\n * gone\n */\n{code}  // gone\n{ENTRY}")
    assert module("view.js") == code + ENTRY


@pytest.mark.parametrize(
    "line",
    [
        'import all from "./base.js";',
        'import * as all from "./base.js";',
        'import { base as other } from "./base.js";',
        'import { base } from "elsewhere";',
        'import "./base.js";',
        "const later = () => import('./base.js');",
        "export let base = 1;",
        "export { render };",
        "export default function () {}",
    ],
)
def test_other_forms_are_refused(web: Path, line: str) -> None:
    write(web, base="export const base = 1;\n", view=f"{line}\n{ENTRY}")
    with pytest.raises(ValueError, match=re.escape("view.js: ")):
        module("view.js")


def test_an_entry_without_its_last_line_is_refused(web: Path) -> None:
    write(web, view="const render = 1;\n")
    with pytest.raises(ValueError, match=r"view\.js"):
        module("view.js")


def test_an_entry_that_another_imports_is_refused(web: Path) -> None:
    write(web, other=f"export const other = 1;\n{ENTRY}", view=f'import {{ other }} from "./other.js";\n{ENTRY}')
    with pytest.raises(ValueError, match=r"other\.js"):
        module("view.js")


def test_two_files_with_one_name_are_refused(web: Path) -> None:
    write(
        web,
        base="export const base = 1;\nconst same = 2;\n",
        view=f'import {{ base }} from "./base.js";\nfunction same() {{}}\n{ENTRY}',
    )
    with pytest.raises(ValueError, match=r"same .*base\.js.*view\.js"):
        module("view.js")


def test_a_cycle_is_refused(web: Path) -> None:
    write(web, base='import { view } from "./view.js";\n', view=f'import {{ base }} from "./base.js";\n{ENTRY}')
    with pytest.raises(ValueError, match=re.escape("view.js -> base.js -> view.js")):
        module("view.js")


def test_a_missing_file_says_its_name() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.js"):
        module("nothing.js")


@pytest.mark.parametrize("name", sorted(path.name for path in WEB.glob("*.css")))
def test_a_style_sheet_fetches_nothing_and_touches_only_its_own(name: str) -> None:
    css = re.sub(r"/\*.*?\*/", "", stylesheet(name), flags=re.DOTALL)
    assert "url(" not in css
    assert "@import" not in css
    selectors = [part.strip() for rule in re.findall(r"([^{}]+)\{", css) for part in re.split(r",(?![^()]*\))", rule)]
    strays = [text for text in selectors if ".amp" not in text and not text.startswith(("@container", "@media"))]
    assert [text for text in strays if text] == []


def test_every_file_is_used() -> None:
    package = WEB.parent
    used = "".join(path.read_text(encoding="utf-8") for path in [*package.glob("*.py"), *WEB.glob("*.js")])
    files = [path.name for path in WEB.iterdir() if path.suffix in {".js", ".css"}]
    files = [name for name in files if not (name.startswith("tab_") and name.endswith(".css"))]  # `Panels` takes all
    assert [name for name in files if f'{name}"' not in used] == []


def test_every_tab_has_its_panel_and_no_panel_is_without_a_tab() -> None:
    listed = re.search(r"const PANELS = \{(.*?)\};", (WEB / "panels.js").read_text(encoding="utf-8"), re.DOTALL)
    assert listed is not None
    assert re.findall(r"(\w+):", listed[1]) == [tab.name for tab in TABS]
    for tab in TABS:
        assert (WEB / f"tab_{tab.name}.js").is_file(), tab.label


def test_the_front_end_passes_its_own_tests() -> None:
    node = shutil.which("node")
    if node is None:
        missing = "found no Node to run tests/js with; install nodejs."
        pytest.fail(missing) if os.environ.get("CI", "").lower() == "true" else pytest.skip(missing)
    assert TESTS
    result = subprocess.run([node, "--test", *map(str, TESTS)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
