"""The lessons: chosen by name, copied once, never overwritten, and signed only while they are as shipped."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import astuple
from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary
from source_tree import PACKAGE, ROOT

from amplab.launch import (
    LaunchError,
    choose_lesson,
    copy_lessons,
    find_lessons,
    lesson_rows,
    lesson_table,
    lessons_directory,
)
from amplab.launch.lessons import lesson_names, unchanged_lessons
from amplab.launch.trust import sign_lessons

try:
    import resource
except ImportError:  # Windows
    resource = None

NAMES = ("00_the_lab", "03_loss_scale", "10_formats", "11_kernels")


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """Lessons as an installation has them."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    for name in NAMES:
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(name)]), folder / f"{name}.ipynb")
    (folder / "scratch.ipynb").write_text("{}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the copies go."""
    return tmp_path / "mine"


def test_the_lessons_of_the_checkout_are_found() -> None:
    assert find_lessons() == ROOT / "notebooks"


def test_missing_lessons_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amplab.launch.lessons._installed", list)
    with pytest.raises(LaunchError, match=r"found no lessons in .*notebooks .* --force-reinstall"):
        find_lessons(tmp_path)


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        *(("00", "00_the_lab"), ("03", "03_loss_scale"), ("10_f", "10_formats"), ("3", "03_loss_scale")),
        *(("loss", "03_loss_scale"), ("loss-scale", "03_loss_scale"), ("10_formats.ipynb", "10_formats")),
    ],
)
def test_a_lesson_is_chosen_by_its_first_letters(shipped: Path, prefix: str, name: str) -> None:
    assert choose_lesson(shipped, prefix).stem == name


@pytest.mark.parametrize(
    ("prefix", "problem"), [("07", "no lesson"), ("1", "2 lessons"), ("", "no lesson"), ("s", "no lesson")]
)
def test_an_unclear_lesson_says_which_there_are(shipped: Path, prefix: str, problem: str) -> None:
    with pytest.raises(LaunchError, match=f"{prefix!r}: {problem}.* {', '.join(NAMES)}"):
        choose_lesson(shipped, prefix)


@pytest.fixture
def chinese(shipped: Path) -> Path:
    """Lessons of which one is translated, too."""
    (shipped / "zh").mkdir()
    shutil.copy(shipped / "03_loss_scale.ipynb", shipped / "zh")
    return shipped


def test_translated_lessons_are_copied_and_chosen_by_their_folder(chinese: Path, folder: Path) -> None:
    assert copy_lessons(chinese, folder).written[-1] == "zh/03_loss_scale.ipynb"
    assert choose_lesson(chinese, "zh/03") == chinese / "zh" / "03_loss_scale.ipynb"
    assert choose_lesson(chinese, "3") == choose_lesson(chinese, "loss") == chinese / "03_loss_scale.ipynb"
    (folder / "zh" / "03_loss_scale.ipynb").write_text("my work")
    assert unchanged_lessons(chinese, folder) == [folder / f"{name}.ipynb" for name in NAMES]
    ((old, new),) = copy_lessons(chinese, folder, renew=True).moved
    assert old == "zh/03_loss_scale.ipynb"
    assert (folder / "zh" / new).read_text() == "my work"


