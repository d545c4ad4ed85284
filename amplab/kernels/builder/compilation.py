"""Compile the kernels in a separate process, which ``library.py`` starts.

`torch.utils.cpp_extension.load_inline` needs ninja on PATH, prints, remembers failures, and waits forever for the lock
of a builder that was killed. In a separate process none of this affects the process that trains. The builder continues
when that process ends, so the next process has the kernels even if this one is short. What the builder prints is the
log of the build.

`load_inline` joins its sources into one file for one compiler on one core. It is therefore called once for each part
of the recipe, at the same time: two libraries on two cores.
"""

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.utils.cpp_extension import load_inline

from amplab.kernels.builder.cache import BUILT, building, find, no_folder, publish, writable_folder
from amplab.kernels.builder.recipe import LIBRARY, SOURCES, Recipe, casts_recipe, current_recipe, search_path

__all__ = ["compile_key", "compile_libraries"]

_SCRATCH = "scratch-"


def compile_key(key: str) -> None:
    """Build the libraries of ``key`` and keep them; return at once if they are there.

    Raises:
        SystemExit: the sources or the machine have another key, or there is no folder to keep libraries in.
    """
    torch.set_num_threads(1)
    os.umask(0o077)  # no other user may change what will be loaded
    recipes = {recipe.key: recipe for recipe in (current_recipe(), casts_recipe())}
    if key not in recipes:
        raise SystemExit(
            f"error: the key is {key}, but these sources and this machine give {[*recipes]}: start the process again."
        )
    folder = writable_folder(key)
    if folder is None:
        raise SystemExit(f"error: {no_folder(key)}")
    with building(folder):
        if not find(key):
            shutil.rmtree(folder / BUILT, ignore_errors=True)  # libraries that cannot be trusted, if any
            compile_libraries(recipes[key], folder)


def compile_libraries(recipe: Recipe, folder: Path) -> None:
    """Compile into a fresh folder next to the libraries' place, then move the libraries there.

    A fresh folder holds no lock of a killed process, and no other process writes to it.
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
        extra_include_paths=[str(SOURCES), str(SOURCES / "include")],
        build_directory=str(place),
        is_python_module=False,
        no_implicit_headers=True,
    )
    return next(place.glob(name + ".*[sp][oy]*"))
