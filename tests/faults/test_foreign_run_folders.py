"""Folders of sharded runs from a stranger: nothing that they name is called, imported or read from elsewhere."""

import os
import pickle
import random
import shutil
from contextlib import suppress

import pytest
import torch
from alterations import altered_bytes
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.fsdp import fully_shard

from amplab import amp


def saves(rank, path):
    torch.manual_seed(0)
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
    """Change the metadata of a folder, as torch reads and writes them."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


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
    for missing in ("rank_0.pt", ".metadata"):
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


def attack(folder, seeds):
    files = [".metadata", "rank_0.pt", *(path.name for path in folder.glob("*.distcp"))]
    whole = {name: (folder / name).read_bytes() for name in files}
    for seed in seeds:
        chance = random.Random(seed)
        name = files[seed % 2] if seed % 3 else chance.choice(files)
        (folder / name).write_bytes(altered_bytes(whole[name], chance))
        with suppress(amp.RunStateError):
            load(folder)
        (folder / name).write_bytes(whole[name])
    assert load(folder).weight.all()


def test_altered_bytes_are_refused_whole_or_harmless(folder):
    attack(folder, range(40))


@pytest.mark.long
def test_many_altered_bytes(folder):
    attack(folder, range(1000, 3000))


@pytest.mark.skipif(os.name != "posix", reason="makes pipes")
@pytest.mark.parametrize("name", ["rank_0.pt", ".metadata", "__0_0.distcp"])
def test_a_pipe_in_a_folder_is_refused(name, folder):
    """Reading one would wait for a writer."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(amp.RunStateError, match="a named pipe"):
        load(folder)
