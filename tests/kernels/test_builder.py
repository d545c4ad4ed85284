"""The build: one cold build in processes of their own, and all the ways not to have one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from amplab import kernels
from amplab.kernels.builder import BuildReport, KernelLibrary, cache, recipe
from amplab.kernels.builder import library as build

PARTS = 2  # libraries that are compiled side by side

STEP = """
import json, sys, time, warnings
import torch
from amplab import kernels
news = []
began = time.perf_counter()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    {before}
    for _ in range(2):
        grads, found_inf = [torch.tensor([2.0, float("inf")])], torch.zeros(1)
        kernels.unscale_(grads, found_inf, torch.tensor([0.5]))
report = kernels.report()
print(json.dumps(dict(
    status=report.status, text=str(report), seconds=time.perf_counter() - began,
    grads=grads[0].tolist(), found_inf=found_inf.item(), news=news,
    warnings=[(str(w.message), w.category.__name__, w.filename) for w in said],
    compiled="amplab" in torch._C._dispatch_dump("amplab::multi_tensor_unscale_").split("CPU:")[-1].split("\\n")[0]
        if "CPU:" in torch._C._dispatch_dump("amplab::multi_tensor_unscale_") else False,
    imported_compiler="torch.utils.cpp_extension" in sys.modules,
)))
"""


def environment(folder, **variables):
    """This process's environment with a cache, home and temporary folder inside ``folder``."""
    (folder / "tmp").mkdir(exist_ok=True)
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in ("AMPLAB_KERNELS", "CXX")}
    return {**kept, **own, **variables}


