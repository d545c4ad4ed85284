"""A sharded run saved by two ranks: it continues bitwise on two ranks, and loads bitwise on one and on three."""

import os
import shutil
import signal
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import rank_outcomes, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from amplab import GradScaler, amp, autocast, optimizers
from amplab.amp.run_state import sharded_folder
from amplab.scalers import is_sharded

SAVED_AT, ALL = 3, 6
CASES = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "FusedAdam": (optimizers.FusedAdam, {}),
}


def new_run(name):
    """A model whose last layer is frozen, so that it has no state; its optimizer and its scaler."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 3), nn.Linear(3, 3))
    if dist.is_initialized():
        for part in model:
            fully_shard(part)
        fully_shard(model)
    model[4].requires_grad_(False)
    kind, options = CASES[name]
    return model, kind(model.parameters(), lr=0.01, **options), GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def train(rank, model, optimizer, scaler, steps):
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(8, 8) + step + rank
        with autocast("cpu", dtype=torch.float16):
            loss = model(inputs).float().square().mean() * (float("inf") if step == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def bits(model, optimizer, scaler):
    """Every value of a run, whole: weights, buffers, optimizer state by parameter, the scale."""
    state = optimizer.state_dict()["state"]
    tensors = {
        **model.state_dict(),
        **{f"{n}.{key}": value for n, each in state.items() for key, value in each.items()},
    }
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }
    return whole, scaler.state_dict()


def equal(left, right):
    same = left[0].keys() == right[0].keys() and all(torch.equal(left[0][name], right[0][name]) for name in left[0])
    return same and left[1] == right[1]


def saves_and_continues(rank, folder):
    found = {}
    for name in CASES:
        run = new_run(name)
        torch.manual_seed(rank)
        train(rank, *run, range(SAVED_AT))
        model, optimizer, scaler = run
        for position in (0, SAVED_AT) if name == "SGD" else (SAVED_AT,):  # the second replaces the first
            amp.save_run_state(folder / name, model=model, optimizer=optimizer, scaler=scaler, position=position)
        saved = bits(*run)
        train(rank, *run, range(SAVED_AT, ALL))
        other = model, optimizer, scaler = new_run(name)
        state = amp.load_run_state(folder / name, model=model, optimizer=optimizer, scaler=scaler)
        loaded = equal(bits(*other), saved)
        train(rank, *other, range(state.position, ALL))
        found[name] = loaded, equal(bits(*other), bits(*run)), state.notes
        torch.save(saved, folder / f"{name}_{rank}.pt")
    found["apex"] = apex(folder / "apex", rank)
    found["refused"] = refused(folder)
    found["damaged"] = damaged(rank, folder / "Adam")
    found["others"] = others_folders(folder / "others")
    (folder / "backup").mkdir(exist_ok=True)
    found["backup"] = the_backup_of_a_user(folder / "backup")
    found["link"] = through_a_link(folder / "linked")
    found["averages"] = averages(rank, folder / "averages")
    found["kept"] = position_after_two_failed_renames(rank, folder)
    found["stopped"] = [after_an_error_of_one_rank(rank, folder, error) for error in (KeyboardInterrupt, OSError)]
    return found


def apex(path, rank):
    """The same at O1."""

    def prepared():
        model, optimizer, _ = new_run("Adam")
        session = amp.Session()
        session.initialize(model, optimizer, opt_level="O1", verbosity=0, dynamic_init_scale=1024.0)
        return model, optimizer, session

    def train(model, optimizer, session, steps):
        for step in steps:
            with (
                session.casting(),
                session.scale_loss(model(torch.randn(8, 8) + step).square().mean(), optimizer) as loss,
            ):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run, other = prepared(), prepared()
    torch.manual_seed(rank)
    train(*run, range(2))
    amp.save_run_state(path, model=run[0], optimizer=run[1], amp=run[2])
    train(*run, range(2, 4))
    amp.load_run_state(path, model=other[0], optimizer=other[1], amp=other[2])
    train(*other, range(2, 4))
    return equal(bits(*run), bits(*other))


def refused(folder):
    """What does not fit is refused on every rank, with nothing loaded; a value that one rank cannot save, too."""
    model, optimizer, scaler = new_run("SGD")
    before = bits(model, optimizer, scaler)
    larger = fully_shard(nn.Linear(9, 3))
    messages = []
    for call in (
        lambda: amp.load_run_state(folder / "Adam", model=larger),
        lambda: amp.load_run_state(folder / "missing", model=model),
        lambda: amp.save_run_state(folder / "bad", model=model, extra=object() if dist.get_rank() else 1),
    ):
        try:
            call()
        except (amp.RunStateError, OSError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages, equal(before, bits(model, optimizer, scaler)), (folder / "bad").exists()


def refused_by_one(rank, folder):
    """What rank 1 alone refuses before anything is exchanged; return what is raised, what is there, and what loads."""
    model, optimizer, scaler = new_run("SGD")
    run = {"model": model, "optimizer": optimizer, "scaler": scaler}
    amp.save_run_state(folder / "run", **run, position=7)
    own = folder / f"{rank}"
    own.mkdir()
    if rank == 1:
        (own / "file").write_text("of the user")
    else:
        (own / "file").mkdir()
        (own / "run").mkdir()
    started = GradScaler("cpu")
    started.scale(model(torch.ones(8, 8)).sum()).backward()
    started.unscale_(optimizer)
    if rank == 0:
        started.update()
    generator = np.random.get_bit_generator()
    calls = {
        "missing": lambda: amp.load_run_state(own / "run", **run),
        "a file": lambda: amp.load_run_state(own / "file", **run),
        "load": lambda: amp.load_run_state(folder / "run", **run, amp=None if rank == 0 else object()),
        "path": lambda: amp.save_run_state(folder / ("new" if rank == 0 else "\0"), **run),
        "scaler": lambda: amp.save_run_state(folder / "new", model=model, optimizer=optimizer, scaler=started),
        "optimizer": lambda: amp.save_run_state(folder / "new", optimizer=optimizer, amp=rank or None),
        "generator": lambda: amp.save_run_state(folder / "new", **run),
    }
    raised = {}
    for name, call in calls.items():
        if (name, rank) == ("generator", 1):
            np.random.set_bit_generator(np.random.PCG64(0))
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            raised[name] = type(error).__name__, str(error)
    np.random.set_bit_generator(generator)
    dist.barrier()
    return raised, (folder / "new").exists(), amp.load_run_state(folder / "run", **run).position


def averages(rank, folder):
    """Save DTensors that belong to no model, on both ranks or one, and as earlier versions did; return what is read."""
    model, _, _ = new_run("SGD")
    average = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    plain = {name: value.full_tensor() if is_sharded(value) else value for name, value in average.items()}
    folder.mkdir(exist_ok=True)
    messages = []
    for given in (
        {"model": model, "extra": {"ema": average}},
        {"model": model, "position": [3, average["0.weight"]]},
        {"model": model, "extra": {"ema": average if rank else plain}},
        {"extra": {"ema": average}},
    ):
        with pytest.raises(amp.RunStateError) as info:
            amp.save_run_state(folder / "run", **given)
        messages.append(str(info.value))
    dist.barrier()
    left = sorted(each.name for each in folder.iterdir())
    with mock.patch.object(sharded_folder, "refuse_other_shards"):  # which earlier versions had not
        extra = {"ema": average, "none": torch.empty(2, device="meta")}
        amp.save_run_state(folder / "run", model=model, extra=extra)
    return messages, left, *averages_read(folder / "run", model)


def averages_read(path, model):
    """Return whether the averages are whole and equal those saved, the device of a tensor without values, the notes."""
    state = amp.load_run_state(path, model=model)
    read = state.extra["ema"]
    whole = {name: value.full_tensor() if is_sharded(value) else value for name, value in model.state_dict().items()}
    same = all(type(value) is torch.Tensor and torch.equal(value, whole[name] * 0.5) for name, value in read.items())
    return same and read.keys() == whole.keys(), state.extra["none"].device.type, state.notes


DAMAGED = ("__0_0.distcp", "__1_0.distcp", ".metadata", "rank_1.pt")


def damaged(rank, path):
    """Flip a bit of each of `DAMAGED`, then remove it; return what each load raises, and whether nothing was loaded."""
    model, optimizer, scaler = new_run("Adam")
    before = bits(model, optimizer, scaler)
    messages = {}
    for name in DAMAGED:
        file = path / name
        whole = file.read_bytes()
        for how in ("altered", "lost"):
            dist.barrier()
            if rank == 0 and how == "altered":
                at = len(whole) // 2
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            elif rank == 0:
                file.unlink()
            dist.barrier()
            with pytest.raises(amp.RunStateError) as info:
                amp.load_run_state(path, model=model, optimizer=optimizer, scaler=scaler)
            messages[name, how] = str(info.value)
        if rank == 0:
            file.write_bytes(whole)
    dist.barrier()
    return messages, equal(before, bits(model, optimizer, scaler))


OTHERS = {
    "a user's folder": ("run", "notes.txt"),
    "one in place of a previous run": (".run.previous", "notes.txt"),
    "a checkpoint of torch": ("run", ".metadata"),
    "a saved run with a file of the user's": ("run", "config.json"),
}


def others_folders(folder):
    """Save where each of `OTHERS` is; return what is raised, and whether the file is still there."""
    model, _, _ = new_run("SGD")
    found = {}
    for number, (what, (name, file)) in enumerate(OTHERS.items()):
        path = folder / str(number) / "run"
        other = path.with_name(name) / file
        if dist.get_rank() == 0:
            other.parent.mkdir(parents=True)
        dist.barrier()
        if file == "config.json":
            amp.save_run_state(path, model=model)
        if dist.get_rank() == 0:
            other.write_text("of the user")
        dist.barrier()
        with pytest.raises((OSError, amp.RunStateError)) as info:
            amp.save_run_state(path, model=model)
        found[what] = str(info.value), other.read_text()
    return found


def the_backup_of_a_user(folder):
    """Rename the run of the epoch before, and save the next one; return the positions that are there in the end."""
    model, _, _ = new_run("SGD")
    path, backup = folder / "run", folder / "run.previous"
    for epoch in range(3):
        if dist.get_rank() == 0 and path.exists():
            shutil.rmtree(backup, ignore_errors=True)
            path.rename(backup)
        dist.barrier()
        amp.save_run_state(path, model=model, position=epoch)
    return [amp.load_run_state(each, model=model).position for each in (backup, path)]


def through_a_link(folder):
    """Save three times to a link whose target does not exist at first; return what is read and what is there."""
    model, _, _ = new_run("SGD")
    link, target = folder / "run", folder / "scratch" / "saved"
    if dist.get_rank() == 0:
        target.parent.mkdir(parents=True)
        link.symlink_to(target)
    dist.barrier()
    read = []
    for position in range(3):
        amp.save_run_state(link, model=model, position=position)
        read.append(amp.load_run_state(link, model=model).position)
    return read, link.is_symlink(), sorted(each.name for each in target.parent.iterdir())


def position_after_two_failed_renames(rank, folder):
    """Save 1, end between the two renames of the next save, and fail before the second rename of another one."""
    model, _, _ = new_run("SGD")
    path = folder / "kept"
    amp.save_run_state(path, model=model, position=1)
    if rank == 0:
        path.rename(folder / ".kept.previous")
    dist.barrier()
    replace = os.replace

    def fails(source, target):
        if target == path:
            raise OSError("no second rename")
        replace(source, target)

    with mock.patch("os.replace", fails), pytest.raises((OSError, amp.RunStateError), match="no second rename"):
        amp.save_run_state(path, model=model, position=2)
    return amp.load_run_state(path, model=model).position


def after_an_error_of_one_rank(rank, folder, error):
    """Save and load with an error of rank 1 in what torch calls; return what is raised, and the position that stays."""
    model, _, _ = new_run("SGD")
    path = folder / "stopped"
    amp.save_run_state(path, model=model, position=1)
    raised = []
    save = partial(amp.save_run_state, path, model=model, position=2)
    load = partial(amp.load_run_state, path, model=model)
    calls = {
        "torch.distributed.checkpoint.filesystem._FileSystemWriter.prepare_local_plan": save,
        "torch.distributed.checkpoint.filesystem.FileSystemReader.prepare_local_plan": load,
        "amplab.amp.run_state.shard_writer.checksum": save,
    }
    for stopped, call in calls.items():
        stop = mock.patch(stopped, side_effect=error("stop"))
        with stop if rank == 1 else nullcontext(), pytest.raises((KeyboardInterrupt, amp.RunStateError)) as info:
            call()
        raised.append(info.type)
    return raised, amp.load_run_state(path, model=model).position


def killed_in_the_removal(rank, folder):
    """Save twice, and be killed when the folder of the first save is about to be removed."""
    model, _, _ = new_run("SGD")
    amp.save_run_state(folder / "run", model=model, position="older")
    remove = shutil.rmtree

    def kill(removed, **options):
        if os.path.exists(removed):
            os.kill(os.getpid(), signal.SIGKILL)
        remove(removed, **options)

    with mock.patch("shutil.rmtree", kill):
        amp.save_run_state(folder / "run", model=model, position="newer")


def saves_anew(rank, folder):
    """Save; return what is there."""
    amp.save_run_state(folder / "run", model=new_run("SGD")[0])
    return sorted(each.name for each in folder.iterdir())


def loads(rank, folder):
    return {name: loaded(folder, name, rank if rank < 2 else 0) for name in CASES}


def loaded(folder, name, rank=0):
    """Load, and compare with what this rank saved: each has its own statistics of BatchNorm. A third takes 0's."""
    run = model, optimizer, scaler = new_run(name)
    state = amp.load_run_state(folder / name, model=model, optimizer=optimizer, scaler=scaler)
    return equal(bits(*run), torch.load(folder / f"{name}_{rank}.pt")), state.position, state.notes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def saved(folder):
    return run_ranks(saves_and_continues, folder)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_continue_bitwise(saved, name):
    assert [each[name] for each in saved] == [(True, True, ())] * 2


