"""Which files and classes are a program's own: those that are neither Python's, nor amplab's, nor installed."""

import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import amplab

__all__ = ["is_installed", "is_of_own_class", "is_own_file"]

_LIBRARIES = (f"{sysconfig.get_paths()['stdlib']}/", f"{Path(str(amplab.__file__)).parent}/")
_INSTALLED = ("site-packages", "dist-packages")


def is_of_own_class(value: Any) -> bool:
    """Whether the class of an object is in a file of one's own. Sync: none."""
    return is_own_file(sys.modules.get(type(value).__module__))


def is_own_file(module: ModuleType | None) -> bool:
    """Whether a module is a file or a folder that is not installed, or the program itself. Sync: none."""
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return bool(file and not is_installed(file)) or module is sys.modules.get("__main__")


def is_installed(file: str) -> bool:
    """Whether a file is one of Python, of amplab or of an installed package. Sync: none."""
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)
