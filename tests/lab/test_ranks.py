"""Two ranks under DistributedDataParallel, watched: what their logs say as one run."""

import os
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from amplab import GradScaler, amp, autocast, doctor, first_nonfinite, gradient_range, watch, xray
from amplab.diagnose import Findings, examination
from amplab.lab import (
    ExperimentConfig,
    Run,
    RunLog,
    Trainer,
    Watch,
    WatchCallback,
    load_run,
    rank_watch,
    run_store,
    watch_callback,
)
from amplab.lab.rank_exchange import RankExchange
from amplab.lab.run_log import FLUSH_SECONDS
from amplab.lab.run_store import RunStore
from amplab.parallel import DistributedDataParallel, convert_syncbn_model
from amplab.parallel.ranks import AgreedText, this_rank

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from ranks import rank_outcomes, run_ranks

STEPS, BAD_STEP = 6, 3
NAMES = ["wrapped", "inner", "synchronized", "O2"]


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
            if w.log_path is not None and len(w.history) == STEPS - 1:  # a rank that still runs is not lost
                assert not load_run(Path(w.log_path).parent).findings().named("rank-lost")
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


def with_synchronized_batchnorm(rank: int, folder: Path) -> list[list[float]]:
    """Train with statistics of all ranks: the batch of rank 1 that overflows makes the losses of both NaN."""
    model = convert_syncbn_model(net())
    parallel = DistributedDataParallel(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)
    step = autocast("cpu", dtype=torch.float16)(lambda batch: parallel(batch).float().square().mean())
    with watch(parallel, optimizer, scaler=scaler, step=step, log=folder) as w:
        for batch in w.batches(batches(rank)):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not w.failures, w.failures
    return [param.tolist() for param in model.parameters()]


