"""amplab in the place of ``apex``: a finder that resolves ``apex`` and ``apex.*`` to amplab's own module objects.

    apex                  ->  amplab
    apex.amp              ->  amplab.amp
    apex.parallel.LARC    ->  amplab.parallel.LARC

One object under two names, so there is one session, and `isinstance` holds whichever name a class was imported by. (A
second entry in ``sys.modules`` for the package alone would load every module under it twice.) What amplab has under
another name, or not at all, is in ``apex_names.py``: importing it works, or is refused with what to use.
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
# What scripts that look for an installed apex are told; amp was 0.1 all its life.
METADATA = "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\nSummary: amplab in the place of apex\n"


def as_apex() -> "ApexAlias":
    """Let ``import apex`` and ``from apex import amp`` give amplab from here on, in this process.

    Returns:
        What takes it back: ``undo()``, or the end of a ``with`` block.

    Raises:
        RuntimeError: another package is imported under the name apex already.

    >>> with as_apex():
    ...     from apex import amp
    >>> amp.__name__
    'amplab.amp'
    """
    return ApexAlias()


class ApexAlias:
    """One standing request that ``apex`` be amplab; it holds until `undo`, whether or not it is kept.

    Raises:
        RuntimeError: another package is imported under the name apex already.
    """

    def __init__(self) -> None:
        present = sys.modules.get(APEX)
        if present is not None and present is not sys.modules.get(AMPLAB):
            raise RuntimeError(
                f"apex is imported already, from {getattr(present, '__file__', None) or 'elsewhere'}: expected to "
                "come before the first `import apex`; call amplab.as_apex() at the top of the program."
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
        """Take it back: ``import apex`` finds what is installed, if anything. Repeating it does nothing."""
        for finder in (self._finder, self._last):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        if not any(isinstance(finder, _ApexFinder) for finder in sys.meta_path):
            for name in [name for name in sys.modules if _is_apex(name)]:
                del sys.modules[name]
            for name in HOMES:
                _forget(_own_name(name))


class _ApexFinder(DistributionFinder):
    """Finds ``apex`` and what is below it, and a distribution of that name for those who look for one."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module of amplab; None where amplab has none of that name."""
        own = _home(name)
        if own is None:
            return None
        found = importlib.util.find_spec(own)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, _Loader(own), origin=found.origin, is_package=is_package)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield a distribution called apex to who asks for it by name."""
        if context is not None and context.name == APEX:
            yield _ApexDistribution()


class _Refusing:
    """Comes last: refuses what is of apex and nobody has found. Those who only ask whether it exists are told no."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError in an ``import`` of what is of apex; return None."""
        said = refusal(name) if _is_being_imported() else None
        if said is not None:
            # Under apex's name: `from package import name` would pass over an error in the name that it looked for.
            raise ModuleNotFoundError(said, name=said.partition(":")[0])
        return None


class _Loader(Loader):
    """Gives the module of amplab itself, and leaves it as it was."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put apex's spec on it; what it is stays what it was imported as first.
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
    """The module of amplab that ``name`` stands for; ``from apex.amp import handle`` asks for ``amplab.amp.handle``."""
    if _is_apex(name):
        return HOMES.get(name, _own_name(name))
    return HOMES.get(name.replace(AMPLAB, APEX, 1)) if name.startswith(f"{AMPLAB}.") else None


def _forget(name: str) -> None:
    """Take back a second name that a module of amplab has had."""
    sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent]).pop(child, None)


def _is_being_imported() -> bool:
    """Whether the finder that asks was called by an import, and not by ``importlib.util.find_spec``."""
    asked = sys._getframe(3)  # this function, find_spec of the finder, that of the import system, who called it
    return asked.f_globals.get("__name__") == "importlib._bootstrap"
