"""Paths that users give: what ~ means, and that no path ends in an error of the system's own words, or waits."""

import os
from pathlib import Path

import pytest

from amplab import amp
from amplab.amp.run_state.paths import given_path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, pipes and names of POSIX")


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_tilde_is_the_home_folder_and_makes_no_folder_of_that_name(home, tmp_path):
    amp.save_run_state("~/run.pt", position=3)
    assert amp.load_run_state(Path("~/run.pt")).position == 3
    assert [each.name for each in home.iterdir()] == ["run.pt"]
    assert list(tmp_path.iterdir()) == [home]
    amp.save_run_state("~backup.pt", position=4)  # a name of this folder
    assert (tmp_path / "~backup.pt").exists()


@pytest.mark.parametrize("function", [amp.save_run_state, amp.load_run_state])
@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        (5, TypeError, "expected the path of a file"),
        (None, TypeError, "expected the path of a file"),
        (b"run.pt", TypeError, "as a str or a pathlib.Path"),
        ("", ValueError, "an empty path"),
        ("a\0b", ValueError, "NUL character; remove it"),
        ("gs://bucket/run.pt", ValueError, "expected a local path, not an address"),
        ("~no-such-user/run.pt", ValueError, "expected ~/run.pt"),
        ("n" * 300, OSError, "give a shorter one"),
        ("loop", OSError, "leads back to itself; remove the link"),
        ("pipe", OSError, "not a regular file but a named pipe"),
        ("/dev/zero", OSError, "not a regular file but a device"),
        ("folder", OSError, "not a regular file but a folder|has no rank_0.pt: expected a folder of save_run_state"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_in_words(home, tmp_path, function, path, error, said):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((error, amp.RunStateError), match=said):
        function(path)


def test_a_link_without_a_target_names_the_file_that_is_written(home, tmp_path):
    (tmp_path / "link.pt").symlink_to("home/run.pt")
    amp.save_run_state("link.pt", position=1)
    assert (home / "run.pt").exists()
    assert amp.load_run_state("link.pt").position == 1


def test_a_path_stays_as_it_was_given():
    assert given_path("run.pt") == Path("run.pt")
    for name in ("~", "~root", "~no-such-user"):  # whoever takes the path a second time means the same file
        assert given_path(given_path(f"./{name}/run.pt")) == Path.cwd() / name / "run.pt"