def with_shards(rank: int, folder: Path) -> str:
    """Train a sharded model on batches of which one of rank 1 overflows; return what the row of that step says."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)
    step = autocast("cpu", dtype=torch.float16)(lambda batch: model(batch).float().square().mean())
    with warnings.catch_warnings(), watch(model, optimizer, scaler=scaler, step=step, log=folder, every=2) as w:
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in w.batches(batches(rank)):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.history.skipped_steps() == [BAD_STEP]
    assert {each.name for each in w.findings().harmful} <= {"nonfinite-loss"}, str(w.findings())
    assert "The loss of rank 1 was NaN." in w.findings().named("step-not-explained")[0].symptom
    return w.history.explanations[BAD_STEP].sentence


class OverflowInBackward(torch.autograd.Function):
    """The identity; its backward returns inf if ``overflows``."""

    @staticmethod
    def forward(ctx, value, overflows):
        ctx.overflows = overflows
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf") if ctx.overflows else grad, None


def with_shards_that_overflow_in_backward(rank: int) -> str:
    """Train a sharded model whose backward overflows between its layers, once, on rank 1; return the explanation."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    overflows = [False]
    model[1].register_forward_hook(lambda _module, _args, out: OverflowInBackward.apply(out, overflows[0]))
    fully_shard(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)
    step = autocast("cpu", dtype=torch.float16)(lambda batch: model(batch).float().square().mean())
    with warnings.catch_warnings(), watch(model, optimizer, scaler=scaler, step=step) as w:
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, batch in enumerate(w.batches(batches(0))):
            overflows[0] = (rank, number) == (1, BAD_STEP)
            optimizer.zero_grad()
            scaler.scale(w.loss(step(batch))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.history.skipped_steps() == [BAD_STEP]
    return w.history.explanations[BAD_STEP].sentence


def tools_of_one_rank(rank: int) -> None:
    """Call tools on rank 0 only, between two steps of both; nothing waits for rank 1, and both average as before."""
    model = net()
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        model.zero_grad()
        parallel(torch.randn(4, 8) + rank).square().mean().backward()
        if rank == 0:
            given = {"batch": torch.randn(4, 8), "loss": lambda out: out.square().mean()}
            assert first_nonfinite(parallel, **given) is None
            xray(parallel, **given)
            gradient_range(parallel, **given)
    for parameter in model.parameters():
        own = [torch.empty_like(parameter) for _ in range(2)]
        torch.distributed.all_gather(own, parameter.grad)
        assert torch.equal(*own)


def several_runs(rank: int, folder: Path) -> list[list[list[float]]]:
    tools_of_one_rank(rank)
    why = with_shards(rank, folder / "sharded")
    assert "a FSDPSequential, exchanges values with the other ranks in its forward" in why
    assert why.endswith(f"The loss of rank {rank} was {'NaN' if rank else 'finite'}."), why
    why = with_shards_that_overflow_in_backward(rank)
    assert why.endswith("0.bias is not finite, and the gradients of the parameters after it are."), why
    return [
        with_scaler(rank, folder / "wrapped", True),
        with_scaler(rank, folder / "inner", False),
        with_synchronized_batchnorm(rank, folder / "synchronized"),
        with_session(rank, folder / "O2"),
    ]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("ranks")
    first, second = run_ranks(several_runs, folder)
    assert first == second  # the weights of every rank are the same bits
    return {name: load_run(next((folder / name).iterdir())) for name in (*NAMES, "sharded")}


@pytest.mark.parametrize("name", ["wrapped", "inner", "O2"])
def test_the_joined_run_says_what_a_watch_says(opened, name):
    found = opened[name].findings()
    assert not found.named("rank-lost")
    (batchnorm,) = found.named("batchnorm-not-synchronized")
    assert batchnorm.evidence["batch_size"] == 4
    assert any(each.symptom.startswith("On rank 1: ") for each in found), str(found)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_skips_what_one_of_them_overflows(opened, name):
    run = opened[name]
    assert [each.history.skipped_steps() for each in run.ranks] == [[BAD_STEP], [BAD_STEP]]
    assert run.differences == ()


@pytest.mark.parametrize(
    ("name", "module", "op"),
    [
        ("wrapped", "module.0", "cast"),
        ("inner", "0", "cast"),
        ("synchronized", "module.0", "cast"),
        ("O2", "module", "cast"),
    ],
)
def test_the_run_says_which_rank_module_and_tensor_overflowed(opened, name, module, op):
    run = opened[name]
    (record,) = run.history.skips()
    assert record.first_nonfinite.startswith("rank 1: ")
    why = run.history.explanations[BAD_STEP]
    assert (why.rank, why.module, why.op) == (1, module, op)
    assert why.sentence.startswith("rank 1: ")
    assert "learning rate" not in why.sentence  # of a batch that is 1e5 times too large
    kinds = [each.history.explanations[BAD_STEP].kind for each in run.ranks]
    assert kinds[0] == "other-rank" != kinds[1]


def test_a_sharded_step_that_cannot_run_again_on_one_rank_says_so_and_names_the_rank(opened):
    run = opened["sharded"]
    (record,) = run.history.skips()
    assert record.first_nonfinite.startswith("rank 1: ")
    assert run.history.explanations[BAD_STEP].sentence.endswith("The loss of rank 1 was NaN.")
    (note,) = run.findings().named("step-not-explained")
    assert "on its own rank" in note.cause
    assert note.evidence["rank"] == 1
    (bad,) = run.findings().named("nonfinite-loss")
    assert "first_nonfinite" not in bad.remedy == note.remedy


def dies_in_its_loop(rank: int, folder: Path) -> None:
    """Train as one does; rank 1 is killed in the middle, after a checkpoint of each rank."""
    model = net()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)
    with watch(parallel, optimizer, scaler=scaler, log=folder / "run.jsonl") as w:
        for step, batch in enumerate(batches(0)):
            optimizer.zero_grad()
            time.sleep(1.5 * FLUSH_SECONDS * (step == BAD_STEP))  # the lines of a shorter time may be lost
            scaler.scale(w.loss(parallel(batch).square().mean())).backward()
            scaler.step(optimizer)
            scaler.update()
            path = folder / f"rank-{rank}.pt"
            amp.save_run_state(path, model=model, optimizer=optimizer, scaler=scaler, position=step + 1)
            if (rank, step) == (1, BAD_STEP):
                os.kill(os.getpid(), signal.SIGKILL)