def test_O1_continues_bitwise(saved):
    assert [each["apex"] for each in saved] == [True, True]


def test_what_does_not_fit_is_refused_on_every_rank(saved):
    for rank, each in enumerate(saved):
        (shapes, missing, bad), unchanged, exists = each["refused"]
        assert "nothing was loaded" in shapes
        assert "there is no such file or folder" in missing
        assert "object" in bad
        assert ("rank 1" in bad) == (rank == 0)
        assert unchanged
        assert not exists


def test_what_one_rank_refuses_before_anything_is_exchanged_is_refused_on_every_rank(tmp_path):
    (first, *kept), (second, *kept_by_second) = run_ranks(refused_by_one, tmp_path)
    assert kept == kept_by_second == [False, 7]
    for name, found in {"missing": "nothing", "a file": "a file"}.items():
        for kind, said in (first[name], second[name]):
            assert kind == "RunStateError"  # no FileNotFoundError, after which a program starts anew
            assert f"rank 0 finds a folder there, and rank 1 {found}" in said
    own = {"load": "TypeError", "path": "ValueError", "scaler": "RuntimeError", "optimizer": "TypeError"}
    for name, kind in {**own, "generator": "RunStateError"}.items():
        assert second[name][0] == kind
        assert first[name] == (
            "RunStateError",
            f"Another rank failed, so nothing was done here. rank 1: {kind}: {second[name][1]}",
        )


