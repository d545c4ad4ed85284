"""Scripts of 2019 that import apex, as they are, under `amplab run`, on a GPU and without one: they end as in float32.

One process runs a script at every level with three seeds; each run is a whole `amplab run`, with `amp.reset` after it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LEVELS, SEEDS = ("O0", "O1", "O2"), ("0", "1", "2")
AGREED = 0.05
DRIVER = """
import contextlib, io, json, sys, warnings
from amplab import amp
from amplab.cli import main
warnings.simplefilter("always")
for words in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as caught:
        status = main(["run", *words])
    amp.reset()
    print(json.dumps([status, printed.getvalue(), [str(each.message) for each in caught]]))
"""


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        ),
    ]
)
def options(request):
    """The options of `amplab run`: where the script's CUDA calls run."""
    return ["--device", "cpu"] if request.param == "cpu" else []


def run_all(script, runs, options):
    """Return what each run printed, and its warnings, having checked that it ended well."""
    jobs = json.dumps([[*options, str(HERE / script), *words] for words in runs])
    result = subprocess.run([sys.executable, "-c", DRIVER, jobs], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    ended = [json.loads(line) for line in result.stdout.splitlines()]
    assert [status for status, _, _ in ended] == [0] * len(runs), result.stderr
    if options:
        assert "amplab --device cpu: device cuda is the CPU" in result.stderr or ".cuda() copies" in result.stderr
    return [(printed, told) for _, printed, told in ended]


def numbers(text, name):
    """Return every number that is printed after ``name``, in order."""
    return [float(found) for found in re.findall(rf"{re.escape(name)} *(\S+)", text)]


def by_level(results, name):
    """Return the median over the seeds of the last ``name`` of each run."""
    last = [numbers(printed, name)[-1] for printed, _ in results[: len(LEVELS) * len(SEEDS)]]
    return {level: median(last[3 * index : 3 * index + 3]) for index, level in enumerate(LEVELS)}


def of_half_adam(told):
    return [text for text in told if "Adam on half parameters" in text]


def test_a_classifier_with_checkpoint_and_resume(tmp_path, options):
    matrix = [["--opt-level", level, "--seed", seed] for level in LEVELS for seed in SEEDS]
    resumed = []
    for level in ("O1", "O2"):
        words, path = ["--opt-level", level, "--seed", "0"], str(tmp_path / f"{level}.pth.tar")
        resumed += [[*words, "--epochs", "2", "--checkpoint", path], [*words, "--resume", path]]
    in_half = ["--opt-level", "O3", "--loss-scale", "128.0"]
    results = run_all("main_amp.py", [*matrix, *resumed, in_half], options)
    accuracy, loss = by_level(results, "Prec@1"), by_level(results, "* Loss")
    assert accuracy["O0"] > 90
    for level in ("O1", "O2"):
        assert abs(accuracy[level] - accuracy["O0"]) <= 1.0
        assert loss[level] == pytest.approx(loss["O0"], rel=AGREED)
    for uninterrupted, again in ((3, 10), (6, 12)):  # seed 0 at O1, at O2
        assert results[again][0].splitlines()[-1] == results[uninterrupted][0].splitlines()[-1]
        assert "(epoch 2)" in results[again][0]
    assert "loss_scale             : 128.0" in results[-1][0]
    assert numbers(results[-1][0], "Prec@1")[-1] > 90


def test_a_gan_with_three_losses_and_two_optimizers(options):
    matrix = [["--opt_level", level, "--manualSeed", seed] for level in LEVELS for seed in SEEDS]
    half = ["--opt_level", "O3", "--loss_scale", "128.0", "--manualSeed", "0"]
    runs = [*matrix, [*half, "--eps", "1e-4"], [*half, "--niter", "0"]]
    results = run_all("dcgan_amp.py", runs, options)
    for name in ("Loss_D:", "Loss_G:"):
        loss = by_level(results, name)
        for level in ("O1", "O2"):
            assert loss[level] == pytest.approx(loss["O0"], rel=AGREED)
    # Of chance, two times log 2, both sides have learnt something.
    assert 0.5 < numbers(results[9][0], "Loss_D:")[-1] < 1.38
    assert of_half_adam(results[9][1]) == []
    assert len(of_half_adam(results[10][1])) == 2


def test_a_language_model_with_clipping_and_accumulation(options):
    matrix = [["--cuda", "--opt-level", level, "--seed", seed] for level in LEVELS for seed in SEEDS]
    half = ["--cuda", "--opt-level", "O3", "--loss-scale", "128.0"]
    results = run_all("word_language_model.py", [*matrix, [*half, "--eps", "1e-4"], [*half, "--steps", "0"]], options)
    loss = by_level(results, "| loss")
    for level in ("O1", "O2"):
        assert loss[level] == pytest.approx(loss["O0"], rel=AGREED)
    for printed, _ in results[:10]:
        learnt = numbers(printed, "| loss")
        assert learnt[-1] < 0.9 * learnt[0]
    assert of_half_adam(results[9][1]) == []
    (told,) = of_half_adam(results[10][1])
    assert "eps=1e-08 is 0 in torch.float16" in told


def test_the_command_itself():
    words = ["run", "--device", "cpu", str(HERE / "word_language_model.py"), "--cuda", "--steps", "20"]
    result = subprocess.run(
        [sys.executable, "-m", "amplab", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Selected optimization level O1" in result.stdout
    assert "20/   20 steps" in result.stdout
    said = result.stderr.splitlines()
    assert said[0] == "amplab --device cpu: torch.cuda.is_available() is True"
    assert len(said) == len(set(said)) == 3


def test_without_a_gpu_and_without_the_option_nothing_is_redirected():
    script = str(HERE / "main_amp.py")
    code = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode == 0:
        pytest.skip("there is a GPU, on which the script simply runs")
    result = subprocess.run(
        [sys.executable, "-m", "amplab", "run", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "amplab --device cpu" not in result.stderr
