"""A look at a step leaves the bits of float16 products on the CPU, also if it has a gradient of a gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.policies import cpu_half

pytestmark = pytest.mark.filterwarnings("ignore")


class OfFunction(nn.Module):
    """A function of a weight and the batch, and of the modules in it."""

    def __init__(self, function, *inner):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(inner)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x):
        return self.function(self, x)


def mlp(*between):
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 1))


NETS = {
    "relu": lambda: mlp(nn.ReLU()),
    "layer norm": lambda: mlp(nn.LayerNorm(16), nn.GELU()),
    "batch norm": lambda: mlp(nn.BatchNorm1d(16), nn.ReLU()),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten()),
    "three factors": lambda: OfFunction(lambda net, x: torch.einsum("bj,jk,kl->bl", x, net.weight, net.weight)),
    "chain": lambda: OfFunction(lambda net, x: torch.linalg.multi_dot([x, net.weight, net.weight])),
    "cell": lambda: OfFunction(lambda net, x: net.inner[0](x)[0], nn.LSTMCell(8, 8)),
    "attention": lambda: OfFunction(lambda net, x: F.scaled_dot_product_attention(x @ net.weight, x, x)),
}


def trained(make, level, penalty, *, watched):
    """Weights after two steps, the first of which is looked at."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(6, 8) for _ in range(2)]
    scaler = amplab.GradScaler("cpu", init_scale=16.0) if level == "autocast" else None
    if level != "autocast":
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)

    def loss_of(x):
        x = x.clone().requires_grad_()
        with torch.enable_grad() if scaler is None else amplab.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = out.float().square().mean()
        if penalty:
            (grad,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
            loss = loss + (grad.float().norm(2, 1) - 1).square().mean()
        return loss

    def step(loss):
        if scaler is None:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    try:
        if watched:
            with amplab.watch(model, optimizer, scaler=scaler) as watch:
                for x in watch.batches(batches):
                    step(watch.loss(loss_of(x)))
        else:
            for x in batches:
                step(loss_of(x))
    finally:
        amp.reset()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("penalty", [False, True], ids=["gradient", "gradient of a gradient"])
@pytest.mark.parametrize(
    ("net", "level"),
    [*((net, "autocast") for net in NETS), *((net, level) for net in list(NETS)[:4] for level in ("O1", "O2", "O3"))],
)
def test_a_look_changes_no_weight(net, level, penalty):
    with cpu_half("fp32_accumulate"):
        alone = trained(NETS[net], level, penalty, watched=False)
        watched = trained(NETS[net], level, penalty, watched=True)
    assert alone.keys() == watched.keys()
    assert [name for name in alone if not torch.equal(alone[name], watched[name])] == []
