"""The lessons: where the shipped ones are, and the working copies that a person opens and changes.

JupyterLab saves a notebook by itself, so a lesson that was opened in place would change the checkout or the
installation. A working copy is written once and never overwritten: to renew it, the old copy gets another name.

A copy that still equals its shipped lesson is signed when the server starts (:mod:`amplab.launch.trust`).
"""

import filecmp
import os
import shutil
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from amplab.lessons.locked_folder import locked

__all__ = [
    "LaunchError",
    "WorkingCopies",
    "choose_lesson",
    "copy_lessons",
    "find_lessons",
    "lesson_names",
    "lessons_directory",
    "progress_file",
    "unchanged_lessons",
]

LESSON = "[0-9][0-9]_*.ipynb"
LANGUAGES = ("zh",)
"""Folders of lessons in other languages, below the lessons."""
SHIPPED = "share/amplab/lessons"
"""Where a wheel puts the lessons, below the environment's folder; pyproject.toml says the same."""


class LaunchError(Exception):
    """JupyterLab cannot be opened with these arguments; the message says what to do."""


@dataclass(frozen=True)
class WorkingCopies:
    """The lessons that a person works in.

    Attributes:
        folder: Where they are.
        written: Names of the copies that were written now.
        moved: Old name and new name of the copies that were renewed.
    """

    folder: Path
    written: tuple[str, ...]
    moved: tuple[tuple[str, str], ...]


def find_lessons(checkout: Path | None = None) -> Path:
    """Return the folder of the shipped lessons: `notebooks` of the checkout, else what the wheel has installed.

    Args:
        checkout: folder that holds ``notebooks``; None for the one with this package.

    Raises:
        LaunchError: there are none.
    """
    beside = checkout or Path(__file__).resolve().parents[2]
    places = [beside / "notebooks", beside / SHIPPED, *_installed()]  # the second: `pip install --target`
    for place in places:
        if any(place.glob(LESSON)):
            return place
    raise LaunchError(
        f"found no lessons in {' or '.join(map(str, places))}: the installation is incomplete. Install amplab again: "
        "`python -m pip install --force-reinstall --no-deps amplab`."
    )


def _installed() -> list[Path]:
    """Return the folder that an installed wheel has put the lessons in, as its own record says."""
    try:
        files = distribution("amplab").files or []
    except PackageNotFoundError:
        return []
    lessons = [file for file in files if file.match(f"{SHIPPED}/{LESSON}")]
    return [Path(str(lessons[0].locate())).resolve().parent] if lessons else []


def choose_lesson(folder: Path, name: str = "00") -> Path:
    """Return the one lesson in `folder` that `name` means.

    Args:
        folder: folder of the lessons.
        name: a number ("3", "03"), the start of a name ("03_loss", "opt_levels", a whole name), or a part of it of at
            least three letters ("clinic"). A lesson in Chinese is "zh/03".

    Raises:
        LaunchError: no name or several names fit; the message lists the lessons.
    """
    known = [name.removesuffix(".ipynb") for name in lesson_names(folder)]
    chosen = _chosen(known, name.removesuffix(".ipynb").replace("-", "_"))
    if len(chosen) == 1:
        return folder / f"{chosen[0]}.ipynb"
    problem = "no lesson has this number or name" if not chosen else f"{len(chosen)} lessons have names that fit"
    raise LaunchError(f"lesson {name!r}: {problem}; the lessons are {', '.join(known)}.")


def _chosen(known: list[str], name: str) -> list[str]:
    """Return the lessons that `name` means, by the first reading that finds one."""
    readings = (
        [each for each in known if name.isdigit() and each.startswith(f"{name.lstrip('0'):0>2}_")],
        [each for each in known if name and each.startswith(name)],
        [each for each in known if len(name) >= 3 and "/" not in each and name in each],
    )
    return next(filter(None, readings), [])


