"""Compile the kernels, in a process of its own: ``python -m amplab.kernels.compilation <key>``.

A process, because `torch.utils.cpp_extension.load_inline` wants ninja on PATH, prints, remembers failures and waits
for ever on the lock of a builder that was killed: none of that may reach the process that trains. It goes on when
that one ends, so a short script still leaves the kernels to the next. What it prints is the log of the build.

`load_inline` joins its sources into one, for one compiler on one core. So it is called once for each part of the
recipe, all at the same time: two libraries on two cores.
"""

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.utils.cpp_extension import load_inline

from amplab.kernels.cache import building, find, publish, writable_folder
from amplab.kernels.recipe import LIBRARY, Recipe, casts_recipe, current_recipe, search_path

__all__ = ["compile_libraries", "main"]

_SCRATCH = "scratch-"


def main(arguments: list[str]) -> int:
    """Build for the key given and keep the result; 0 when the library is there."""
    recipes = {recipe.key: recipe for recipe in (current_recipe(), casts_recipe())}
    if len(arguments) != 1 or arguments[0] not in recipes:
        raise SystemExit(f"asked for {arguments}, but this machine and these sources make {[*recipes]}: start again.")
    recipe = recipes[arguments[0]]
    folder = writable_folder(recipe.key)
    if folder is None:
        raise SystemExit("no folder to keep the kernels in: set XDG_CACHE_HOME to one that can be written.")
    with building(folder):
        if not find(recipe.key):
            compile_libraries(recipe, folder)
    return 0


def compile_libraries(recipe: Recipe, folder: Path) -> None:
    """Compile into a fresh folder beside the libraries' place, then move them there.

    A fresh folder has no lock that a killed process left, and no other process writes in it.
    """
    for stale in folder.glob(_SCRATCH + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
    finished = scratch / "finished"
    os.environ["PATH"] = search_path()
    try:
        finished.mkdir()
        with ThreadPoolExecutor(len(recipe.parts)) as compilers:
            for library in compilers.map(partial(_compile, recipe, scratch), range(len(recipe.parts))):
                library.rename(finished / library.name)
        publish(finished, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(recipe: Recipe, scratch: Path, part: int) -> Path:
    """Compile one part of the recipe into a library."""
    name = f"{LIBRARY}_{part}"
    place = scratch / name
    place.mkdir()
    sources = recipe.parts[part]
    load_inline(
        name,
        cpp_sources=[path.read_text() for path in sources if path.suffix == ".cpp"],
        cuda_sources=[path.read_text() for path in sources if path.suffix == ".cu"],
        extra_cflags=list(recipe.cflags),
        extra_cuda_cflags=list(recipe.cuda_cflags),
        extra_ldflags=list(recipe.ldflags),
        extra_include_paths=[str(Path(__file__).parent)],
        build_directory=str(place),
        is_python_module=False,
        no_implicit_headers=True,
    )
    return next(place.glob(name + ".*[sp][oy]*"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
