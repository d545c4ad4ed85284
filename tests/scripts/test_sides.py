"""Moves between CPU and CUDA under `--device cpu` copy as CUDA does: what a script edits, and what it does not."""

import copy
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from amplab.scripts.cuda_on_cpu import cuda_on_cpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_cpu():
    with cuda_on_cpu(lambda line: None):
        yield


MOVES = {
    "cuda": lambda x: x.cuda(),
    "to": lambda x: x.to("cuda"),
    "device": lambda x: x.to(torch.device("cuda", 0), non_blocking=True),
    "keyword": lambda x: x.to(device="cuda"),
    "tensor": lambda x: x.to(torch.zeros(1, device="cuda")),
    "device of": lambda x: x.to(torch.zeros(1, device="cuda").device),
    "type": lambda x: x.type(torch.cuda.FloatTensor),
    "tensor()": lambda x: torch.tensor(x, device="cuda"),
    "as_tensor": lambda x: torch.as_tensor(x, device="cuda"),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_batch_on_cuda_is_not_the_data_set(move):
    data = torch.arange(12.0).reshape(4, 3)
    batch = move(data[:2])
    batch.sub_(0.5)
    assert data[0].tolist() == [0.0, 1.0, 2.0]
    assert batch.cuda() is batch.to("cuda") is batch.to(batch.device) is batch.to(torch.float32) is batch
    assert batch.type() == "torch.cuda.FloatTensor"
    assert (batch.is_cuda, batch.device.type) == (False, "cpu")  # as `amplab run --help` says


BACK = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "device": lambda x: x.to(device=torch.device("cpu")),
    "detached": lambda x: x.detach().cpu(),
    "data": lambda x: x.data.to("cpu"),
    "type": lambda x: x.type(torch.FloatTensor),
    "type by name": lambda x: x.detach().type("torch.FloatTensor"),
}


@pytest.mark.parametrize("back", BACK.values(), ids=BACK)
def test_a_snapshot_does_not_follow_the_weights(back):
    model = nn.Linear(3, 2).cuda()
    snapshot = back(model.weight)
    before = snapshot.clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(snapshot, before)
    assert snapshot.cpu() is snapshot
    assert snapshot.type() == "torch.FloatTensor"


def test_the_best_weights_are_kept_through_a_state_dict():
    model = nn.BatchNorm1d(3).cuda()
    best = {name: value.cpu() for name, value in model.state_dict().items()}
    model(torch.randn(8, 3).cuda())
    assert best["num_batches_tracked"] == 0
    assert best["running_mean"].tolist() == [0.0] * 3


def test_a_view_of_what_was_not_dense_works_after_the_move():
    data = torch.arange(24.0).reshape(4, 6)
    assert data[:, ::2].cuda().view(-1).shape == (12,)
    assert data.t().cuda().stride() == (1, 6)  # dense: CUDA keeps the strides
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert image.cuda().is_contiguous(memory_format=torch.channels_last)
    assert data.t().to("cuda", memory_format=torch.contiguous_format).stride() == (4, 1)


def test_parameters_keep_their_identity():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    shared = model[0].weight.data_ptr()
    before = [*model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for move in (model.cuda, lambda: model.to("cuda"), lambda: model.to(device="cuda", dtype=torch.float32)):
        move()
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    on_cuda = model[0].weight.data_ptr()
    assert on_cuda != shared
    assert model.cuda()[0].weight.data_ptr() == on_cuda
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert model.to("cuda", torch.float64)[0].weight.dtype == torch.float64
    assert model.cpu()[0].weight.type() == "torch.DoubleTensor"


def test_a_host_tensor_stays_itself():
    numbers = np.zeros(3, dtype=np.float32)
    tensor = torch.from_numpy(numbers)
    assert tensor.cpu() is tensor.to("cpu") is tensor
    tensor.cpu().add_(1)
    assert numbers.tolist() == [1.0, 1.0, 1.0]
    torch.as_tensor(numbers, device="cuda").add_(1)
    assert numbers.tolist() == [1.0, 1.0, 1.0]
    torch.as_tensor(numbers).add_(1)
    assert numbers.tolist() == [2.0, 2.0, 2.0]


def test_results_and_gradients_are_where_their_arguments_are():
    model, inputs = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).cuda(), torch.randn(4, 3).cuda()
    outputs = model(inputs)
    assert outputs.cuda() is outputs
    assert outputs.cpu() is not outputs
    kept = outputs.cpu() * 2
    assert kept.cpu() is kept  # the graph leads through a move to the host
    outputs.sum().backward()
    grad = model[0].weight.grad
    assert grad.cuda() is grad
    grad.data.cuda().mul_(2)  # as scripts unscale
    saved = grad.cpu()
    model[0].weight.grad.zero_()
    assert saved.abs().sum() > 0