def start(folder, before="pass", **variables):
    command = [sys.executable, "-c", STEP.format(before=before)]
    return subprocess.Popen(
        command, env=environment(folder, **variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    """What the step printed about itself, and its stderr."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out), err


def step(folder, before="pass", **variables):
    return finish(start(folder, before, **variables))


def is_right(result):
    return result["grads"] == [1.0, float("inf")] and result["found_inf"] == 1.0


def libraries(folder):
    return list(folder.rglob("amplab_kernels*.so"))


def publish(scratch, folder, content):
    """Put a library of this content into the cache."""
    finished = scratch / "finished"
    finished.mkdir()
    (finished / "amplab_kernels_0.so").write_bytes(content)
    cache.publish(finished, folder)


def no_tools(folder):
    """A PATH on which nothing is."""
    (folder / "nothing").mkdir(exist_ok=True)
    return str(folder / "nothing")


needs_tools = pytest.mark.skipif(
    recipe.obstacle() is not None or os.name != "posix", reason=f"cannot build here: {recipe.obstacle()}"
)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """One cold build with everything going wrong on the way; each chapter is looked at by a test of its own.

    A script begins a build and ends before it; the builder is killed while it compiles; two processes then want
    the kernels at the same moment.
    """
    folder = tmp_path_factory.mktemp("story")
    told = {"folder": folder, "short script": step(folder)}
    wait_for(lambda: len(list(folder.rglob("scratch-*/*/main.cpp"))) == PARTS)
    told["locks"] = wait_for(lambda: list(folder.rglob("scratch-*/*/lock")))
    kill_builder(folder)
    began = time.perf_counter()
    patient = "print(kernels.ensure(on_report=lambda r: news.append(r.status), wait=True), file=sys.stderr)"
    both = [start(folder, AMPLAB_KERNELS="require"), start(folder, patient)]
    told["require"], told["auto"] = (finish(process) for process in both)
    told["seconds"] = time.perf_counter() - began
    return told


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return result


def kill_builder(folder):
    """kill -9 to the process that holds the folder's lock, told by the command it was started with."""
    [key] = [path.parent.name for path in folder.rglob("building")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            own = str(folder).encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if own and key.encode() in words:
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("no builder is running")


proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find the builder")


@needs_tools
@proc
def test_a_short_script_does_not_wait_and_is_right(story):
    result, err = story["short script"]
    assert is_right(result)
    assert result["status"] == "building"
    assert not result["compiled"]
    assert result["warnings"] == []
    [line] = err.splitlines()
    assert re.match(r"amplab kernels: building. CPU kernels from \d+ sources, in the background.", line)
    assert not result["imported_compiler"]


@needs_tools
@proc
def test_a_killed_builder_does_not_block_the_next(story):
    assert story["locks"], "torch had not taken its lock when the builder was killed"
    assert story["require"][0]["status"] == "built"
    assert not list(story["folder"].rglob("scratch-*"))


@needs_tools
@proc
@pytest.mark.parametrize("which", ["require", "auto"])
def test_two_processes_at_once_share_one_build(story, which):
    result, _ = story[which]
    assert is_right(result)
    assert result["status"] == "built"
    assert result["compiled"]
    assert result["warnings"] == []
    assert len(libraries(story["folder"])) == PARTS


@needs_tools
@proc
def test_reports_follow_one_another(story):
    result, err = story["auto"]
    assert result["news"] == ["building", "built"]
    assert re.search(r"amplab kernels: built. CPU kernels from \d+ sources, kept in ", err)
    assert "building" not in err  # whoever listens is told, and stderr is left alone


@needs_tools
@proc
def test_a_cached_build_needs_no_tools_and_writes_nothing(story):
    folder = story["folder"]
    before = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")}
    result, err = step(folder, PATH=no_tools(folder), AMPLAB_KERNELS="require")
    assert is_right(result)
    assert result["compiled"]
    assert err == ""
    assert not result["imported_compiler"]
    assert {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")} == before


def test_without_a_compiler_results_are_right_and_one_warning_says_why(tmp_path):
    result, err = step(tmp_path, PATH=no_tools(tmp_path), CXX="c++-of-nowhere")
    assert is_right(result)
    assert result["status"] == "failed"
    assert [message for message, _, _ in result["warnings"]] == [result["text"]]
    assert err == ""


def test_an_import_starts_nothing(tmp_path):
    command = "import amplab.kernels, threading; print(threading.active_count(), amplab.kernels.report().status)"
    result = subprocess.run(
        [sys.executable, "-c", command], env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1", "reference"]
    assert not (tmp_path / "cache").exists()


# In this process, each time with a library of its own that has nothing to load.


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that was not asked for yet, an empty cache, and no tools."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", no_tools(tmp_path))
    monkeypatch.setenv("CXX", "c++-of-nowhere")
    monkeypatch.delenv("AMPLAB_KERNELS", raising=False)
    return KernelLibrary()


NO_COMPILER = "no C++ compiler: 'c++-of-nowhere' is not on PATH"


@needs_tools
def test_no_compiler_is_one_warning_with_cause_and_remedy(library):
    with pytest.warns(RuntimeWarning, match=re.escape(NO_COMPILER)) as warned:
        library.attend()
    library.attend()  # says nothing more, or it would be an error here
    [warning] = warned
    assert warning.filename == __file__  # the caller's line, not one of amplab's
    assert "To enable them: " in str(warning.message)
    assert "Falling back to the PyTorch reference" in str(warning.message)
    assert library.report.status == "failed"
    assert not library.needs_attention


@needs_tools
def test_whoever_listens_is_told_of_the_failure_and_not_warned(library):
    news = []
    assert library.ensure(news.append) is library.report
    assert [report.cause for report in news] == [NO_COMPILER]


@needs_tools
def test_require_raises_each_time_where_nothing_can_be_built(library, monkeypatch):
    monkeypatch.setenv("AMPLAB_KERNELS", "require")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"^AMPLAB_KERNELS=require: {re.escape(NO_COMPILER)}"):
            library.attend()
        assert library.needs_attention


def test_reference_builds_nothing(library, monkeypatch, tmp_path):
    monkeypatch.setenv("AMPLAB_KERNELS", "reference")
    library.attend()
    assert (library.report.status, library.report.cause) == ("reference", "AMPLAB_KERNELS=reference")
    assert not (tmp_path / "cache").exists()


def test_another_mode_is_refused_each_time(library, monkeypatch):
    monkeypatch.setenv("AMPLAB_KERNELS", "fast")
    for _ in range(2):
        with pytest.raises(ValueError, match="AMPLAB_KERNELS='fast'"):
            library.attend()
        assert library.needs_attention


@needs_tools
def test_a_library_that_does_not_load_is_thrown_away(library, tmp_path):
    folder = cache.writable_folder(recipe.current_recipe().key)
    publish(tmp_path, folder, b"not a library")
    assert len(libraries(tmp_path)) == 1
    library.ensure(print)
    assert library.report.cause == NO_COMPILER
    assert libraries(tmp_path) == []


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-1])


def altered(file):
    file.write_bytes(b"b" + file.read_bytes()[1:])


def made_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.skipif(os.name != "posix", reason="makes pipes")
@pytest.mark.parametrize("damage", [cut_off, altered, made_a_pipe, Path.unlink])
@pytest.mark.parametrize("name", ["amplab_kernels_0.so", "sha256"])
def test_a_library_that_is_not_whole_is_not_loaded(damage, name, library, tmp_path):
    """Loading one that is cut off, as after a loss of power, kills the process by SIGBUS."""
    folder = cache.writable_folder("0123")
    publish(tmp_path, folder, b"a library")
    assert cache.find("0123")
    damage(folder / "built" / name)
    assert cache.find("0123") == ()


@needs_tools
def test_a_compiler_that_fails_is_quoted_and_its_log_kept(library, tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    compiler = tmp_path / "c++"
    failing = "echo 'unscale.cpp:1:1: error: the moon is wrong' >&2; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *.cpp*) {failing};; *) exec {shutil.which("c++")} "$@";; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setitem(sys.modules, "ipykernel", None)  # as in a notebook, whose cells' outputs are compared
    with pytest.warns(RuntimeWarning, match="the moon is wrong"):
        report = library.ensure(wait=True)
    assert report.status == "failed"
    assert report.cause == "unscale.cpp:1:1: error: the moon is wrong"
    assert capsys.readouterr() == ("", "")
    assert report.cause in Path(report.remedy.removeprefix("read ")).read_text()


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (BuildReport("built", "CPU kernels", 6.04), "amplab kernels: built. CPU kernels, in 6.0 s."),
        (
            BuildReport("reference", "CPU kernels", cause="AMPLAB_KERNELS=reference"),
            "amplab kernels: reference. CPU kernels: AMPLAB_KERNELS=reference. "
            "Falling back to the PyTorch reference, which gives the same results.",
        ),
    ],
)
def test_a_report_prints_as_a_sentence(report, text):
    assert str(report) == text