def lessons_directory() -> Path:
    """Return the folder of the working copies: $AMPLAB_LESSONS, else ~/amplab-lessons.

    Raises:
        LaunchError: the variable names the home folder of a user that does not exist; HOME is a relative path.
    """
    named = os.environ.get("AMPLAB_LESSONS") or "~/amplab-lessons"
    try:
        folder = Path(named).expanduser()
        if named.startswith("~") and not folder.is_absolute():
            raise LaunchError(
                f"HOME={os.environ.get('HOME')}: expected an absolute path; or set AMPLAB_LESSONS to a folder."
            )
        return folder.absolute()
    except RuntimeError:
        raise LaunchError(f"AMPLAB_LESSONS={named}: no such home; expected a folder, such as ~/lessons.") from None


def progress_file(folder: Path) -> Path:
    """Return the file of the progress through the exercises, beside the working copies."""
    return folder / "progress.json"


def copy_lessons(shipped: Path, folder: Path, *, renew: bool = False) -> WorkingCopies:
    """Write a copy of every lesson that `folder` does not have; no existing file is overwritten.

    Args:
        shipped: folder of the shipped lessons.
        folder: folder of the copies; created.
        renew: give each copy that differs from the shipped lesson another name, and write a new copy.

    Raises:
        LaunchError: a copy cannot be written, or `folder` is the folder of the shipped lessons.
    """
    written, moved = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.samefile(shipped):
            raise LaunchError(
                f"{folder}: these are the shipped lessons; expected another folder for the working copies."
            )
        with locked(folder):  # another `amplab lab` could take a free name at the same time
            for name in lesson_names(shipped):
                lesson, copy = shipped / name, folder / name
                copy.parent.mkdir(exist_ok=True)
                if renew and copy.exists() and not _equal(lesson, copy):
                    moved.append((name, _write_new(lesson, copy, aside=_free_name(copy)).name))
                    written.append(name)
                elif not os.path.lexists(copy):  # a link stays, also one whose target is not there now
                    _write_new(lesson, copy)
                    written.append(name)
    except OSError as error:
        raise LaunchError(
            f"cannot write the working copies of the lessons to {folder} ({error.strerror or error}): set the "
            "environment variable AMPLAB_LESSONS to a writable folder."
        ) from error
    return WorkingCopies(folder, tuple(written), tuple(moved))


def lesson_names(shipped: Path) -> list[str]:
    """Return the file names of the lessons, those in other languages last, each with its folder."""
    translated = [f"{language}/{path.name}" for language in LANGUAGES for path in (shipped / language).glob(LESSON)]
    return sorted(lesson.name for lesson in shipped.glob(LESSON)) + sorted(translated)


def unchanged_lessons(shipped: Path, folder: Path) -> list[Path]:
    """Return the working copies that equal their shipped lesson."""
    return [folder / name for name in lesson_names(shipped) if _equal(shipped / name, folder / name)]


def _equal(lesson: Path, copy: Path) -> bool:
    return copy.is_file() and filecmp.cmp(lesson, copy, shallow=False)


def _write_new(lesson: Path, copy: Path, aside: Path | None = None) -> Path:
    """Copy the content whole or not at all, and never another file's permissions: an installation may be read-only.

    Args:
        lesson, copy: from where, and to where.
        aside: the name that the present copy gets, once the new one is on the disk.

    Returns:
        `aside`, or `copy` without it.
    """
    partial = copy.with_name(f".{copy.name}.partial")
    partial.unlink(missing_ok=True)  # of a process that was killed; this one has the lock of the folder
    try:
        with lesson.open("rb") as source, partial.open("xb") as target:  # never through a link that another has put
            shutil.copyfileobj(source, target)
        if aside is not None:
            copy.rename(aside)
        _rename_if_free(partial, copy)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return aside or copy


def _rename_if_free(partial: Path, copy: Path) -> None:
    """Give a new file its name, unless the page has saved a lesson under it a moment ago, which stays."""
    try:
        copy.hardlink_to(partial)
    except FileExistsError:
        pass
    except OSError:  # a drive without hard links
        partial.rename(copy)
        return
    partial.unlink()


def _free_name(copy: Path) -> Path:
    """Return a free name for an old copy, with the time of its last change."""
    changed = time.strftime("%Y-%m-%d-%H%M", time.localtime(copy.stat().st_mtime))
    candidate, number = copy.with_stem(f"{copy.stem}-of-{changed}"), 1
    while os.path.lexists(candidate):
        number += 1
        candidate = copy.with_stem(f"{copy.stem}-of-{changed}-{number}")
    return candidate