def test_moves_know_the_sides_under_the_casts_of_a_region():
    """The casting engine is a torch function mode, through which every call goes twice."""
    model, data = nn.Linear(3, 3).cuda(), torch.randn(4, 3)
    with torch.autocast("cuda"):
        outputs = model(data.cuda())
        assert outputs.cuda() is outputs.to("cuda") is outputs
        assert outputs.type() == outputs.type("torch.cuda.HalfTensor").type() == "torch.cuda.HalfTensor"
        assert outputs.cpu().type() == outputs.type(torch.HalfTensor).type() == "torch.HalfTensor"
        assert outputs.type(torch.cuda.FloatTensor).type() == outputs.float().type() == "torch.cuda.FloatTensor"
        assert outputs.new_zeros(2).type() == torch.zeros(2, device="cuda").half().type()
        assert data.to(outputs.device).type() == data.cuda().type() == "torch.cuda.FloatTensor"
        data[:1].cuda().zero_()
    assert data[0].abs().sum() > 0


def test_a_result_outside_every_graph_is_copied_in_both_directions():
    average = torch.zeros(3).cuda() * 1.0
    snapshot = average.cpu()
    average.add_(1)
    assert snapshot.tolist() == [0.0, 0.0, 0.0]
    data = torch.randn(4) * 2
    before = data.clone()
    data.cuda().mul_(0)
    assert torch.equal(data, before)


def test_copies_and_new_tensors_are_on_the_side_of_the_first():
    weight = nn.Linear(2, 2).cuda().weight
    for made in (
        weight.detach().clone(), torch.zeros_like(weight), weight.new_zeros(2), weight.half(), weight.double(),
        copy.deepcopy(weight), weight.detach().t().contiguous(), torch.clone(weight), weight.type(torch.float16),
    ):  # fmt: skip
        assert made.cuda() is made
        assert made.type().startswith("torch.cuda.")
    assert copy.deepcopy(nn.Linear(2, 2)).weight.cpu().type() == "torch.FloatTensor"


def test_gradients_flow_through_a_move():
    leaf = torch.ones(2, 2, requires_grad=True)
    moved = leaf.cuda()
    (moved.cpu() * torch.arange(4.0).reshape(2, 2)).sum().backward()
    assert not moved.is_leaf
    assert leaf.grad.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    leaf.grad = None
    assert leaf.grad is None


def test_the_default_device_decides_where_factories_put_tensors():
    torch.set_default_device("cuda")
    try:
        made = torch.zeros(2)
        assert made.cuda() is made
    finally:
        torch.set_default_device(None)
    made = torch.zeros(2)
    assert made.cuda() is not made
    assert made.cpu() is made


def test_pinned_memory_is_a_copy():
    data = torch.ones(2)
    pinned = data.pin_memory()
    pinned.zero_()
    assert data.tolist() == [1.0, 1.0]
    assert pinned.pin_memory() is pinned.cpu() is pinned
    assert pinned.cuda() is not pinned


def test_storages_move_too():
    tensor = torch.zeros(2)
    moved = tensor.untyped_storage().cuda()
    assert moved.data_ptr() != tensor.data_ptr()
    assert moved.cuda() is moved
    assert moved.cpu() is not moved


def test_what_is_loaded_for_cuda_is_there():
    stream = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, stream)
    for location, on_cuda in (("cuda", True), ("cuda:0", True), (None, False), ("cpu", False)):
        stream.seek(0)
        weight = torch.load(stream, map_location=location)["weight"]
        assert (weight.cuda() is weight) is on_cuda


def test_layouts_and_devices_without_memory():
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), check_invariants=True)
    moved = sparse.cuda()
    assert moved is not sparse
    assert moved.cuda() is moved
    assert moved.to_dense().tolist() == [1.0, 2.0, 0.0]
    assert torch.ones(2, device="cuda").to("meta").device.type == "meta"
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]).cuda()
    assert packed.data.type() == "torch.cuda.FloatTensor"


COMPILED = """
import torch
def forward(x):
    return x.cuda() * 2 + torch.zeros(3).to("cuda") + torch.ones(3, device=x.device)
print(torch.compile(forward, backend="aot_eager", fullgraph=True)(torch.ones(2, 3)).tolist())
with torch.device("cuda"):
    print(torch.zeros(2).type())
"""


def test_a_compiled_function_moves_without_a_graph_break(tmp_path):
    (tmp_path / "script.py").write_text(COMPILED)
    words = [sys.executable, "-m", "amplab", "run", "--device", "cpu", str(tmp_path / "script.py")]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]", "torch.cuda.FloatTensor"]