# What decides about a build, without building.


def test_ninja_is_found_beside_python_without_path(tmp_path, monkeypatch):
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("ninja", "python"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    monkeypatch.setenv("PATH", no_tools(tmp_path))
    assert shutil.which("ninja", path=recipe.search_path()) == str(tools / "ninja")


def test_old_torch_is_an_obstacle(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.9.1+cpu")
    assert "this is torch 2.9.1+cpu" in recipe.obstacle().cause
    assert recipe.obstacle().remedy == "python -m pip install 'torch>=2.10'"


def test_every_source_is_in_one_part():
    made = recipe.current_recipe()
    assert sorted(path for part in made.parts for path in part) == sorted(made.cpp + made.cuda)
    assert len(made.parts) == PARTS
    assert recipe.casts_recipe().parts == (recipe.casts_recipe().cpp,)


def test_a_cuda_source_is_in_the_part_of_what_it_is_called_by(tmp_path):
    cpp = tuple(tmp_path / f"{name}.cpp" for name in ("tensor_table_cuda", "steps", "unscale"))
    cuda = tuple(tmp_path / f"{name}.cu" for name in ("layerwise_steps", "unscale"))
    parts = recipe.Recipe(cpp, cuda, (), (), (), ()).parts
    assert [{path.name for path in part} for part in parts] == [
        {"tensor_table_cuda.cpp", "unscale.cpp", "unscale.cu"},
        {"steps.cpp", "layerwise_steps.cu"},
    ]


def test_the_first_of_two_builders_without_locks_wins(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    publish(tmp_path, folder, b"the first")
    publish(tmp_path / "cache", folder, b"the second")
    assert [library.read_bytes() for library in libraries(folder / "built")] == [b"the first"]


def test_the_key_follows_sources_flags_and_torch(tmp_path, monkeypatch):
    source = tmp_path / "a.cpp"
    source.write_text("int a;")

    def key(*cflags):
        return recipe.Recipe((source,), (), (), cflags, (), ()).key

    original = key("-O2")
    assert key("-O2") == original
    assert key("-O3") != original
    monkeypatch.setattr("torch.__version__", "2.99")
    assert key("-O2") != original
    monkeypatch.undo()
    source.write_text("int b;")
    assert key("-O2") != original


# Whose code is loaded, and from where the builder imports.

posix = pytest.mark.skipif(os.name != "posix", reason="ownership is a matter of POSIX")
root = pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root gives files to another user")
STRANGER = 12345


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a build in the user's cache folder, whose fallback is inside ``tmp_path`` as well."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_private_group", lambda uid: None, raising=False)
    folder = cache.writable_folder("0123")
    publish(tmp_path, folder, b"a library")
    assert folder == tmp_path / "cache" / "amplab" / "kernels" / "0123"
    assert cache.find("0123") == (folder / "built" / "amplab_kernels_0.so",)
    return folder


def parts_of(library, upto):
    return [library, *(parent for parent in library.parents if parent.is_relative_to(upto))]


@posix
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("level", range(5), ids=["library", "built", "key", "kernels", "amplab"])
def test_nothing_is_loaded_that_others_may_write(folder, tmp_path, level, mode):
    parts_of(folder / "built" / "amplab_kernels_0.so", tmp_path)[level].chmod(mode)
    assert cache.find("0123") == ()
    [reason] = cache.refusals("0123")
    assert f"mode {mode:04o}" in reason
    if level > 1:  # nor is anything built there
        assert cache.writable_folder("0123").parent == tmp_path / f"amplab-kernels-{os.getuid()}"


@root
@pytest.mark.parametrize("level", range(6), ids=["library", "built", "key", "kernels", "amplab", "cache"])
def test_nothing_is_loaded_that_belongs_to_another_user(folder, tmp_path, level):
    os.chown(parts_of(folder / "built" / "amplab_kernels_0.so", tmp_path)[level], STRANGER, STRANGER)
    assert cache.find("0123") == ()
    assert f"belongs to user {STRANGER}" in cache.refusals("0123")[0]


@posix
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_the_folders_above_must_be_safe_too(folder, tmp_path, mode):
    (tmp_path / "cache").chmod(mode)
    assert cache.find("0123") == ()
    (tmp_path / "cache").chmod(0o1777)  # sticky, as /tmp: others may add to it, but not replace what is ours
    assert len(cache.find("0123")) == 1


@posix
def test_a_link_is_judged_by_what_it_points_to(folder, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert cache.find("0123") == (folder / "built" / "amplab_kernels_0.so",)  # loaded by its own name
    folder.parent.chmod(0o777)
    assert cache.find("0123") == ()


@root
def test_a_folder_that_another_user_made_first_is_not_built_in(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    fallback = tmp_path / f"amplab-kernels-{os.getuid()}"
    fallback.mkdir()
    os.chown(fallback, STRANGER, STRANGER)
    assert cache.writable_folder("0123") is None
    assert f"{fallback} belongs to user {STRANGER}" in cache.no_folder("0123")


@posix
@pytest.mark.parametrize("umask", [0o002, 0o000])
def test_a_permissive_umask_makes_private_folders(tmp_path, monkeypatch, umask):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    monkeypatch.setattr(cache, "_private_group", lambda uid: None, raising=False)
    before = os.umask(umask)
    try:
        folder = cache.writable_folder("0123")
        assert cache.writable_folder("0123") == folder
    finally:
        os.umask(before)
    assert folder.parent == tmp_path / f"amplab-kernels-{os.getuid()}"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    publish(tmp_path, folder, b"a library")
    assert len(cache.find("0123")) == 1


def status(mode, uid, gid=1000):
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "own", "trusted"),
    [
        (0o040700, 1000, True, True),
        (0o040755, 0, True, True),
        (0o040755, 1001, True, False),
        (0o040775, 1000, True, True),  # the group is the user's own
        (0o100664, 1000, True, True),
        (0o100666, 1000, True, False),
        (0o041777, 0, True, False),
        (0o041777, 0, False, True),  # /tmp
        (0o040777, 0, False, False),
        (0o040755, 65534, False, True),  # / in a rootless container
        (0o040755, 65534, True, False),
        (0o040755, 1001, False, False),
    ],
)
def test_who_could_change_a_file(mode, uid, own, trusted):
    assert (cache.distrust(status(mode, uid), 1000, 1000, own=own) is None) == trusted


@pytest.mark.parametrize("group", [None, 1001])
def test_a_shared_group_is_other_users(group):
    assert "mode 0775" in cache.distrust(status(0o040775, 1000), 1000, group, own=True)


@pytest.fixture
def no_temporary_folder(monkeypatch):
    def gettempdir():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", gettempdir)


@posix
def test_a_build_is_loaded_where_no_temporary_folder_can_be_written(folder, no_temporary_folder):
    assert cache.find("0123") == (folder / "built" / "amplab_kernels_0.so",)
    assert cache.writable_folder("0123") == folder


@needs_tools
def test_no_temporary_folder_is_one_warning(tmp_path, monkeypatch, no_temporary_folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AMPLAB_KERNELS", raising=False)
    library = KernelLibrary()
    with pytest.warns(RuntimeWarning, match="the build did not run: .*No usable temporary directory"):
        library.ensure(wait=True)
    assert library.report.status == "failed"


def test_a_relative_cache_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.writable_folder("0123") == tmp_path / "home" / ".cache" / "amplab" / "kernels" / "0123"


@posix
def test_an_untrusted_build_is_named_in_one_warning(library, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_private_group", lambda uid: None, raising=False)
    folder = cache.writable_folder(recipe.current_recipe().key)
    publish(tmp_path, folder, b"a library of a stranger")
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=re.escape(f"{folder} can be written by other users")) as warned:
        library.ensure(print)
    assert library.report.status == "failed"
    assert len(libraries(tmp_path)) == 1  # neither loaded nor removed
    assert "remove it" in str(warned[0].message)


@posix
def test_no_message_suggests_to_remove_a_folder_that_amplab_did_not_make(library, tmp_path, monkeypatch):
    folder = cache.writable_folder(recipe.current_recipe().key)
    publish(tmp_path, folder, b"a library in a shared folder")
    tmp_path.chmod(0o777)
    (refusal,) = cache.refusals(recipe.current_recipe().key)
    assert refusal.startswith(f"{tmp_path} can be written by other users (mode 0777); run chmod go-w {tmp_path}")
    assert "remove it" not in refusal


IMPOSTORS = ("amplab", "ninja", "setuptools", "shlex", "torch")
BUILD_ELSEWHERE = """
import os, sys
from amplab.kernels.builder import KernelLibrary, recipe
made = recipe.current_recipe()
made.__dict__["key"] = "no-such-key"
os.chdir(sys.argv[1])
sys.path[:0] = ["", sys.argv[1]]
os.environ["PYTHONPATH"] = os.pathsep.join(["", ".", sys.argv[1], os.environ["PYTHONPATH"]])
try:
    KernelLibrary(lambda: made).require()
except RuntimeError as error:
    print(error)
"""


@needs_tools
def test_the_builder_runs_no_code_of_the_working_folder(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for name in IMPOSTORS:
        (here / f"{name}.py").write_text(f"raise SystemExit('error: {name}.py of the working folder ran')")
    command = [sys.executable, "-P", "-c", BUILD_ELSEWHERE, str(here)]
    own = environment(tmp_path, PYTHONPATH=str(Path(kernels.__file__).parents[2]))
    said = subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout
    assert "of the working folder ran" not in said
    assert "the key is no-such-key" in said  # the builder imported torch and amplab, and made a check of its own


def test_the_builder_inherits_absolute_folders_alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    paths = ["", ".", "lib", str(tmp_path), str(tmp_path / "lib"), str(tmp_path / "lib" / "..")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    environment = build._builder_environment()
    assert (environment["PYTHONPATH"], environment["PYTHONSAFEPATH"]) == (str(tmp_path / "lib"), "1")
    monkeypatch.setenv("PYTHONPATH", ".")
    assert "PYTHONPATH" not in build._builder_environment()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")
def test_forked_processes_may_use_cuda_after_the_question_whether_there_is_a_device():
    code = """
import os, sys, torch
from amplab.kernels.builder.recipe import has_cuda_device
has_cuda_device()
child = os.fork()
if child == 0:
    os._exit(torch.cuda._is_in_bad_fork())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
