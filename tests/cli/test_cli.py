"""The command line: what it accepts, what it refuses and in how many words, and what it does not load."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch

from amplab import __version__
from amplab.cli import build_parser, main
from amplab.lab import FIELDS, MODELS, ExperimentConfig, load_run
from amplab.lab.models import register_model
from amplab.launch import Launch
from amplab.views.controls import controls_payload

ROOT = Path(__file__).resolve().parents[2]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a refused command says, having checked that it is one line on stderr and status 2."""
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_every_field_of_an_experiment_is_an_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(capsys, "train")
    for name, field in FIELDS.items():
        flag = f"--{name.replace('_', '-')} {field.example_text}"
        assert f"{flag} {field.help} (default: {field.default_text})" in printed
    literal = {name: field.default_text for name, field in FIELDS.items() if field.default is not None}
    given = " ".join(f"{name}={text}" for name, text in literal.items())
    assert ExperimentConfig.parse(f"amplab/1 {given}") == ExperimentConfig()


def test_a_registered_model_is_offered_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="model=linear"):
        ExperimentConfig(model="linear")
    try:

        @register_model("linear", label="Linear")
        def linear(_hidden: int) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

        offered = re.search(r"--model (\S+)\]", help_of(capsys, "train"))
        assert offered is not None
        assert {"mlp", "cnn", "linear"} <= set(offered[1].split("|"))
        assert main(["train", "--model", "linear", "--steps", "2"]) == 0
        config = ExperimentConfig.parse("amplab/1 task=digits model=linear opt_level=O1")
        shown = controls_payload(config, state="ready", refusal=None, shrinking=False, armed=[])
        assert ["linear", "Linear"] in shown["fields"]["model"]["options"]
        with pytest.raises(ValueError, match="'linear'"):
            register_model("linear", label="Other")(linear)
    finally:
        MODELS.pop("linear", None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--opt-level", "O7"], ["O7", "O0, O1, O2, O3"]),
        (["--task", "cifar"], ["cifar", "digits"]),
        (["--loss-scale", "0"], ["loss_scale=0", "> 0"]),
        (["--loss-scale", "-128"], ["loss_scale=-128", "> 0"]),
        (["--loss-scale", "big"], ["big", "dynamic"]),
        (["--init-scale", "2**"], ["2**", "number"]),
        (["--batch-size", "1.5"], ["1.5", "whole number"]),
        (["--batch-size", "5000"], ["5000"]),
        (["--task", ""], ["task"]),
        (["--opt-level", "O1", "--keep-batchnorm-fp32", "true"], ["keep_batchnorm_fp32", "O1"]),
        (["--steps", "many"], ["many", "300"]),
        (["--steps", "0"], ["0", "> 0"]),
        (["--steps", "2**2**9"], ["2**2**9", "1000000000"]),
        (["--nproc", "1025"], ["1025", "1024"]),
        (["--stpes", "3"], ["--stpes", "--steps?"]),
        (["--step", "3"], ["--step 3", "--steps?"]),
        (["--colour", "red"], ["--colour", "amplab train --help"]),
    ],
)
def test_train_refuses_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: list[str]) -> None:
    message = refusal(capsys, "train", *arguments)
    assert message.startswith("amplab")
    for word in said:
        assert word in message


@pytest.mark.parametrize("words", ["", "dance", "lab --notebook 77", "lab --port http", "lab --port 0", "lab --brwser"])
def test_other_refusals_are_one_line_too(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert refusal(capsys, *words.split()).startswith("amplab")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "as in `amplab run --device cpu train.py`."),
        (["--"], "no script"),
        (["-m"], "as in `amplab run --device cpu -m package.module`."),
        (["-m", "apex.parallel.multiproc", "train.py"], "torchrun"),
        (["no_such_script.py"], "no such file"),
        (["."], "a directory"),
        (["--device", "tpu", "train.py"], "tpu"),
        (["-m", "no_such_module"], "no_such_module"),
    ],
)
def test_run_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert said in refusal(capsys, "run", *arguments)


def test_the_help_of_run_says_what_a_tensor_moved_to_cuda_is(capsys: pytest.CaptureFixture[str]) -> None:
    """`tests/scripts/test_sides.py` has the tensors."""
    printed = help_of(capsys, "run")
    assert "is_cuda is False and device is cpu" in printed
    assert "marked" not in printed


def test_what_follows_the_script_is_the_scripts() -> None:
    words = ["run", "--device", "cpu", "train.py", "--device", "cuda", "-m", "--", "-h"]
    options = build_parser().parse_args(words)
    assert (options.device, options.module) == ("cpu", False)
    assert options.words == ["train.py", "--device", "cuda", "-m", "--", "-h"]


def test_unknown_lesson_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "lab", "--notebook", "77")
    assert "'77'" in message
    assert "00_the_lab" in message
    assert "01_number_formats" in message


