"""CUDA calls on the CPU: each kind that old scripts make, what is printed, and that torch's names are restored."""

import io
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab.scripts.cpu_tensors import FACTORIES, TENSOR_TYPES
from amplab.scripts.cuda_on_cpu import cuda_on_cpu

CPU = torch.device("cpu")


@pytest.fixture
def said():
    lines = []
    redirection = cuda_on_cpu(lines.append)
    yield lines
    redirection.undo()


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1), 0])
def test_a_device_is_the_cpu(said, device):
    tensor = torch.ones(2, 3, device=device)
    moved = [
        tensor.to(device), tensor.to(device=device, non_blocking=True), tensor.to(device, torch.float16),
        torch.tensor([1.0], device=device), torch.zeros_like(tensor, device=device),
        tensor.new_full((2,), 1, device=device), nn.Linear(2, 2).to(device).weight,
        nn.Linear(2, 2, device=device).weight,
    ]  # fmt: skip
    assert {each.device for each in moved} == {CPU}
    assert moved[2].dtype == torch.float16
    assert said == ["device cuda is the CPU"]


def test_other_arguments_of_to_are_left_alone(said):
    tensor = torch.ones(2)
    assert tensor.to(torch.float16).dtype == torch.float16
    assert tensor.to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
    assert tensor.to("meta").device.type == "meta"
    assert tensor.to(device=None, dtype=torch.float64).dtype == torch.float64
    assert tensor.to("cuda", copy=True).data_ptr() != tensor.data_ptr()
    assert said == ["device cuda is the CPU"]


def test_each_kind_of_call_is_reported_once(said):
    tensor, model = torch.ones(2), nn.Linear(2, 2)
    assert tensor.cuda().cuda(0, non_blocking=True).device == CPU
    assert model.cuda() is model.cuda(1) is model
    assert tensor.pin_memory().device == CPU
    assert said == [".cuda() copies tensors, which stay on the CPU", "pin_memory does nothing"]


@pytest.mark.parametrize("name", TENSOR_TYPES)
def test_tensor_types_make_and_recognize_tensors(said, name):
    own, of_cuda = getattr(torch, name), getattr(torch.cuda, name)
    made = of_cuda([1, 0])
    assert made.type() == f"torch.cuda.{name}"
    assert made.dtype == own([1, 0]).dtype == of_cuda.dtype
    assert isinstance(made, of_cuda)
    assert not isinstance(made.cpu(), of_cuda)
    assert not isinstance(torch.zeros(1, dtype=torch.complex64), of_cuda)
    assert torch.ones(2).type(of_cuda).dtype == torch.ones(2).type(f"torch.cuda.{name}").dtype == made.dtype
    assert said == [f"torch.cuda.{name} is torch.{name}"]


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_types_and_devices(said):
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    assert torch.zeros(1).dtype == torch.float64
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.zeros(1).dtype == torch.float32
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(1).device == CPU
    finally:
        torch.set_default_device(None)


def test_questions_about_the_device(said):
    assert torch.cuda.is_available()
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_capability(0) >= (7, 0)
    assert torch.cuda.get_device_properties(0).name == torch.cuda.get_device_name()
    assert said[0] == "torch.cuda.is_available() is True"
    assert len(said) == 6


def test_streams_events_and_waiting(said):
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.device(0):
        tensor = torch.ones(2).cuda(non_blocking=True)
    tensor.record_stream(stream)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    assert start.elapsed_time(end) >= 0
    assert isinstance(stream, torch.cuda.Stream)


def test_the_generator_is_that_of_the_cpu(said):
    torch.cuda.manual_seed_all(7)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    torch.cuda.set_rng_state_all([state])
    assert torch.equal(torch.rand(3), drawn)
    torch.manual_seed(7)  # it calls torch.cuda.manual_seed_all itself
    assert torch.equal(torch.rand(3), drawn)
    torch.cuda.manual_seed(7)
    assert torch.cuda.initial_seed() == 7
    with torch.random.fork_rng():
        torch.rand(3)
    assert torch.equal(torch.rand(3), drawn)


def test_memory_counters_tell_what_the_process_holds(said):
    torch.cuda.reset_max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = torch.ones(2**23, device="cuda")
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated(0) > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0
    assert torch.cuda.mem_get_info()[1] >= held.nbytes
    assert [line for line in said if "memory" in line] == [said[0]]