def stops_answering(rank: int, folder: Path) -> str:
    """Train an experiment of the lab whose rank 1 takes no part in the second step until rank 0 has given up."""
    trainer = Trainer(ExperimentConfig(hidden=16), log=folder / "hung.jsonl", exchange=RankExchange(this_rank()))
    trainer.run(1)
    gave_up = torch.distributed.FileStore(str(folder / "gave-up"), 2)
    if rank == 1:
        gave_up.wait(["rank 0"])
        return ""
    distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    with suppress(RuntimeError):
        trainer.run(1)
    gave_up.set("rank 0", "")
    trainer.stop()
    trainer.wait()
    return trainer.failures[-1].text


def test_the_log_and_the_checkpoint_of_a_rank_that_dies_load(tmp_path):
    alive, killed = rank_outcomes(dies_in_its_loop, tmp_path)
    assert killed.exitcode == -signal.SIGKILL
    assert "Connection" in alive.error  # of gloo, which sees that it closes: not the timeout of the process group
    run = load_run(tmp_path / "run")
    assert [len(each.history) for each in run.ranks] == [BAD_STEP + 1, BAD_STEP + 1]
    (lost,) = run.findings().named("rank-lost")
    assert (lost.evidence["rank"], lost.evidence["last_step"]) == (1, BAD_STEP)
    assert (lost.severity, lost.certainty) == ("error", "certain")
    assert "Rank 0 stopped: RuntimeError" in lost.symptom
    for rank in range(2):
        model = net()
        state = amp.load_run_state(tmp_path / f"rank-{rank}.pt", model=model)
        assert state.position == BAD_STEP + 1


def test_a_rank_that_waits_in_vain_stops_with_a_message_after_the_timeout(tmp_path):
    waited, _ = run_ranks(stops_answering, tmp_path)
    assert waited.startswith(
        "The run failed at step 1.\nrank 0 of 2 stopped: another rank has ended, or did not answer"
    )
    assert [len(each.history) for each in load_run(tmp_path / "hung").ranks] == [1, 1]


class SlowLog(RunLog):
    """A log on a disk that takes its time to make a file."""

    def __init__(self, *args, **named) -> None:
        time.sleep(0.3)
        super().__init__(*args, **named)


def begins_with_another_launch(rank: int, folder: Path) -> list[Path | None]:
    """Begin runs, each in the moment in which the ranks of another launch begin one with the same log."""
    opened = []
    for number in range(3):
        (folder / f"{number}-{os.getpid()}").touch()
        while len([*folder.glob(f"{number}-*")]) < 4:
            time.sleep(0.001)
        store = RunStore(ExperimentConfig(), log=folder / f"run-{number}.jsonl", on_failure=print)
        with patch.object(run_store, "RunLog", SlowLog):
            store.note("begun", step=0)
        opened.append(store.log_path)
        store.close()
    return opened


def test_two_launches_that_begin_at_once_have_a_folder_each(tmp_path):
    with ThreadPoolExecutor(2) as launches:
        told = [*launches.map(lambda _: run_ranks(begins_with_another_launch, tmp_path), range(2))]
    for first, second in told:
        assert None not in (*first, *second)
        assert [log.parent for log in first] == [log.parent for log in second]
    assert len({log for ranks in told for logs in ranks for log in logs}) == 12


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def agree(rank: int, folder: Path) -> str:
    """Rank 0 is the first to ask, and its choice takes longer than rank 1 waits for it."""

    def choose() -> str:
        if rank == 0:
            (folder / "asked").touch()
            await_file(folder / "waited in vain")
        return f"of rank {rank}"

    if rank == 1:
        await_file(folder / "asked")
    agreed = AgreedText("place", choose, timeout=0.1).text
    (folder / "waited in vain").touch()
    return agreed