def test_the_list_has_titles_minutes_and_progress(chinese: Path) -> None:
    cells = [
        nbformat.v4.new_markdown_cell("# 3 Why scale the loss\n\nAfter this you can. 10–15\nminutes."),
        nbformat.v4.new_code_cell("check(...)", id="exercise-1"),
        nbformat.v4.new_markdown_cell("solution", id="exercise-2"),
        nbformat.v4.new_code_cell("check(...)", id="exercise-3"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), chinese / "03_loss_scale.ipynb")
    rows = {row.name: row for row in lesson_rows(chinese, {"03-1": "2026-01-01", "10-1": "2026-01-02"})}
    assert astuple(rows["03_loss_scale"]) == ("03_loss_scale", "Why scale the loss", "10–15", 2, 1)
    assert list(rows) == [*NAMES, "zh/03_loss_scale"]
    table = lesson_table([*rows.values()])
    assert re.search(r"^03  Why scale the loss  10–15 min +1 of 2 exercises$", table, re.MULTILINE)
    assert re.search(r"^zh/03  ", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("said", "minutes"), [("15 minutes", "15"), ("10 to 15 minutes", "10 to 15"), ("用时 10 到 15 分钟", "10 to 15")]
)
def test_the_minutes_are_read_in_both_languages(tmp_path: Path, said: str, minutes: str) -> None:
    cells = [nbformat.v4.new_markdown_cell(f"# 3 Why scale the loss\n\n{said}.")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "03_loss_scale.ipynb")
    (row,) = lesson_rows(tmp_path, {})
    assert row.minutes == minutes


def test_copies_are_written_once_and_never_overwritten(shipped: Path, folder: Path) -> None:
    assert copy_lessons(shipped, folder).written == tuple(f"{name}.ipynb" for name in NAMES)
    (folder / "00_the_lab.ipynb").write_text("my work")
    (folder / "03_loss_scale.ipynb").unlink()
    again = copy_lessons(shipped, folder)
    assert (again.written, again.moved) == (("03_loss_scale.ipynb",), ())
    assert (folder / "00_the_lab.ipynb").read_text() == "my work"


@pytest.mark.parametrize("renew", [False, True])
def test_a_link_whose_target_is_not_there_stays(shipped: Path, folder: Path, renew: bool) -> None:
    folder.mkdir()
    link, target = folder / "00_the_lab.ipynb", folder.parent / "drive" / "lab.ipynb"
    link.symlink_to(target)
    assert link.name not in copy_lessons(shipped, folder, renew=renew).written
    assert link.readlink() == target
    assert not target.exists()


def test_a_renewed_copy_takes_no_name_of_a_link(shipped: Path, folder: Path) -> None:
    copy_lessons(shipped, folder)
    (folder / "00_the_lab.ipynb").write_text("work")
    os.utime(folder / "00_the_lab.ipynb", (0, 0))
    day = time.strftime("%Y-%m-%d-%H%M", time.localtime(0))
    link = folder / f"00_the_lab-of-{day}.ipynb"
    link.symlink_to(folder / "absent")
    assert copy_lessons(shipped, folder, renew=True).moved == (("00_the_lab.ipynb", f"00_the_lab-of-{day}-2.ipynb"),)
    assert link.is_symlink()


def test_no_copy_is_written_through_a_link_that_someone_has_put_there(shipped: Path, folder: Path) -> None:
    folder.mkdir()
    thesis = folder.parent / "thesis.txt"
    thesis.write_text("my thesis")
    for name in (f".00_the_lab.ipynb.{os.getpid()}.partial", ".00_the_lab.ipynb.partial"):
        (folder / name).symlink_to(thesis)
    copy_lessons(shipped, folder)
    assert thesis.read_text() == "my thesis"
    assert (folder / "00_the_lab.ipynb").read_bytes() == (shipped / "00_the_lab.ipynb").read_bytes()
    assert not (folder / ".00_the_lab.ipynb.partial").is_symlink()