@pytest.mark.parametrize("words", ["01 02", "01 --notebook 02", "no_such_lesson", "-1", "no_such_lesson --list"])
def test_one_lesson_is_expected(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert "lesson" in refusal(capsys, "lab", "--port", "0", *words.split())


@pytest.mark.parametrize("words", [["1"], ["number_formats"], ["--notebook", "01"], ["1", "--", "--debug"]])
def test_a_lesson_is_opened_by_number_or_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    plans: list[Launch] = []
    monkeypatch.setenv("AMPLAB_LESSONS", str(tmp_path))
    monkeypatch.setattr("amplab.cli.launch", lambda plan: plans.append(plan) or 0)
    assert main(["lab", "--no-browser", *words]) == 0
    assert "--LabApp.default_url=/doc/tree/01_number_formats.ipynb" in plans[0].command
    assert (plans[0].command[-1] == "--debug") == ("--debug" in words)


def test_the_list_of_lessons_shows_the_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AMPLAB_LESSONS", str(tmp_path))
    (tmp_path / "progress.json").write_text('{"08-1": "2026-01-01", "08-3": "2026-01-02"}')
    assert main(["lab", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("00  The lab")
    (eighth,) = [line for line in lines if line.startswith("08")]
    assert eighth.endswith("2 of 3 exercises")
    assert main(["lab", "8", "--list"]) == 0
    (alone,) = capsys.readouterr().out.splitlines()
    assert alone.split() == eighth.split()
    assert not (tmp_path / "00_the_lab.ipynb").exists()  # a list writes nothing


@pytest.mark.parametrize(("text", "value"), [("2**10", 1024), ("1e3", 1000), ("7", 7)])
def test_steps_are_spelt_as_people_do(text: str, value: int) -> None:
    assert build_parser().parse_args(["train", "--steps", text]).steps == value


def test_train_leaves_a_log_of_the_experiment_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.jsonl"
    words = "train --steps 4 --opt-level O2 --init-scale 2**20 --lr 1e-2 --hidden 16 --seed 5 --master-weights true"
    assert main([*words.split(), "--log", str(log)]) == 0
    run = load_run(log)
    assert run.config == ExperimentConfig(
        opt_level="O2", init_scale=2.0**20, lr=0.01, hidden=16, seed=5, master_weights=True
    )
    assert not run.truncated
    assert "O2" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["-m", "amplab"], ["-c", "import sys, amplab.cli; sys.exit(amplab.cli.main())"]])
def test_module_and_script_are_the_same(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *command, "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == f"amplab {__version__}\n"


def test_installed_command_exists() -> None:
    command = Path(sys.executable).with_name("amplab")
    if not command.exists():
        pytest.skip("amplab is not installed in this environment: python -m pip install -e .")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"amplab {__version__}\n"


@pytest.mark.parametrize("command", [[], ["lab"], ["bench"], ["doctor"], ["run"]])
def test_help_needs_no_torch(command: list[str]) -> None:
    script = (
        "import sys\nfrom amplab.cli import main\n"
        f"try: main({[*command, '--help']!r})\nexcept SystemExit: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "usage: amplab" in result.stdout
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", [3, "", "A B", "Mlp", "a=b"])
def test_a_name_that_a_config_cannot_spell_is_refused(name):
    with pytest.raises(ValueError, match=re.escape(f"register_model({name!r})")):
        register_model(name, label="Other")


def test_a_model_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="got 3"):
        register_model("three", label="Three")(3)


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--max-restarts", "2"], {}, "expected --nproc too"),
        (["--nproc", "2"], {"WORLD_SIZE": "2", "RANK": "0"}, "leave --nproc out"),
        (["--nproc", "2", "--opt-level", "O9"], {}, "opt_level=O9"),
        (["--nproc", "2", "--batch-size", "60000"], {}, "batch_size=60000: expected at most"),
        (["--nproc", "2", "--log", __file__], {}, "--log"),
    ],
)
def test_options_of_a_launch_that_do_not_fit_are_refused(capsys, monkeypatch, words, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the streams")
def test_a_run_goes_on_where_the_shell_has_closed_its_streams(tmp_path):
    words = f"-m amplab train --steps 3 --hidden=4 --log {shlex.quote(str(tmp_path))}"
    run = subprocess.run(f"{shlex.quote(sys.executable)} {words} >&- 2>&-", shell=True, check=False, timeout=120)
    assert run.returncode == 0
    (log,) = tmp_path.glob("*.jsonl")
    assert len(load_run(log).history) == 3


@pytest.mark.parametrize("words", [["lab", "--list"], ["doctor"]])
def test_a_terminal_that_shows_ascii_alone_gets_the_rest(words):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    run = subprocess.run([sys.executable, "-m", "amplab", *words], capture_output=True, env=environment, check=False)
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.isascii()


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize("words", [["lab", "--list"], ["doctor"]])
def test_a_reader_that_has_closed_the_output_ends_a_command_quietly(words):
    command = subprocess.Popen(
        [sys.executable, "-m", "amplab", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    command.stdout.close()  # before it writes, which takes longer than this
    assert command.stderr.read() == ""
    command.stderr.close()
    assert command.wait() == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["lab --list", "train --steps 3 --hidden=4", "--help", "lab --help", "--version"])
def test_a_full_disk_under_the_output_is_told_in_a_sentence(words, unbuffered):
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "amplab", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            check=False,
        )
    assert run.returncode == 1
    assert "cannot write its output: No space left on device" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_call_in_a_program_leaves_its_output_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115  closing it fails
    descriptors = set(os.listdir("/dev/fd"))
    with redirect_stdout(full):
        assert main(["lab", "--list"]) == 1
    assert "cannot write its output: No space left on device" in capsys.readouterr().err
    assert os.readlink(f"/dev/fd/{full.fileno()}") == "/dev/full"
    assert set(os.listdir("/dev/fd")) == descriptors
    with suppress(OSError):
        full.close()
