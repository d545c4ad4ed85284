"""The file of a run state: what it can hold, and what is refused in its place."""

import re
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from amplab import amp
from amplab.amp.run_state import file_format, shard_reader


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32))


def saved_model(path):
    model = network()
    amp.save_run_state(path, model=model)
    return model


def resave(path, **changes):
    """Write a run state again with other entries, as a program that edits checkpoints would."""
    state = torch.load(path, weights_only=True)
    torch.save({**state, **changes}, path)


def attributed(value, kind):
    value.kind = kind
    return value


def endless():
    inner = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"best": np.float64(0.5)}, "extra['best'] is a numpy.float64"),
        ([1, {"x": (nn.Linear(1, 1),)}], "extra[1]['x'][0] is a torch.nn.modules.linear.Linear"),
        ({frozenset(): 1}, "the key frozenset() of extra is a builtins.frozenset"),
        ({"cursor": b""}, "extra['cursor'] is b'', without a byte"),
        ([-(2**2039)], "extra[0] is an int of 2,040 bits"),
        ([attributed(torch.ones(2), len)], "extra[0].kind is a builtins.builtin_function_or_method"),
        ([attributed(nn.Parameter(torch.ones(2)), np.float64(0.5))], "extra[0].kind is a numpy.float64"),
        (attributed(OrderedDict(a=1), object()), "extra.kind is a builtins.object"),
        (endless(), "contains itself, or has more than 100 levels: save a flat copy"),
    ],
)
def test_what_a_file_cannot_hold_is_named(tmp_path, extra, where):
    with pytest.raises(amp.RunStateError, match=re.escape(where)):
        amp.save_run_state(tmp_path / "run.pt", extra=extra)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "extra",
    [b"a", 2**2039 - 1, -(2**2038), attributed(nn.Parameter(torch.ones(2)), "head"), attributed(OrderedDict(a=1), 2.5)],
    ids=repr,
)
def test_what_a_file_can_hold_comes_back(path, extra):
    amp.save_run_state(path, extra=extra)
    found = amp.load_run_state(path).extra
    assert torch.equal(found, extra) if isinstance(extra, torch.Tensor) else found == extra
    assert getattr(found, "kind", None) == getattr(extra, "kind", None)


def test_a_file_that_would_not_load_again_does_not_replace_one_that_does(path, monkeypatch):
    """Whatever torch writes and does not read, in this version or another."""
    saved_model(path)
    before = path.read_bytes()
    monkeypatch.setattr(file_format, "_unloadable", lambda value, where: iter(()))
    with pytest.raises(amp.RunStateError, match="cannot read"):
        amp.save_run_state(path, extra=np.float64(0.5))
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_file_cut_off_is_refused(path, share):
    saved_model(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(amp.RunStateError, match=r"run\.pt (is empty|is truncated at \d+ bytes)"):
        amp.load_run_state(path, model=network())


def test_a_flipped_bit_is_found(path):
    model = saved_model(path)
    content = bytearray(path.read_bytes())
    place = content.index(model[0].weight.detach().numpy().tobytes())
    content[place + 100] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path)["models"][0]["0.weight"], model[0].weight)  # torch does not mind
    with pytest.raises(amp.RunStateError, match=r"is damaged: the bytes of .*/data/\d+ do not match their checksum"):
        amp.load_run_state(path, model=network())


def test_checksums_are_written_even_if_torch_disables_them(path):
    torch.serialization.set_crc32_options(False)
    try:
        amp.save_run_state(path, position=torch.arange(100))
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(amp.load_run_state(path).position, torch.arange(100))


def write_text(path):
    path.write_text("epoch 3\n")


def write_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "epoch 3")


def write_model(path):
    torch.save(network(), path)


def write_weights(path):
    torch.save(network().state_dict(), path)


def write_tensor(path):
    torch.save(torch.ones(3), path)


def write_newer(path):
    amp.save_run_state(path)
    resave(path, amplab_run_state=2, amplab="9.9")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_text, ["is not a zip archive"]),
        (write_archive, ["torch.load(weights_only=True) cannot read", "expected a file of save_run_state"]),
        (write_model, ["torch.load(weights_only=True) cannot read"]),
        (
            write_weights,
            ["save_run_state did not write", "the keys '0.weight', '0.bias'", "and 1 more", "load_state_dict"],
        ),
        (write_tensor, ["save_run_state did not write", "a Tensor"]),
        (write_newer, ["has format 2, written by amplab 9.9", "reads format 1"]),
    ],
)
def test_a_foreign_file_is_refused(path, write, said):
    write(path)
    with pytest.raises(amp.RunStateError) as refusal:
        amp.load_run_state(path, model=network())
    for words in said:
        assert words in str(refusal.value)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path):
    for kind in (FileNotFoundError, amp.RunStateError):
        with pytest.raises(kind, match=r"run\.pt: there is no such file or folder.*leave load_run_state out"):
            amp.load_run_state(tmp_path / "run.pt")
    with pytest.raises(amp.RunStateError, match=r"The folder .*nowhere does not exist"):
        amp.load_run_state(tmp_path / "nowhere" / "run.pt")
    with pytest.raises(FileNotFoundError, match=r"of run\.pt does not exist"):
        amp.save_run_state(tmp_path / "nowhere" / "run.pt")


def test_a_compressed_file_is_refused_before_it_is_unpacked(path):
    """64 MB of zeros fit into 70 kB."""
    torch.save({"amplab_run_state": 1, "zeros": torch.zeros(2**24)}, path)
    small = path.with_name("small.pt")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in whole.infolist():
            packed.writestr(entry.filename, whole.read(entry))
    assert small.stat().st_size < 2**20
    with pytest.raises(amp.RunStateError, match=r"small\.pt is compressed"):
        amp.load_run_state(small, model=network())


def nested(kind):
    """A few objects that a walk through them meets more than 10^27 times, or without end."""
    value = ["A" * 1000] if kind == "lists of words" else [1]
    for _ in range(30):
        value = {str(number): value for number in range(8)} if kind == "dicts" else [value] * 8
    if kind == "itself":
        value = [1]
        value.append(value)
    return value


@pytest.mark.parametrize("kind", ["lists", "lists of words", "dicts", "itself"])
@pytest.mark.parametrize("place", ["amplab_run_state", "amplab", "optimizers", "extra", "new"])
def test_a_small_file_whose_containers_hold_each_other_is_refused_at_once(path, place, kind):
    file_format.write_run_state(path, {"optimizers": [{"state": {}}], "extra": 1})
    torch.save({**torch.load(path), place: nested(kind)}, path)
    with pytest.raises(amp.RunStateError, match="a walk through them does not end"):
        file_format.read_run_state(path)


def test_containers_that_are_there_twice_are_read(path):
    shared = {"lr": [1.0, 2.0], "names": ("a", "b")}
    position = list(range(10_000))
    file_format.write_run_state(path, {"extra": [shared, shared, [shared, shared]], "position": position})
    assert file_format.read_run_state(path)["extra"][2][1] == shared


def test_long_lists_are_read(path):
    file_format.write_run_state(path, {"extra": [[0.5] * 1_100_000]})
    assert len(file_format.read_run_state(path)["extra"][0]) == 1_100_000


@pytest.mark.parametrize("read", [shard_reader._size, shard_reader._word])
def test_numbers_and_names_of_a_folder_that_are_such_containers_are_refused_at_once(read):
    with pytest.raises(TypeError):
        read(nested("lists"))