@pytest.mark.skipif(resource is None, reason="limits of POSIX")
def test_a_full_disk_renames_no_lesson_that_it_cannot_renew(shipped: Path, folder: Path) -> None:
    copy_lessons(shipped, folder)
    (folder / "00_the_lab.ipynb").write_text("work")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(LaunchError, match="cannot write the working copies"):
            copy_lessons(shipped, folder, renew=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(each.name for each in folder.iterdir()) == [f"{name}.ipynb" for name in NAMES]
    assert (folder / "00_the_lab.ipynb").read_text() == "work"


def test_a_renewed_copy_keeps_the_work_under_another_name(shipped: Path, folder: Path) -> None:
    copy_lessons(shipped, folder)
    for work in ("first", "second"):
        (folder / "00_the_lab.ipynb").write_text(work)
        os.utime(folder / "00_the_lab.ipynb", (0, 0))
        copies = copy_lessons(shipped, folder, renew=True)
        ((old, new),) = copies.moved  # the three others are as shipped
        assert (old, copies.written) == ("00_the_lab.ipynb", ("00_the_lab.ipynb",))
        assert (folder / new).read_text() == work
        assert (folder / old).read_bytes() == (shipped / old).read_bytes()
    assert len(list(folder.iterdir())) == len(NAMES) + 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_several_that_renew_at_once_lose_no_edited_lesson(tmp_path: Path) -> None:
    shipped, folder = find_lessons(), tmp_path / "lessons"
    copy_lessons(shipped, folder)
    edited = set()
    for number in range(12):
        for name in lesson_names(shipped):
            (folder / name).write_text(f"round {number}, {name}")
            edited.add(f"round {number}, {name}")
        children = []
        for _ in range(4):
            if (child := os.fork()) == 0:
                try:
                    copy_lessons(shipped, folder, renew=True)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert edited <= {path.read_text() for path in folder.rglob("*.ipynb")}


def test_a_name_that_no_folder_can_have_is_said(shipped: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="File name too long"):
        copy_lessons(shipped, tmp_path / ("n" * 300))


def test_a_read_only_installation_gives_copies_that_can_be_changed(shipped: Path, folder: Path) -> None:
    for lesson in shipped.iterdir():
        lesson.chmod(0o444)
    copy_lessons(shipped, folder)
    assert all(os.stat(copy).st_mode & 0o200 for copy in folder.iterdir())


def test_the_shipped_lessons_are_never_the_working_copies(shipped: Path) -> None:
    with pytest.raises(LaunchError, match="expected another folder"):
        copy_lessons(shipped, shipped)


def test_a_folder_that_cannot_be_written_is_said(shipped: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="AMPLAB_LESSONS"):
        copy_lessons(shipped, tmp_path / "file" / "lessons")


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AMPLAB_LESSONS", raising=False)
    assert lessons_directory() == tmp_path / "amplab-lessons"
    monkeypatch.setenv("AMPLAB_LESSONS", "~/courses")
    assert lessons_directory() == tmp_path / "courses"


def test_only_a_copy_that_is_as_shipped_is_signed(shipped: Path, folder: Path, tmp_path: Path) -> None:
    copy_lessons(shipped, folder)
    foreign = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os")])
    nbformat.write(foreign, folder / "10_formats.ipynb")
    nbformat.write(foreign, folder / "12_foreign.ipynb")
    (folder / "11_kernels.ipynb").unlink()
    with NotebookNotary(data_dir=str(tmp_path)) as notary:
        sign_lessons(notary, shipped, folder)
        signed = {
            path.stem: notary.check_signature(nbformat.read(path, as_version=4)) for path in sorted(folder.iterdir())
        }
    assert signed == {"00_the_lab": True, "03_loss_scale": True, "10_formats": False, "12_foreign": False}


def test_an_installed_wheel_has_the_lessons(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "amplab", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "notebooks", source / "notebooks")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert any(name.endswith("labextensions/amplab/static/lesson.js") for name in zipfile.ZipFile(wheel).namelist())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    for option, packages in (
        ("--prefix", sysconfig.get_path("purelib", vars={"base": ""}).lstrip("/")),
        ("--target", ""),
    ):
        target = tmp_path / option
        subprocess.run([*install, option, str(target), str(wheel)], capture_output=True, check=True)
        ask = "from amplab.launch import choose_lesson, find_lessons; print(choose_lesson(find_lessons()))"
        code = f"import sys; sys.path.insert(0, {str(target / packages)!r}); {ask}"
        found = subprocess.run(
            [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        lesson = Path(found.stdout.strip())
        assert target in lesson.parents
        assert lesson.read_bytes() == (ROOT / "notebooks" / "00_the_lab.ipynb").read_bytes()
