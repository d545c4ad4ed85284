"""The JavaScript and the CSS of the widgets, read from the files in `web`.

A widget's front end is one ES module sent as text, which cannot import local files. `module` therefore joins a file
and everything that it imports, in dependency order, without the `import` and `export` keywords. Each file is a real
module, so that Node can import it as it is. Only these forms are allowed, each at the start of a line:

    import { name, other } from "./file.js";
    export function name(…)    export class Name    export const name
    export default { render };          (the last line of a file that `module` is called with)
"""

from __future__ import annotations

import re
from pathlib import Path

from amplab.display.palette import palette_css

__all__ = ["WEB", "module", "stylesheet"]

WEB = Path(__file__).parent / "web"
# Comments on lines of their own: `//` within a line may be part of a string.
_COMMENT = re.compile(r"^[ \t]*(?://.*|/\*\*(?:(?!\*/)[\s\S])*\*/[ \t]*)\n", re.MULTILINE)
_IMPORT = re.compile(r"^import \{\s*\w+(?:,\s*\w+)*,?\s*\} from \"\./([\w.]+)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:function|class|const) )", re.MULTILINE)
_ENTRY = "export default { render };"
_DECLARED = re.compile(r"^(?:function|class|const|let|var) (\w+)", re.MULTILINE)
_LEFT = re.compile(r"^\s*(?:import|export)\b.*|\bimport\(.*", re.MULTILINE)


def module(entry: str) -> str:
    """Return the file `entry` and all that it imports as one ES module, without comments on lines of their own.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file imports or exports in another form, two files declare the same name at the top level, the
            imports form a cycle, or `entry` does not end with ``export default { render };``.
    """
    parts = _with_imports(entry, done={}, path=())
    code = "\n".join(parts.values())
    if not code.endswith(_ENTRY):
        raise ValueError(f"{entry}: expected the last line {_ENTRY!r}.")
    _refuse_duplicates(parts)
    return code + "\n"


def stylesheet(*names: str) -> str:
    """Return the palette and the CSS files `names` as one style sheet."""
    return palette_css() + "".join((WEB / name).read_text(encoding="utf-8") for name in names)


def _with_imports(name: str, *, done: dict[str, str], path: tuple[str, ...]) -> dict[str, str]:
    """Add the code of a file to `done`, after the code of the files that it imports."""
    if name in path:
        raise ValueError(f"{' -> '.join((*path, name))}: the imports form a cycle.")
    source = _COMMENT.sub("", (WEB / name).read_text(encoding="utf-8"))
    for needed in _IMPORT.findall(source):
        if needed not in done:
            _with_imports(needed, done=done, path=(*path, name))
    code = _EXPORT.sub("", _IMPORT.sub("", source)).strip()
    left = _LEFT.findall(code.removesuffix(_ENTRY) if not path else code)
    if left:
        raise ValueError(f"{name}: {left[0]!r} is not a form that can be joined; see the docstring of assets.py.")
    done[name] = code
    return done


def _refuse_duplicates(parts: dict[str, str]) -> None:
    """Joined files share one scope."""
    owner: dict[str, str] = {}
    for file, code in parts.items():
        for name in _DECLARED.findall(code):
            if owner.setdefault(name, file) != file:
                raise ValueError(f"{name} is declared in {owner[name]} and in {file}; rename one of them.")
