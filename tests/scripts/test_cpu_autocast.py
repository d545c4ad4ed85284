"""torch's autocast for CUDA under `--device cpu`: CUDA's dtypes, torch's flags, amplab's engine."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amplab
from amplab import amp
from amplab.scripts.cuda_on_cpu import cuda_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ROOT = Path(__file__).resolve().parents[2]
REGIONS = {
    "torch.autocast": lambda **options: torch.autocast("cuda", **options),
    "torch.amp.autocast": lambda **options: torch.amp.autocast(device_type="cuda", **options),
    "torch.cuda.amp.autocast": torch.cuda.amp.autocast,
}


@pytest.fixture(autouse=True)
def said():
    lines = []
    with cuda_on_cpu(lines.append):
        yield lines
    assert not torch.is_autocast_enabled("cuda")
    assert not amplab.is_autocast_enabled("cpu")


@pytest.fixture(params=REGIONS.values(), ids=REGIONS)
def region(request):
    return request.param


# What CUDA's lists say; those of torch's CPU autocast differ for each of them but the first.
DTYPES = {
    "mm": (lambda x: x @ x, torch.float16),
    "softmax": (lambda x: x.half().softmax(-1), torch.float32),
    "sum": (lambda x: x.half().sum(), torch.float32),
    "layer_norm": (lambda x: F.layer_norm(x.half(), (4,)), torch.float32),
    "pow": (lambda x: x.half().pow(2), torch.float32),
    "exp": (lambda x: x.half().exp(), torch.float32),
    "mse_loss": (lambda x: F.mse_loss(x.half(), x.half()), torch.float32),
    "prelu": (lambda x: F.prelu(x, x[0, :1]), torch.float16),
}


@pytest.mark.parametrize(("op", "dtype"), DTYPES.values(), ids=DTYPES)
def test_ops_have_the_dtypes_of_cuda(region, op, dtype):
    values = torch.rand(4, 4).cuda()
    with region():
        assert op(values).dtype is dtype


def test_the_flags_are_those_of_cuda(region):
    with region():
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cuda") is torch.float16
    with region(dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16


def test_regions_nest_are_disabled_and_end_with_an_error(region, said):
    ones = torch.ones(2, 2).cuda()
    with region(), region(enabled=False):
        assert torch.mm(ones, ones).dtype is torch.float32
        assert not torch.is_autocast_enabled()
        with region(dtype=torch.bfloat16):
            assert torch.mm(ones, ones).dtype is torch.bfloat16
    with region(dtype=torch.bfloat16), region() as inner:
        assert torch.mm(ones, ones).dtype is inner.fast_dtype is torch.get_autocast_dtype("cuda")
    with region(dtype=torch.float32):
        assert torch.mm(ones, ones).dtype is torch.float32
    with pytest.raises(KeyError), region():
        raise KeyError
    assert torch.mm(ones, ones).dtype is torch.float32
    assert said[-1] == "autocast for cuda is amplab.autocast on the CPU, with the lists of CUDA"


def test_it_decorates_functions_and_works_in_threads(region):
    seen = []
    ones = torch.ones(2, 2).cuda()
    work = region()(lambda: seen.append(torch.mm(ones, ones).dtype))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert seen == [torch.float16] * 2
    assert torch.mm(ones, ones).dtype is torch.float32


def test_the_autocast_of_the_cpu_stays_torchs_own():
    with torch.autocast("cpu"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
        assert not amplab.is_autocast_enabled("cpu")


def test_a_disabled_region_leaves_the_casts_of_initialize_alone():
    """As CUDA does: scripts of apex run their forward inside `autocast(enabled=False)`."""
    model = nn.Linear(4, 4).cuda()
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    try:
        with torch.cuda.amp.autocast(enabled=False):
            assert model.forward.__self__ is not None
            assert model(torch.ones(2, 4).cuda()).dtype in (torch.float16, torch.float32)
            inside = model(torch.ones(2, 4).cuda())
        assert inside.dtype is model(torch.ones(2, 4).cuda()).dtype
    finally:
        amp.reset()


class Doubled(torch.autograd.Function):
    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        Doubled.seen.append(x.dtype)
        Doubled.seen.append((x @ x).dtype)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * 2


def test_custom_functions_get_their_inputs_in_the_dtype_they_ask_for():
    leaf = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cuda"):
        Doubled.apply(leaf @ leaf).sum().backward()
    assert Doubled.seen == [torch.float32, torch.float32]
    assert leaf.grad is not None


def test_checkpoint_recomputes_with_the_same_casts():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).cuda(), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cuda"):
        outputs = checkpoint(model, torch.ones(2, 4).cuda(), use_reentrant=False)
    outputs.float().sum().backward()
    assert seen == [torch.float16] * 2


@pytest.mark.parametrize("make", [torch.cuda.amp.GradScaler, lambda: torch.amp.GradScaler("cuda"), torch.GradScaler])
def test_the_published_recipe_skips_overflows_and_ends_where_float32_does(make):
    def train(mixed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = make() if mixed else torch.amp.GradScaler("cuda", enabled=False)
        assert scaler.is_enabled() is mixed
        data = torch.randn(64, 8)
        inputs, labels = data.cuda(), data.sum(1, keepdim=True).cuda()
        for step in range(60):
            optimizer.zero_grad()
            with torch.autocast("cuda", enabled=mixed):
                loss = F.mse_loss(model(inputs), labels)
            scaler.scale(loss).backward()
            if mixed and step == 5:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return loss.item(), scaler.get_scale()

    plain, _ = train(mixed=False)
    loss, scale = train(mixed=True)
    assert loss == pytest.approx(plain, rel=0.25)
    assert scale < 65536.0


COMPILED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
compiled, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with torch.autocast("cuda"):
        output = compiled(torch.ones(4, 8).cuda())
    (output.float() - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(output.dtype)
def inside(x):
    with torch.autocast("cuda"):
        return model(x)
print(torch.compile(inside, backend="aot_eager")(torch.ones(4, 8).cuda()).dtype)
"""


def test_a_compiled_model_trains_in_a_region_and_may_contain_one(tmp_path):
    (tmp_path / "script.py").write_text(COMPILED)
    words = [sys.executable, "-m", "amplab", "run", "--device", "cpu", str(tmp_path / "script.py")]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["torch.float16"] * 4


def test_amplabs_own_region_for_cuda_casts_too():
    ones = torch.ones(2, 2).cuda()
    with amplab.autocast("cuda"):
        assert torch.mm(ones, ones).dtype is torch.float16
    with amplab.autocast("cuda", dtype=torch.bfloat16), amplab.autocast("cuda"):
        assert torch.mm(ones, ones).dtype is torch.bfloat16