def test_ranks_wait_for_the_choice_of_the_first_one_only_so_long(tmp_path):
    assert run_ranks(agree, tmp_path) == ["of rank 1", "of rank 1"]


def trained_by_a_callback(rank: int, folder: Path) -> list[str]:
    callback, model = WatchCallback(log=folder), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    for batch in batches(rank)[:2]:
        callback.watch.loss(model(batch).square().mean()).backward()
        optimizer.step()
    callback.on_train_end()
    torch.distributed.destroy_process_group()
    first = callback.watch
    watch_callback._end_all()  # as when the program ends
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    callback.on_train_end()
    return [*first.failures, *callback.watch.failures]


def test_a_watch_of_a_callback_that_ended_in_order_is_not_ended_again_without_its_group(tmp_path: Path):
    assert run_ranks(trained_by_a_callback, tmp_path) == [[], []]


def used_on_rank_0_alone_before(rank: int, folder: Path, first: int) -> list[list[str]]:
    """Return what the tools say about ranks, and the folder of the log, when both ranks use them; one calls first."""
    rank_watch._WAIT = 300.0  # for the other rank, on a machine however busy
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def examine(patience: float) -> Findings:
        examination._RANKS_WAIT = patience
        return doctor(model, torch.ones(4, 8), step=lambda x: model(x).square().mean(), optimizer=optimizer)

    def train(called: nn.Module) -> Watch:
        with watch(model, optimizer, log=folder) as w:
            for _ in range(STEPS):
                optimizer.zero_grad()
                w.loss(called(torch.ones(4, 8)).square().mean()).backward()
                optimizer.step()
        return w

    if rank == 0:
        examine(0.1)
        train(model)
    parallel, told = nn.parallel.DistributedDataParallel(model), []  # with the weights of rank 0
    for number in range(2):
        if rank != first:
            await_file(folder / f"{number}")
        (folder / f"{number}").touch()
        told += about_ranks(examine(60.0))
        w = train(parallel)
        told += [*about_ranks(w.findings()), str(w.log_path.parent)]
        torch.distributed.barrier()
    return told


def about_ranks(findings: Findings) -> list[str]:
    return [each for each in (*(found.name for found in findings), *findings.looked_at) if "rank" in each]


@pytest.mark.parametrize("first", [0, 1])
def test_after_tools_on_one_rank_alone_those_of_all_ranks_belong_together(tmp_path: Path, first: int):
    ranks = run_ranks(used_on_rank_0_alone_before, tmp_path, first)
    for rank, told in enumerate(ranks):
        compared = f"compared with rank {1 - rank}"
        assert told == [compared, told[1], compared, told[3]]
    assert ranks[0][1::2] == ranks[1][1::2]
    assert len({*ranks[0][1::2]}) == 2
    assert sorted(len(load_run(each).ranks) for each in {log.parent for log in tmp_path.glob("*/*.jsonl")}) == [1, 2, 2]


def trains_alone(rank: int, folder: Path) -> tuple[list[str], Path]:
    """Rank 1 begins when rank 0 has ended its loop: no step waits for another rank."""
    rank_watch._WAIT = 300.0
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 1:
        await_file(folder / "ended")
    with watch(model, optimizer, log=folder) as w:
        for batch in batches(rank):
            w.loss(model(batch).square().mean()).backward()
            optimizer.step()
    (folder / "ended").touch()
    found = w.findings()
    torch.distributed.barrier()
    return [each.name for each in found if "rank" in each.name], w.log_path.parent


def test_a_rank_that_begins_when_another_has_ended_the_same_loop_belongs_to_it(tmp_path: Path):
    first, second = run_ranks(trains_alone, tmp_path)
    assert first == second
    assert first[0] == ["weights-differ-by-rank"]
