"""Damaged folders of sharded runs are refused, whatever is damaged; those of a stranger run, import, read nothing."""

import os
import pickle
import random
import shutil
import zlib
from contextlib import suppress

import pytest
import torch
from alterations import altered_bytes
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.fsdp import fully_shard

from amplab import amp

READ = [".metadata", "rank_0.pt", "__0_0.distcp", "__1_0.distcp"]
"""What one process reads of the folder of two ranks, besides checksums.pt."""


def saves(rank, path, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    amp.save_run_state(path, model=model, optimizer=optimizer)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded") / "run"
    run_ranks(saves, path)
    return path


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    path = tmp_path_factory.mktemp("another") / "run"
    run_ranks(saves, path, 1)
    return path


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


def load(folder):
    """Load into an unsharded model; the weights are zeros before."""
    model = nn.Linear(5, 3)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adam(model.parameters())
    try:
        amp.load_run_state(folder, model=model, optimizer=optimizer)
    except amp.RunStateError:
        assert not model.weight.any()
        assert not optimizer.state
        raise
    return model


def edit(folder, change):
    """Change the metadata of a folder, as torch reads and writes them, and the checksums with them."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    seal(folder)


def seal(folder):
    """Write checksums that are valid again, as whoever alters a folder on purpose does."""
    state = torch.load(folder / "checksums.pt")
    state["checksums"] = {name: zlib.crc32((folder / name).read_bytes()) for name in state["checksums"]}
    torch.save(state, folder / "checksums.pt")


class Plant:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_the_folder_loads_as_it_is(folder):
    assert load(folder).weight.all()


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "version", "state_dict_metadata"])
def test_planted_code_never_runs(folder, tmp_path, place):
    edit(folder, lambda metadata: setattr(metadata, place, Plant(tmp_path / "planted")))
    with pytest.raises(amp.RunStateError, match=r"it names (posix|nt)\.mkdir") as refusal:
        load(folder)
    assert "nothing was loaded" in str(refusal.value)
    assert not (tmp_path / "planted").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "planted").exists()  # pickle alone runs it


def test_an_entry_that_torch_would_unpickle_is_refused(folder, tmp_path):
    """torch.distributed.checkpoint reads what is not a tensor by torch.load(weights_only=False)."""

    def change(metadata):
        (name, _), *_ = metadata.state_dict_metadata.items()
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        file = folder / next(info.relative_path for info in metadata.storage_data.values())
        for index in [index for index in metadata.storage_data if index.fqn == name]:
            info = metadata.storage_data.pop(index)
        with file.open("ab") as shards:
            info.offset = shards.tell()
            torch.save(Plant(tmp_path / "planted"), shards)
            info.length, info.relative_path = shards.tell() - info.offset, file.name
        metadata.storage_data[MetadataIndex(name)] = info

    edit(folder, change)
    with pytest.raises(amp.RunStateError, match="BytesStorageMetadata"):
        load(folder)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("file", ["../secret.pt", "/etc/passwd", "a/../../b", "..\\secret.pt"])
def test_files_outside_of_the_folder_are_not_read(folder, file):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = file

    edit(folder, change)
    with pytest.raises(amp.RunStateError, match="expected a part of a file in the folder"):
        load(folder)


def test_a_folder_without_its_parts_is_refused(folder):
    for missing in ("rank_0.pt", ".metadata", "checksums.pt", "__1_0.distcp"):
        kept = (folder / missing).read_bytes()
        (folder / missing).unlink()
        with pytest.raises(amp.RunStateError, match=missing.replace(".", r"\.")):
            load(folder)
        (folder / missing).write_bytes(kept)
    assert load(folder).weight.all()


def test_parts_that_do_not_cover_a_tensor_are_refused(folder):
    def change(metadata):
        for each in metadata.state_dict_metadata.values():
            each.chunks.pop()

    edit(folder, change)
    with pytest.raises(amp.RunStateError, match="do not make up its"):
        load(folder)


def test_one_flipped_bit_is_refused(folder):
    for seed in range(60):
        chance = random.Random(seed)
        file = folder / chance.choice(READ)
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(amp.RunStateError, match=rf"{file.name}\b.* from an intact source"):
            load(folder)
        file.write_bytes(whole)
    assert load(folder).weight.all()


@pytest.mark.parametrize("name", READ)
def test_a_file_of_another_save_is_refused(folder, another, name):
    shutil.copy(another / name, folder / name)
    with pytest.raises(amp.RunStateError, match=rf"the bytes of {name} do not match .* or of another save"):
        load(folder)


@pytest.mark.parametrize("name", READ)
def test_a_file_without_a_checksum_is_refused(folder, name):
    state = torch.load(folder / "checksums.pt")
    del state["checksums"][name]
    torch.save(state, folder / "checksums.pt")
    with pytest.raises(amp.RunStateError, match=name):
        load(folder)


@pytest.mark.parametrize("state", [{"amplab_run_state": 1}, {"amplab_run_state": 1, "checksums": [1]}])
def test_a_file_of_checksums_without_checksums_is_refused(folder, state):
    torch.save(state, folder / "checksums.pt")
    with pytest.raises(amp.RunStateError, match=r"checksums\.pt does not exist or holds no checksums"):
        load(folder)


def attack(folder, seeds):
    """Alter files, by turns without their checksums, which is always refused, and with them."""
    whole = {name: (folder / name).read_bytes() for name in (*READ, "checksums.pt")}
    for seed in seeds:
        chance = random.Random(seed)
        name = READ[seed % 2] if seed % 3 else chance.choice(READ)
        altered = altered_bytes(whole[name], chance)
        (folder / name).write_bytes(altered)
        if seed % 4:
            seal(folder)
        refused = (
            suppress(amp.RunStateError) if seed % 4 or altered == whole[name] else pytest.raises(amp.RunStateError)
        )
        with refused:
            load(folder)
        for each in (name, "checksums.pt"):
            (folder / each).write_bytes(whole[each])
    assert load(folder).weight.all()


def test_altered_bytes_are_refused_whole_or_harmless(folder):
    attack(folder, range(40))


@pytest.mark.long
def test_many_altered_bytes(folder):
    attack(folder, range(1000, 3000))


@pytest.mark.skipif(os.name != "posix", reason="makes pipes")
@pytest.mark.parametrize("name", [*READ, "checksums.pt"])
def test_a_pipe_in_a_folder_is_refused(name, folder):
    """Reading one would wait for a writer."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(amp.RunStateError, match="a named pipe"):
        load(folder)