def test_a_run_whose_removal_was_killed_is_not_continued(tmp_path):
    (outcome,) = rank_outcomes(killed_in_the_removal, tmp_path, world_size=1)
    assert outcome.exitcode == -signal.SIGKILL
    model, _, _ = new_run("SGD")
    assert amp.load_run_state(tmp_path / "run", model=model).position == "newer"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        amp.load_run_state(tmp_path / "run", model=model)
    assert run_ranks(saves_anew, tmp_path, world_size=1) == [["run"]]


def test_a_tensor_whose_sharding_no_load_would_know_is_refused_on_every_rank_before_anything_is_written(saved):
    for rank, each in enumerate(saved):
        (extra, position, of_one, without_model), left, *_ = each["averages"]
        assert left == []
        assert extra.startswith("extra['ema']['0.weight'] is a DTensor: expected")
        assert "model=[model, ema]" in extra
        assert position.startswith("position[1] is a DTensor")
        assert of_one.startswith("" if rank else "Another rank failed")
        assert "extra['ema']['0.weight'] is a DTensor" in of_one
        assert without_model == extra


@pytest.mark.usefixtures("saved")
def test_such_tensors_of_an_earlier_version_are_whole_and_a_note_says_so(saved, folder):
    note = "extra['ema']['0.weight'] and 7 more of an earlier version: a DTensor when saved, a whole tensor now"
    found = [each["averages"][2:] for each in saved]
    model, _, _ = new_run("SGD")
    assert [*found, averages_read(folder / "averages" / "run", model)] == [(True, "meta", (note,))] * 3


