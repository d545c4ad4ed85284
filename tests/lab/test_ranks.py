"""Two ranks under DistributedDataParallel, watched: what their logs say as one run."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from amplab import GradScaler, amp, autocast, watch
from amplab.lab import Run, load_run
from amplab.parallel import convert_syncbn_model

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import run_ranks

STEPS, BAD_STEP = 6, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batches(rank: int) -> list[torch.Tensor]:
    """Return batches that are harmless but for one of rank 1, at which float16 overflows in the first layer."""
    torch.manual_seed(rank)
    given = [torch.randn(4, 8) for _ in range(STEPS)]
    if rank == 1:
        given[BAD_STEP] *= 1e5
    return given


def with_scaler(rank: int, folder: Path, watch_wrapped: bool) -> list[list[float]]:
    model = net()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)

    def step(batch: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=torch.float16):
            return parallel(batch).float().square().mean()

    watched = watch(parallel if watch_wrapped else model, optimizer, scaler=scaler, step=step, log=folder)
    with watched as w:
        for batch in w.batches(batches(rank)):
            optimizer.zero_grad()
            loss = w.loss(step(batch))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not w.failures, w.failures
    return [param.tolist() for param in model.parameters()]


def with_session(rank: int, folder: Path) -> list[list[float]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    parallel = nn.parallel.DistributedDataParallel(model)
    with watch(
        parallel, optimizer, scaler=amp, step=lambda batch: parallel(batch).float().square().mean(), log=folder
    ) as w:
        for batch in w.batches(batches(rank)):
            optimizer.zero_grad()
            with amp.scale_loss(parallel(batch).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    amp.reset()
    assert not w.failures, w.failures
    return [param.float().tolist() for param in model.parameters()]


def with_synchronized_batchnorm(rank: int, folder: Path) -> str:
    """Train on a batch that overflows; return why the step was not explained."""
    model = convert_syncbn_model(net())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)
    step = autocast("cpu", dtype=torch.float16)(lambda batch: model(batch).float().square().mean())
    with warnings.catch_warnings(), watch(model, optimizer, scaler=scaler, step=step, log=folder) as w:
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in w.batches([torch.full((4, 8), 1e6)]):
            scaler.scale(w.loss(step(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
    return w.failures[0]


def several_runs(rank: int, folder: Path) -> list[list[list[float]]]:
    failure = with_synchronized_batchnorm(rank, folder / "synchronized")
    assert "SyncBatchNorm, exchanges values with the other ranks" in failure
    return [
        with_scaler(rank, folder / "wrapped", True),
        with_scaler(rank, folder / "inner", False),
        with_session(rank, folder / "O2"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("ranks")
    first, second = run_ranks(several_runs, folder)
    assert first == second  # the weights of every rank are the same bits
    return {name: load_run(next((folder / name).iterdir())) for name in ("wrapped", "inner", "O2")}


@pytest.mark.parametrize("name", ["wrapped", "inner", "O2"])
def test_every_rank_skips_what_one_of_them_overflows(runs, name):
    run = runs[name]
    assert [each.history.skipped_steps() for each in run.ranks] == [[BAD_STEP], [BAD_STEP]]
    assert run.differences == ()


@pytest.mark.parametrize(
    ("name", "module", "op"), [("wrapped", "module.0", "cast"), ("inner", "0", "cast"), ("O2", "module", "cast")]
)
def test_the_run_says_which_rank_module_and_tensor_overflowed(runs, name, module, op):
    run = runs[name]
    (record,) = run.history.skips()
    assert record.first_nonfinite.startswith("rank 1: ")
    why = run.history.explanations[BAD_STEP]
    assert (why.rank, why.module, why.op) == (1, module, op)
    assert why.sentence.startswith("rank 1: ")
    kinds = [each.history.explanations[BAD_STEP].kind for each in run.ranks]
    assert kinds[0] == "other-rank" != kinds[1]