@pytest.mark.parametrize(
    "location", [None, "cuda:0", torch.device("cuda"), {"cuda:0": "cuda:1"}, lambda storage, place: storage.cuda(0),
                 lambda storage, place: None, lambda storage, place: storage],
    ids=["none", "text", "device", "table", "moving", "leaving", "staying"],
)  # fmt: skip
def test_a_checkpoint_of_a_gpu_loads_on_the_cpu(said, location):
    loaded = torch.load(io.BytesIO(saved_on_cuda()), map_location=location)
    assert loaded["weight"].device == CPU
    assert loaded["weight"].tolist() == [1.0, 2.0]
    assert torch.load(io.BytesIO(saved_on_cuda()), location)["weight"].device == CPU


def saved_on_cuda():
    """A checkpoint whose storages are tagged as those of a first GPU."""
    stream = io.BytesIO()
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
        torch.save({"weight": torch.tensor([1.0, 2.0])}, stream)
    return stream.getvalue()


def test_data_parallel_is_the_module(said):
    module = nn.Linear(3, 2)
    parallel = nn.DataParallel(module, device_ids=[0, 1]).cuda()
    inputs = torch.ones(4, 3)
    assert torch.equal(parallel(inputs), module(inputs))
    assert torch.equal(nn.parallel.data_parallel(module, inputs, range(2)), module(inputs))
    assert set(parallel.state_dict()) == {"module.weight", "module.bias"}
    assert said[0] == "DataParallel runs the module itself"


def test_distributed_over_nccl_goes_over_gloo(said, tmp_path):
    torch.distributed.init_process_group(backend="nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert torch.distributed.get_backend() == "gloo"
        module = nn.Linear(3, 2)
        for parallel in (
            nn.parallel.DistributedDataParallel(module, device_ids=[0], output_device=0),
            nn.parallel.DistributedDataParallel(module, [0], 0),
            nn.parallel.DistributedDataParallel(module),
        ):
            assert torch.equal(parallel(torch.ones(1, 3)), module(torch.ones(1, 3)))
        assert torch.distributed.get_backend(torch.distributed.new_group([0], backend="nccl")) == "gloo"
    finally:
        torch.distributed.destroy_process_group()
    assert said == ["backend nccl is gloo", "DistributedDataParallel gets no device_ids"]


def test_pin_memory_is_off_and_makes_no_warning(said):
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, pin_memory=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert torch.zeros(2, pin_memory=True).sum() == 0
    assert said == ["pin_memory does nothing"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_torchscript_knows_the_replaced_functions(said):
    @torch.jit.script
    def shifted(values: torch.Tensor) -> torch.Tensor:
        return values + torch.ones([2]) + torch.zeros_like(values)

    assert shifted(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_training_is_bitwise_that_of_the_cpu(said):
    def train(place):
        torch.manual_seed(0)
        model = place(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            inputs, labels = place(torch.randn(4, 8)), place(torch.tensor([0, 1, 0, 1]))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return model.state_dict()

    on_cpu, on_cuda = train(lambda value: value), train(lambda value: value.cuda())
    assert all(torch.equal(on_cpu[name], on_cuda[name]) for name in on_cpu)


def test_undo_gives_torch_its_names_back():
    watched = [(torch, name) for name in FACTORIES] + [(torch.cuda, name) for name in dir(torch.cuda)]
    watched += [(owner, name) for owner in (torch.Tensor, nn.Module) for name in ("cuda", "to", "type")]
    watched += [(nn.DataParallel, "__init__"), (torch.utils.data.DataLoader, "__init__"), (torch, "load")]
    before = [getattr(owner, name) for owner, name in watched]
    with cuda_on_cpu(print) as redirection:
        assert cuda_on_cpu(print) is redirection
        assert torch.cuda.is_available()
    assert all(getattr(owner, name) is was for (owner, name), was in zip(watched, before, strict=True))
    assert "to" not in vars(torch.Tensor)


def test_lines_go_to_stderr(capsys):
    with cuda_on_cpu():
        torch.ones(1).cuda().cuda()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "amplab --device cpu: .cuda() copies tensors, which stay on the CPU\n"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_own_recipe_trains(said):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.cuda.amp.GradScaler()
    losses = []
    for _ in range(5):
        with torch.cuda.amp.autocast():
            loss = (model(torch.ones(8, 4).cuda()) - 1).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_generators_and_numbers_of_devices(said):
    generator = torch.Generator(device="cuda")
    assert generator.device == torch.Generator("cuda:1").device == torch.Generator().device == CPU
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.randn(2, generator=generator.manual_seed(1), device="cuda").device == CPU
    assert torch.ones(1, device=f"cuda:{torch.ones(1).cuda().get_device()}").device == CPU
    torch.cuda.set_per_process_memory_fraction(0.5)