def test_a_damaged_or_lost_file_is_refused_on_every_rank(saved):
    for each in saved:
        messages, unchanged = each["damaged"]
        assert len(messages) == 2 * len(DAMAGED)
        assert unchanged
        for (name, _), message in messages.items():
            assert name in message


@pytest.mark.parametrize("what", OTHERS)
def test_a_folder_with_something_else_is_not_replaced(saved, what):
    for each in saved:
        message, text = each["others"][what]
        assert f"holds {OTHERS[what][1]}, which save_run_state has not written" in message
        assert text == "of the user"


def test_a_backup_beside_it_stays(saved):
    assert [each["backup"] for each in saved] == [[1, 2], [1, 2]]


def test_a_link_stays_and_its_target_is_written(saved):
    assert [each["link"] for each in saved] == [([0, 1, 2], True, ["saved"])] * 2


def test_a_save_keeps_the_folder_of_an_interrupted_rename_until_its_own_is_in_place(saved):
    assert [each["kept"] for each in saved] == [1, 1]


def test_an_interrupt_or_an_error_within_torch_is_raised_as_such_and_the_saved_run_stays(saved):
    for each in saved:
        assert each["stopped"] == [([KeyboardInterrupt] * 3, 1), ([amp.RunStateError] * 3, 1)]


@pytest.mark.usefixtures("saved")
def test_loads_bitwise_on_three_ranks(folder):
    for rank, each in enumerate(run_ranks(loads, folder, world_size=3)):
        for same, position, notes in each.values():
            assert (same, position, len(notes)) == (True, SAVED_AT, int(rank == 2))


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("name", CASES)
def test_loads_bitwise_in_one_process(folder, name):
    assert loaded(folder, name) == (True, SAVED_AT, ())


@pytest.mark.usefixtures("saved")
def test_a_rename_that_was_interrupted_loses_nothing(folder):
    (folder / "SGD").rename(folder / ".SGD.previous")
    try:
        assert loaded(folder, "SGD")[0]
    finally:
        (folder / ".SGD.previous").rename(folder / "SGD")
