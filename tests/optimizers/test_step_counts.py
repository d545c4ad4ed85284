"""``group["step"]``, which apex's FusedAdam, FusedLAMB and FusedNovoGrad write and NVIDIA's schedulers read."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from amplab import amp
from amplab.amp import GradScaler
from amplab.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad

COUNTING = pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad])


class WarmUp(LRScheduler):
    """The warm-up of NVIDIA's BERT scripts: the rate follows the optimizer's own count, not the scheduler's."""

    def step(self, epoch=None):
        group = self.optimizer.param_groups[0]
        self.last_epoch = group["step"] + 1 if "step" in group else 1
        for each, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            each["lr"] = base * min(1.0, self.last_epoch / 10)


@COUNTING
def test_a_warm_up_that_reads_the_groups_count_warms_up(make, model_of, train):
    model = model_of()
    optimizer = make(model.parameters(), lr=0.1)
    schedule = WarmUp(optimizer)
    rates = []
    for seed in range(12):
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        train(optimizer, list(model.parameters()), 1, seed=seed)
    assert rates == pytest.approx([0.1 * min(1.0, k / 10) for k in range(1, 13)])


@COUNTING
def test_a_skipped_step_is_not_counted(make, model_of, train):
    for scaler in (GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=64.0)):
        model = model_of()
        optimizer = make(model.parameters())
        train(optimizer, list(model.parameters()), 5, spoil=(0, 2), scaler=scaler)
        assert [group["step"] for group in optimizer.param_groups] == [3]
        assert {state["step"].item() for state in optimizer.state.values()} == {3.0}


@COUNTING
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_step_that_scale_loss_skips_is_not_counted(make, opt_level, session):
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    counts = []
    for factor in (0.01, float("inf"), 0.01):
        with amp.scale_loss(model(torch.ones(3, 4)).float().mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(optimizer.param_groups[0]["step"])
    assert counts == [1, 1, 2]


@pytest.fixture
def session():
    yield
    amp.reset()


@COUNTING
def test_every_group_counts_also_one_without_gradients_in_this_step(make, model_of, train):
    model = model_of()
    first, second = [model[0].weight], [model[2].weight]
    optimizer = make([{"params": first}, {"params": second}])
    train(optimizer, first, 3)
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


@COUNTING
@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), "state_dict"])
def test_the_count_goes_on_after_a_round_trip(make, model_of, train, way):
    model = model_of()
    optimizer = make(model.parameters())
    train(optimizer, list(model.parameters()), 4)
    if way == "state_dict":
        other = copy.deepcopy(model)
        twin = make(other.parameters())
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other, twin = way((model, optimizer))
    for each, params in ((optimizer, model), (twin, other)):
        train(each, list(params.parameters()), 2, seed=2)
        assert each.param_groups[0]["step"] == 6
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def saved_by_apex(optimizer):
    """The checkpoint as apex writes it: one count for a group; NovoGrad's norms in the group, too."""
    saved = copy.deepcopy(optimizer.state_dict())
    norms = [state.pop("grad_norm") for state in saved["state"].values() if "grad_norm" in state]
    for state in saved["state"].values():
        del state["step"]
    if norms:
        saved["param_groups"][0]["exp_avg_sq"] = [torch.zeros(0), torch.stack(norms)]
    return saved


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_a_checkpoint_of_apex_goes_on_counting(make, model_of, train):
    model = model_of()
    optimizer = make(model.parameters())
    train(optimizer, list(model.parameters()), 4)
    other = copy.deepcopy(model)
    twin = make(other.parameters())
    twin.load_state_dict(saved_by_apex(optimizer))
    assert twin.param_groups[0]["step"] == 4
    for each, params in ((optimizer, model), (twin, other)):
        train(each, list(params.parameters()), 3, seed=2)
    assert twin.param_groups[0]["step"] == 7
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_torchs_checkpoint_gives_the_group_its_count(model_of, train):
    theirs = model_of()
    first = torch.optim.AdamW(theirs.parameters())
    train(first, list(theirs.parameters()), 3)
    mine = FusedAdam(theirs.parameters())
    mine.load_state_dict(first.state_dict())
    train(mine, list(theirs.parameters()), 1)
    assert mine.param_groups[0]["step"] == 4


def test_mixed_precision_lamb_starts_at_its_argument(model_of, train):
    model = model_of()
    optimizer = FusedMixedPrecisionLamb(model.parameters(), step=5)
    assert optimizer.param_groups[0]["step"] == 5
    train(optimizer, list(model.parameters()), 2)
    assert optimizer.param_groups[0]["step"] == 7


@COUNTING
@pytest.mark.parametrize("when", ["saved", "live"])
def test_a_count_that_a_script_sets_back_corrects_the_bias_from_there(make, when, model_of, train):
    model = model_of()
    params = list(model.parameters())
    optimizer = make(params, lr=0.01)
    train(optimizer, params, 50)
    saved = copy.deepcopy(optimizer.state_dict())
    if when == "saved":  # the second phase of NVIDIA's BERT
        for group in saved["param_groups"]:
            group["step"] = 0
    optimizer.load_state_dict(saved)
    if when == "live":
        optimizer.param_groups[0]["step"] = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if name not in ("step", "master"):
                value.fill_(-1.0 if name == "grad_norm" else 0.0)
    other = copy.deepcopy(model)
    new = make(list(other.parameters()), lr=0.01)
    train(optimizer, params, 2, seed=2)
    train(new, list(other.parameters()), 2, seed=2)
    assert optimizer.param_groups[0]["step"] == 2
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}
    assert all(torch.equal(a, b) for a, b in zip(params, other.parameters(), strict=True))
