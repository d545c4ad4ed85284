"""Parts of a module with a rule that backward recomputes compute as they did in the forward."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amplab import amp
from amplab.policies import PrecisionPolicy

VARIANTS = pytest.mark.parametrize("reentrant", [True, False])


class Block(nn.Module):
    """Exceeds float16 inside; what is checkpointed begins with an op of no module."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant
        self.dtypes: list[torch.dtype] = []
        nn.init.constant_(self.wi.weight, 3000.0)
        nn.init.constant_(self.wo.weight, 1e-4)

    def inner(self, x: Tensor) -> Tensor:
        hidden = self.wi(F.linear(x, self.wo.weight) + x)
        self.dtypes.append(hidden.dtype)
        return self.wo(hidden.tanh() + hidden * 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


def gradients(rules: dict[str, str], reentrant: bool | None) -> tuple[list[Tensor], Block]:
    amp.reset()
    torch.manual_seed(0)
    block = Block(reentrant)
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 2))
    nn.init.constant_(model[0].bias, 10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    policy = PrecisionPolicy(module_rules=rules)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=1024.0, policy=policy)
    with amp.scale_loss(model(torch.ones(3, 8)).float().pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    found = [param.grad for param in model.parameters() if param.grad is not None]
    amp.reset()
    return found, block


@VARIANTS
@pytest.mark.parametrize(
    "rules", [{"1": "float32"}, {"*": "float32"}, {"1": "bfloat16"}, {"1": "float32", "1.wo": "bfloat16"}]
)
def test_what_a_ruled_module_checkpoints_has_the_gradients_without_a_checkpoint(
    rules: dict[str, str], reentrant: bool
) -> None:
    expected, _ = gradients(rules, None)
    found, block = gradients(rules, reentrant)
    assert all(torch.isfinite(grad).all() for grad in found)
    assert block.dtypes[0] is block.dtypes[1]
    for grad, other in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=2e-3, atol=0.0)


@VARIANTS
def test_a_checkpoint_around_a_ruled_module_recomputes_the_rest_in_half(reentrant: bool) -> None:
    _, block = gradients({"1.wo": "float32"}, reentrant)
    assert block.dtypes == [torch.float16, torch.float16]


@VARIANTS
def test_a_checkpoint_of_the_whole_model_enters_its_rules_again(reentrant: bool) -> None:
    expected, _ = gradients({"1": "float32"}, None)
    amp.reset()
    torch.manual_seed(0)
    block = Block(None)
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 2))
    nn.init.constant_(model[0].bias, 10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    policy = PrecisionPolicy(module_rules={"1": "float32"})
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=1024.0, policy=policy)
    out = checkpoint(model, torch.ones(3, 8, requires_grad=True), use_reentrant=reentrant)
    with amp.scale_loss(out.float().pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    amp.reset()
    assert block.dtypes == [torch.float32, torch.float32]
    for param, other in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, other)


def test_nothing_stays_on_after_a_backward_that_raises() -> None:
    block = Block(True)
    model = nn.Sequential(nn.Linear(8, 8), block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    policy = PrecisionPolicy(module_rules={"1": "float32"})
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, policy=policy)
    before = torch.overrides._get_current_function_mode_stack()
    loss = model(torch.ones(3, 8)).float().sum()
    loss.backward(retain_graph=False)
    with pytest.raises(RuntimeError, match="second time"), amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert torch.overrides._get_current_function_mode_stack() == before
    amp.reset()
