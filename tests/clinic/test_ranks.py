"""Two real ranks with a fault in how they train together: the doctor names it first, and the mended twin has none.

Each case runs with ``broken`` True and False. What differs is the line that the remedy prints.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from amplab import GradScaler, amp, doctor, watch
from amplab.cli import main
from amplab.diagnose import Findings, examination
from amplab.diagnose.catalogue import finding
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.lab import load_run, rank_watch, run_csv
from amplab.lab.html_report import report_html
from amplab.parallel import DistributedDataParallel as ApexDDP
from amplab.parallel import convert_syncbn_model
from amplab.views.live_payload import change_marks
from amplab.views.run_view import RunView

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import run_ranks

STEPS = 6
NAN_KEPT = "compression-keeps-nonfinite"


def data(rank: int, samples: int = 32) -> list[Tensor]:
    torch.manual_seed(rank)
    return [torch.randn(samples, 8) for _ in range(STEPS)]


def mlp(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.ReLU(), nn.Linear(16, 1))


def averaged(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad.div_(torch.distributed.get_world_size()))


def skips_that_differ(rank: int, folder: Path, *, broken: bool) -> list[str]:
    """The scaler of each rank checks the gradients of that rank, and only then they are averaged by hand."""
    model = mlp()
    wrapped = model if broken else DistributedDataParallel(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=256.0)
    with watch(model, optimizer, scaler=scaler, log=folder) as w:
        for step, batch in enumerate(data(rank)):
            optimizer.zero_grad()
            loss = w.loss(wrapped(batch).square().mean() * (3e37 if (rank, step) == (1, 2) else 1.0))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if broken:
                averaged(model)
            scaler.step(optimizer)
            scaler.update()
    return texts_of(w.findings())


def a_scaler_restored_on_one_rank(rank: int, folder: Path, *, broken: bool) -> list[str]:
    model = mlp()
    wrapped = DistributedDataParallel(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=256.0)
    saved = {"scaler": GradScaler("cpu", init_scale=1024.0).state_dict()}
    if rank == 0 or not broken:
        scaler.load_state_dict(saved["scaler"])
    with watch(model, optimizer, scaler=scaler, log=folder) as w:
        for batch in data(rank):
            optimizer.zero_grad()
            scaler.scale(w.loss(wrapped(batch).square().mean())).backward()
            scaler.step(optimizer)
            scaler.update()
    return texts_of(w.findings())


def watched(rank: int, folder: Path, forward: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    with watch(forward, optimizer, log=folder) as w:
        for batch in data(rank):
            optimizer.zero_grad()
            w.loss(forward(batch).square().mean()).backward()
            optimizer.step()
    return texts_of(w.findings())


def each_rank_for_itself(rank: int, folder: Path, *, broken: bool) -> list[str]:
    """The same weights at the start, and gradients that nobody averages."""
    model = mlp()
    wrapped = model if broken else DistributedDataParallel(model)
    return watched(rank, folder, wrapped, torch.optim.SGD(model.parameters(), lr=0.01))


def another_rate_on_one_rank(rank: int, folder: Path, *, broken: bool) -> list[str]:
    model = DistributedDataParallel(mlp())
    rate = 0.002 if broken and rank == 1 else 0.01
    return watched(rank, folder, model, torch.optim.SGD(model.parameters(), lr=rate))


def weights_loaded_on_one_rank(rank: int, folder: Path, *, broken: bool) -> list[str]:
    model = mlp()
    wrapped = DistributedDataParallel(model)
    if broken and rank == 1:
        with torch.no_grad():
            model[0].weight.mul_(1.5)
    return watched(rank, folder, wrapped, torch.optim.Adam(model.parameters(), lr=0.01))


def averaged_now_and_then(rank: int, folder: Path) -> list[str]:
    """Local SGD: the weights differ between two averages, on purpose."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def average(*_: object) -> None:
        average.steps += 1
        if average.steps % 2 == 0:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.data.div_(torch.distributed.get_world_size()))

    average.steps = 0
    optimizer.register_step_post_hook(average)
    return watched(rank, folder, model, optimizer)


