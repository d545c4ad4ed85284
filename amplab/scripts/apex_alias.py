"""amplab in place of ``apex``: a finder that resolves ``apex``, ``apex.*`` and its compiled modules to amplab's own.

    apex                  ->  amplab
    apex.amp              ->  amplab.amp
    apex.parallel.LARC    ->  amplab.parallel.LARC
    amp_C                 ->  amplab.multi_tensor_apply.amp_c

A module is one object under two names. So there is one session, and `isinstance` holds for both names of a class. (A
second entry in ``sys.modules`` for the package alone would load every module under it twice.) ``apex_names.py`` lists
the names that amplab has elsewhere or not at all: importing them works, or raises an error that says what to use.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType, TracebackType

from amplab.scripts.apex_names import HOMES, refusal

__all__ = ["ApexAlias", "as_apex"]

APEX, AMPLAB = "apex", "amplab"
# For scripts that look for an installed apex; all its releases were 0.1.
METADATA = "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\nSummary: amplab in place of apex\n"


def as_apex() -> "ApexAlias":
    """Make ``import apex`` and ``from apex import amp`` import amplab from now on, in this process.

    Returns:
        An object whose ``undo()`` ends this, as does the end of a ``with`` block.

    Raises:
        RuntimeError: another package is already imported under the name apex.

    >>> with as_apex():
    ...     from apex import amp
    >>> amp.__name__
    'amplab.amp'
    """
    return ApexAlias()


class ApexAlias:
    """Makes ``apex`` mean amplab until `undo`, even if nobody keeps this object.

    Raises:
        RuntimeError: another package is already imported under the name apex.
    """

    def __init__(self) -> None:
        present = sys.modules.get(APEX)
        if present is not None and present is not sys.modules.get(AMPLAB):
            raise RuntimeError(
                f"apex is already imported, from {getattr(present, '__file__', None) or 'elsewhere'}: expected this "
                "call before the first `import apex`; call amplab.as_apex() at the top of the program."
            )
        self._finder, self._last = _ApexFinder(), _Refusing()
        sys.meta_path.insert(0, self._finder)
        sys.meta_path.append(self._last)

    def __enter__(self) -> "ApexAlias":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Make ``import apex`` find the installed package again, if there is one. A second call does nothing."""
        for finder in (self._finder, self._last):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        if not any(isinstance(finder, _ApexFinder) for finder in sys.meta_path):
            for name in filter(_is_apex, list(sys.modules)):  # other threads import meanwhile
                sys.modules.pop(name, None)
            for name in HOMES:
                _forget(_own_name(name) if _is_apex(name) else name)


class _ApexFinder(DistributionFinder):
    """Finds ``apex``, its submodules, and a distribution of that name."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module of amplab; None if amplab has no such module."""
        own = _home(name)
        if own is None:
            return None
        found = importlib.util.find_spec(own)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, _Loader(own), origin=found.origin, is_package=is_package)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield a distribution called apex if it is searched by name."""
        if context is not None and context.name == APEX:
            yield _ApexDistribution()


class _Refusing:
    """The last finder: refuses to import modules of apex that no other finder has found.

    A query whether the module exists (``importlib.util.find_spec``) gets the answer no instead.
    """

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for an ``import`` of a module of apex, else return None."""
        message = refusal(name) if _is_being_imported() else None
        if message is not None:
            # With apex's name: `from package import name` ignores this error if it has the name that it looks for.
            raise ModuleNotFoundError(message, name=message.partition(":")[0])
        return None


class _Loader(Loader):
    """Returns the module of amplab itself, unchanged."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has set apex's spec on the module; this restores its own.
        module.__spec__ = self._spec


class _ApexDistribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        return METADATA if filename == "METADATA" else None

    def locate_file(self, path: str) -> Path:  # type: ignore[override]
        return Path(__file__).resolve().parents[2] / path


def _is_apex(name: str) -> bool:
    return name == APEX or name.startswith(f"{APEX}.")


def _own_name(name: str) -> str:
    return AMPLAB + name.removeprefix(APEX)


def _home(name: str) -> str | None:
    """Return the module of amplab for ``name``; ``from apex.amp import handle`` looks for ``amplab.amp.handle``."""
    if _is_apex(name):
        return HOMES.get(name, _own_name(name))
    return HOMES.get(name.replace(AMPLAB, APEX, 1) if name.startswith(f"{AMPLAB}.") else name)


def _forget(name: str) -> None:
    """Remove the second name of a module of amplab."""
    sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent]).pop(child, None)


def _is_being_imported() -> bool:
    """Return whether the calling finder was called by an import, and not by ``importlib.util.find_spec``."""
    caller = sys._getframe(3)  # after this function, find_spec of the finder, and find_spec of the import system
    return caller.f_globals.get("__name__") == "importlib._bootstrap"