def averaged_after_the_update(rank: int, folder: Path, *, in_batches: bool) -> list[str]:
    """Local SGD by hand: each step is over, and then the weights become equal. States are due after the last step."""
    model, batches = mlp(), data(rank)[:4]
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=256.0)
    with watch(model, optimizer, scaler=scaler, log=folder) as w:
        for batch in w.batches(batches) if in_batches else batches:
            optimizer.zero_grad()
            scaler.scale(w.loss(model(batch).square().mean())).backward()
            scaler.step(optimizer)
            scaler.update()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.data.div_(torch.distributed.get_world_size()))
    assert not w.failures, w.failures
    return texts_of(w.findings())


class TwoHeads(nn.Module):
    """One of two heads by the rank, as a data-dependent branch chooses it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return (self.second if second else self.first)(torch.relu(self.body(x)))


def a_parameter_of_one_rank(rank: int, _folder: Path, *, broken: bool) -> list[str]:
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=not broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return found_by_doctor(model, data(rank)[0], optimizer, lambda x: model(x, rank == 1).square().mean())


def wrapped_too_early(rank: int, _folder: Path, *, broken: bool) -> list[str]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    early = DistributedDataParallel(model) if broken else None
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    wrapped = early or DistributedDataParallel(model)
    try:
        return found_by_doctor(wrapped, data(rank)[0], optimizer, lambda x: wrapped(x).float().square().mean())
    finally:
        amp.reset()


def statistics_of_one_rank(rank: int, _folder: Path, *, broken: bool) -> list[str]:
    model = mlp(nn.BatchNorm1d(16))
    wrapped = DistributedDataParallel(model) if broken else ApexDDP(convert_syncbn_model(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return found_by_doctor(wrapped, data(rank, samples=4)[0], optimizer, lambda x: wrapped(x).square().mean())


def another_scale(rank: int, _folder: Path, *, broken: bool) -> list[str]:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=256.0 if broken and rank == 1 else 1024.0)
    return found_by_doctor(model, data(rank)[0], optimizer, lambda x: model(x).square().mean(), scaler=scaler)


def other_weights(rank: int, _folder: Path, *, broken: bool) -> list[str]:
    """Each rank begins with weights of its own, and nothing has made them equal."""
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    wrapped = model if broken else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return found_by_doctor(wrapped, data(rank)[0], optimizer, lambda x: wrapped(x).square().mean())


def compressed(*, broken: bool) -> tuple[nn.Module, torch.optim.Optimizer, GradScaler, Callable[[Tensor], None]]:
    """A model whose gradients are compressed, and its train step, which does what the remedy prints if not broken."""
    model = DistributedDataParallel(mlp())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=256.0)
    remedy = finding(NAN_KEPT, api=Api(ApiStyle.AMPLAB), state="PowerSGDState", kept="error_dict").remedy

    def train(loss: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        exec("scaler.update()" if broken else remedy, {"scaler": scaler, "state": state})

    return model, optimizer, scaler, train


def a_compression_that_keeps_nan(rank: int, folder: Path, *, broken: bool) -> list[str]:
    """One loss of one rank overflows, once."""
    model, optimizer, scaler, train = compressed(broken=broken)
    with watch(model, optimizer, scaler=scaler, log=folder) as w:
        for step, batch in enumerate(data(rank)):
            train(w.loss(model(batch).square().mean() * (3e37 if (rank, step) == (1, 3) else 1.0)))
    assert w.history.skipped_steps() == ([3, 4, 5] if broken else [3])
    kept = w.findings().named(NAN_KEPT)
    assert [each.evidence for each in kept] == [{"first_step": 3, "skips_explained": 3}] * broken
    return texts_of(w.findings())


def nan_kept_before(rank: int, _folder: Path, *, broken: bool) -> list[str]:
    model, optimizer, scaler, train = compressed(broken=broken)
    for step, batch in enumerate(data(rank)):
        train(model(batch).square().mean() * (3e37 if (rank, step) == (1, 3) else 1.0))
    return found_by_doctor(model, data(rank)[0], optimizer, lambda x: model(x).square().mean(), scaler=scaler)


def found_by_doctor(model, batch, optimizer, loss_of, scaler=None) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return texts_of(doctor(model, batch, step=loss_of, optimizer=optimizer, scaler=scaler))


def texts_of(found: Findings) -> list[str]:
    return [f"{each.name}: {each.symptom}\n{each.remedy}" for each in found.harmful]


WATCHED = {
    "ranks-skip-differently": skips_that_differ,
    "scale-differs-by-rank": a_scaler_restored_on_one_rank,
    "weights-differ-by-rank": each_rank_for_itself,
    "optimizer-differs-by-rank": another_rate_on_one_rank,
    NAN_KEPT: a_compression_that_keeps_nan,
}
EXAMINED = {
    "scale-differs-by-rank": another_scale,
    "weights-differ-by-rank": other_weights,
    "gradient-missing-on-a-rank": a_parameter_of_one_rank,
    "wrapped-before-initialize": wrapped_too_early,
    "batchnorm-not-synchronized": statistics_of_one_rank,
    NAN_KEPT: nan_kept_before,
}


def every_case(rank: int, folder: Path) -> dict[tuple[str, bool], list[str]]:
    rank_watch._WAIT = examination._RANKS_WAIT = 300.0  # for the other rank, on a machine however busy
    told = {("local SGD", False): averaged_now_and_then(rank, folder / "local")}
    for in_batches in (True, False):
        by_hand = f"by hand {in_batches}"
        told[by_hand, False] = averaged_after_the_update(rank, folder / by_hand, in_batches=in_batches)
    loaded = "weights loaded"
    told |= {(loaded, b): weights_loaded_on_one_rank(rank, folder / f"{loaded}-{b}", broken=b) for b in (True, False)}
    told |= {
        (name, b): case(rank, folder / "examined", broken=b) for name, case in EXAMINED.items() for b in (True, False)
    }
    for name, case in WATCHED.items():
        for broken in (True, False):
            told[f"watched {name}", broken] = case(rank, folder / f"{name}-{broken}", broken=broken)
    return told


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("clinic")
    return folder, run_ranks(every_case, folder)


@pytest.mark.parametrize("name", EXAMINED)
def test_every_rank_is_told_what_its_model_has(trained, name):
    for told in trained[1]:
        assert [each.partition(":")[0] for each in told[name, True]] == [name]
        assert told[name, False] == []


def test_the_sentences_name_the_rank_the_parameters_and_the_layers(trained):
    told = trained[1][0]
    (missing,) = told["gradient-missing-on-a-rank", True]
    assert "On rank 0 the backward did not reach 2 parameters, first module.second.weight" in missing
    (early,) = told["wrapped-before-initialize", True]
    assert "4 parameters had the dtype float32" in early
    assert "float16" in early
    (alone,) = told["batchnorm-not-synchronized", True]
    assert "1 BatchNorm layer" in alone
    assert "4 samples" in alone


@pytest.mark.parametrize("name", WATCHED)
def test_the_logs_of_all_ranks_say_what_the_run_has(trained, name, capsys):
    broken, healthy = (next((trained[0] / f"{name}-{which}").iterdir()) for which in (True, False))
    run = load_run(broken)
    found = run.findings()
    assert found[0].name == name, str(found)
    if name in ("ranks-skip-differently", "scale-differs-by-rank"):
        assert run.differences
        assert "≠" in str(run.rank_table())
    assert not load_run(healthy).findings().harmful
    assert load_run(healthy).differences == ()
    assert main(["doctor", str(broken)]) == 1
    printed = capsys.readouterr().out
    assert found[0].symptom.split(";")[0][:60] in " ".join(printed.split())
    assert main(["doctor", str(healthy)]) == 0


@pytest.mark.parametrize("name", WATCHED)
def test_a_watch_tells_every_rank_while_it_trains(trained, name):
    for told in trained[1]:
        assert told[f"watched {name}", True][0].startswith(name)
        assert not told[f"watched {name}", False]


def test_the_first_step_and_the_rank_that_differ_are_named(trained):
    told = trained[1][0]
    assert told["watched weights-differ-by-rank", True][0].startswith(
        "weights-differ-by-rank: After step 0 the weights of rank 1 differ from those of rank 0."
    )
    assert "the learning rate is 0.01 on rank 0, 0.002 on rank 1" in told["watched optimizer-differs-by-rank", True][0]
    assert told["weights loaded", True][0].startswith("weights-differ-by-rank")
    assert "2^10 on rank 0, 2^8 on rank 1" in told["scale-differs-by-rank", True][0]


def test_weights_that_are_averaged_now_and_then_are_no_finding(trained):
    assert [told["local SGD", False] for told in trained[1]] == [[], []]
    assert not load_run(next((trained[0] / "local").iterdir())).findings().harmful
    for by_hand in ("by hand True", "by hand False"):
        assert [told[by_hand, False] for told in trained[1]] == [[], []]
        run = load_run(next((trained[0] / by_hand).iterdir()))
        assert not run.findings().harmful
        assert [each.step for each in run.ranks[0].states] == [0, 1, 3]
    assert [told["weights loaded", False] for told in trained[1]] == [[], []]


def test_pages_and_tables_show_a_line_for_each_rank_and_mark_where_they_differ(trained):
    run = load_run(next((trained[0] / "ranks-skip-differently-True").iterdir()))
    assert str(run).count("differs in") == len(run.differences)
    (mark,) = (each for each in change_marks(run.history) if each[2] == "ranks differ" and "skipped" in each[3])
    assert mark[0] == run.findings()[0].evidence["first_step"] == 2
    view = RunView(run)
    assert "≠" in view.children[1].value
    view.close()
    assert "<h2>Ranks</h2>" in report_html(run)
    head, *lines = run_csv(run.by_rank).splitlines()
    assert head.startswith("rank,step,loss")
    assert [line.partition(",")[0] for line in lines] == ["0"] * STEPS + ["1"] * STEPS


def steps_without_an_update(rank: int, style: ApiStyle, *, mended: bool) -> int:
    """Train with compressed gradients and one loss of inf on rank 1, and with what the remedy prints if mended."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = {ApiStyle.AMPLAB: GradScaler, ApiStyle.TORCH: torch.amp.GradScaler}.get(style, lambda _device: None)("cpu")
    if scaler is None:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, dynamic_init_scale=256.0)
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    remedy = finding(NAN_KEPT, api=Api(style), state="PowerSGDState", kept="error_dict").remedy
    last_line = "optimizer.step()" if scaler is None else "scaler.update()"
    without = 0
    for step, batch in enumerate(data(rank)):
        before = [each.detach().clone() for each in model.parameters()]
        optimizer.zero_grad()
        loss = wrapped(batch).float().square().mean() * (float("inf") if (rank, step) == (1, 3) else 1.0)
        if scaler is None:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        exec(remedy if mended else last_line, {"amp": amp, "scaler": scaler, "optimizer": optimizer, "state": state})
        without += all(map(torch.equal, before, model.parameters()))
    amp.reset()
    return without


def every_style(rank: int) -> list[tuple[int, int]]:
    styles = (ApiStyle.APEX, ApiStyle.AMPLAB, ApiStyle.TORCH)
    broken, mended = ([steps_without_an_update(rank, style, mended=each) for style in styles] for each in (False, True))
    return [*zip(broken, mended, strict=True)]


def test_the_remedy_of_a_compression_that_keeps_nan_trains_on_with_every_api():
    assert run_ranks(every_style) == [[(3, 1)] * 3] * 2
