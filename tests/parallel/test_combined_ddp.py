"""``combine_ddp`` trains as DistributedDataParallel, to the bit; the ranks run all checks in one start."""

import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from amplab import amp
from amplab.parallel.buckets import bucket_ends
from amplab.parallel.ranks import on_this_rank_alone
from amplab.policies import PrecisionPolicy

FEATURES = 16
COMBINED = {"combine_grad": True, "combine_ddp": True}


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.half())  # masters of DistributedDataParallel start from rounded weights
    return model


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def batch_of(step, rank):
    return torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))


def prepared(model, level="O0", **settings):
    """Return a session, the optimizer, and the model as its forward is to be called."""
    optimizer = sgd(model.parameters())
    session = amp.Session()
    session.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    return session, optimizer, model if "combine_ddp" in settings else DistributedDataParallel(model)


def backward(session, optimizer, loss, **delays):
    with session.scale_loss(loss, optimizer, **delays) as scaled_loss:
        scaled_loss.backward()


def weights_of(model, session, optimizer):
    return [each.detach().clone() for each in (*session.master_params(optimizer), *model.state_dict().values())]


def equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def train(rank, level, *, combined, set_to_none, parts):
    """Train 6 steps, of which rank 1 alone overflows in one. Ranks start from different weights if ``combined``."""
    model = make_model(rank if combined else 0)
    scale = {"loss_scale": "dynamic", "dynamic_init_scale": 1024.0}
    session, optimizer, called = prepared(model, level, **scale, **(COMBINED if combined else {}))
    stepped = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(parts):
            with session.casting():
                factor = float("inf") if (step, part, rank) == (3, 0, 1) else 1.0
                loss = called(batch_of(2 * step + part, rank)).float().square().mean() * factor
                backward(session, optimizer, loss)
        session.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        stepped.append(session.last_step(optimizer).stepped)
    assert stepped == [True, True, True, False, True, True]
    return [*weights_of(model, session, optimizer), torch.tensor(session.loss_scale())]


def equals_ddp(rank, level):
    return all(
        equal(*(train(rank, level, combined=combined, set_to_none=cleared, parts=parts) for combined in (True, False)))
        for cleared in (True, False)
        for parts in (1, 2)
    )


def large_models_are_sent_in_the_backward(rank):
    """Return how many buckets were on their way before `finish`, at each step, and whether the weights equal DDP's."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(FEATURES, 2048), *(nn.Linear(2048, 1024) for _ in range(1)), nn.Linear(1024, 1024))
    start.append(nn.Linear(1024, 4))
    sent, trained = [], []
    for settings in ({**COMBINED, "ddp_replica_count": 8}, {}):
        model = copy.deepcopy(start)
        session, optimizer, called = prepared(model, **settings)
        for step in range(3):
            optimizer.zero_grad()
            loss = called(batch_of(step, rank)).square().mean()
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                if settings:
                    sent.append(sum(param.grad is None for param in model.parameters()))
            optimizer.step()
        trained.append(weights_of(model, session, optimizer))
    return sent, equal(*trained)


class Branches(nn.Module):
    """One branch that every rank reaches, one for rank 0 alone, one that nobody reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.all, self.first, self.never = (nn.Linear(FEATURES, 4) for _ in range(3))

    def forward(self, inputs, rank):
        return self.all(inputs) + (self.first(inputs) if rank == 0 else 0.0)


def unreached_parameters(rank):
    """Return whether weights equal those of find_unused_parameters, and which gradients are None."""
    trained, missing = [], []
    for settings in (COMBINED, {}):
        model = Branches()
        session, optimizer, called = prepared(model, **settings)
        if not settings:
            called = DistributedDataParallel(model, find_unused_parameters=True)
        for step in range(4):
            optimizer.zero_grad()
            backward(session, optimizer, called(batch_of(step, rank), rank).square().mean())
            optimizer.step()
        missing.append([name for name, param in model.named_parameters() if param.grad is None])
        trained.append(weights_of(model, session, optimizer))
    return equal(*trained), missing


def accumulation_without_averages(rank):
    """``delay_unscale`` is to be what ``no_sync`` is for DistributedDataParallel."""
    trained = []
    for settings in (COMBINED, {}):
        model = make_model()
        session, optimizer, called = prepared(model, **settings)
        for step in range(4):
            optimizer.zero_grad()
            if settings:
                backward(session, optimizer, called(batch_of(2 * step, rank)).square().mean(), delay_unscale=True)
                backward(session, optimizer, called(batch_of(2 * step + 1, rank)).square().mean())
            else:
                with called.no_sync():
                    called(batch_of(2 * step, rank)).square().mean().backward()
                called(batch_of(2 * step + 1, rank)).square().mean().backward()
            optimizer.step()
        trained.append([weight.detach().clone() for weight in model.parameters()])  # no_sync keeps buffers local, too
    return equal(*trained)


def two_optimizers_in_one_block(rank):
    trained = []
    for settings in (COMBINED, {}):
        model = make_model()
        optimizers = [sgd(model[:3].parameters()), sgd(model[3:].parameters())]
        session = amp.Session()
        session.initialize(model, optimizers, opt_level="O2", loss_scale=64.0, verbosity=0, **settings)
        called = model if settings else DistributedDataParallel(model)
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(session, optimizers, called(batch_of(step, rank)).float().square().mean())
            for optimizer in optimizers:
                optimizer.step()
        trained.append([*weights_of(model, session, optimizers[0]), *weights_of(model, session, optimizers[1])])
    return equal(*trained)


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs):
        for _ in range(2):  # its gradient is written twice
            inputs = checkpoint(self.inner, inputs, use_reentrant=True)
        return inputs


def reentrant_checkpoints(rank):
    model = Reentrant()
    theirs = copy.deepcopy(model)
    session, optimizer, called = prepared(model, **COMBINED)
    for step in range(3):
        inputs = batch_of(step, rank).requires_grad_()
        optimizer.zero_grad(), theirs.zero_grad()
        backward(session, optimizer, called(inputs).square().mean())
        theirs(inputs).square().mean().backward()
        for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
            dist.all_reduce(other.grad)
            if not torch.equal(mine.grad, other.grad / 2):
                return False
    return True


def a_parameter_that_joins_later(rank):
    """Unfreeze a layer between steps: its gradients are averaged, too."""
    model = make_model()
    model[0].weight.requires_grad_(False)
    session, optimizer, called = prepared(model, "O2", **COMBINED, loss_scale=64.0)
    for step in range(4):
        if step == 2:
            model[0].weight.requires_grad_(True)
        optimizer.zero_grad()
        backward(session, optimizer, called(batch_of(step, rank)).float().square().mean())
        optimizer.step()
    return same_on_all_ranks([*model.parameters(), *session.master_params(optimizer)])


def a_failed_backward(rank):
    """A backward that raises on every rank leaves gradients as they were; the next one is averaged."""
    model = make_model()
    session, optimizer, called = prepared(model, **COMBINED)
    for step in range(2):
        backward(session, optimizer, called(batch_of(step, rank)).square().mean())
    before = [param.grad.clone() for param in model.parameters()]
    try:
        with session.scale_loss(called(batch_of(3, rank)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise KeyError
    except KeyError:
        restored = equal(before, [param.grad for param in model.parameters()])
    optimizer.zero_grad()
    backward(session, optimizer, called(batch_of(4, rank)).square().mean())
    return restored, same_on_all_ranks([param.grad for param in model.parameters()])


def same_on_all_ranks(tensors):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [tensor.tolist() for tensor in tensors])
    return all(each == everyone[0] for each in everyone)


# -- what is refused -------------------------------------------------------------------------------------


def message_of(function):
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def models_that_differ(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank))
    return message_of(lambda: prepared(model, **COMBINED))


def settings_that_differ(rank):
    """Return the message for each setting that differs, and for settings that are equal in other words."""

    def said(optimizer=torch.optim.SGD, own=None, **settings):
        model = nn.Linear(4, 4)
        chosen = {"opt_level": "O1", "verbosity": 0, **COMBINED, **settings}
        return message_of(
            lambda: amp.Session().initialize(model, optimizer(model.parameters(), **(own or {"lr": 0.1})), **chosen)
        )

    return {
        "loss_scale": said(loss_scale=(1024.0, 128.0)[rank]),
        "level": said(opt_level=("O1", "O0")[rank]),
        "rule": said(scale_window=(100, 200)[rank]),
        "lr": said(own={"lr": (0.1, 0.2)[rank]}),
        "class": said(optimizer=(torch.optim.SGD, torch.optim.Adam)[rank]),
        "buckets": said(ddp_replica_count=(4, 8)[rank]),
        "policy": said(policy=PrecisionPolicy(op_rules={"softmax": ("float32", "bfloat16")[rank]})),
        "on_collapse": said(on_collapse=("raise", "warn")[rank]),
        "equal": said(own={"lr": (1, torch.tensor(1.0))[rank]}, verbosity=0),
        "equal scale": said(loss_scale=(128, "128.0")[rank]),
    }


def parameters_frozen_on_one_rank(rank):
    model = make_model()
    model[5].bias.requires_grad_(rank == 0)
    return message_of(lambda: prepared(model, **COMBINED))


def a_backward_outside_of_scale_loss(rank):
    model = make_model()
    session, optimizer, called = prepared(model, **COMBINED)
    messages = []
    for step in range(2):
        optimizer.zero_grad()
        called(batch_of(step, rank)).square().mean().backward()
        messages.append(message_of(optimizer.step))
        messages.append(message_of(lambda: backward(session, optimizer, model(batch_of(9, rank)).square().mean())))
        optimizer.zero_grad()
        backward(session, optimizer, called(batch_of(step, rank)).square().mean())
        messages.append(message_of(optimizer.step))
    return messages


def ddp_around(rank):
    model = make_model()
    session = amp.Session()
    session.initialize(model, sgd(model.parameters()), opt_level="O0", verbosity=0, **COMBINED)
    return message_of(lambda: DistributedDataParallel(model)(batch_of(0, rank)))


def a_complex_parameter(rank):
    model = nn.Linear(8, 4, dtype=torch.complex64)
    session = amp.Session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return message_of(lambda: session.initialize(model, optimizer, opt_level="O0", verbosity=0, **COMBINED))


def a_sparse_gradient(rank):
    model = nn.Embedding(8, 4, sparse=True)
    session = amp.Session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O0", verbosity=0, **COMBINED)
    return message_of(lambda: backward(session, optimizer, model(torch.tensor([rank])).sum()))


# -- what changes after initialize ---------------------------------------------------------------------


class Grown(nn.Module):
    """A model whose second part joins the optimizer later. The ranks draw from different generators."""

    def __init__(self, rank, *, equal_values):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        torch.manual_seed(0 if equal_values else rank)
        self.second = nn.Linear(FEATURES, 4)

    def forward(self, inputs):
        return self.second(self.first(inputs))


def grown(rank, *, added_on=(0, 1), equal_values=True, frozen=False):
    """Train while a part joins after the first step; return the weights, and what each step said."""
    torch.manual_seed(3)
    model = Grown(rank, equal_values=equal_values)
    first = nn.Sequential(model.first)
    first.requires_grad_(not frozen)
    optimizer = sgd(first.parameters())
    session = amp.Session()
    session.initialize(first, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0, **COMBINED)
    said = []
    for step in range(3):
        if step == 1 and rank in added_on:
            optimizer.add_param_group({"params": list(model.second.parameters())})
            first.requires_grad_(True)
        optimizer.zero_grad()
        loss = model(batch_of(step, rank)).square().mean()
        said.append(message_of(lambda loss=loss: backward(session, optimizer, loss)))
        optimizer.step()
    return model, said


def a_group_that_joins_on_every_rank(rank):
    model, said = grown(rank)
    frozen, _ = grown(rank, frozen=True)
    return set(said), same_on_all_ranks(model.parameters()), same_on_all_ranks(frozen.parameters())


def a_group_that_joins_equals_ddp(rank):
    """Joining is bitwise what DistributedDataParallel does that had the part from the start."""
    model, _ = grown(rank)
    torch.manual_seed(3)
    theirs = Grown(rank, equal_values=True)
    wrapped, optimizer = DistributedDataParallel(theirs), sgd(theirs.first.parameters())
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": list(theirs.second.parameters())})
        theirs.zero_grad()
        wrapped(batch_of(step, rank)).square().mean().backward()
        optimizer.step()
    return equal(list(model.parameters()), list(theirs.parameters()))


def a_group_that_joins_on_one_rank(rank):
    return grown(rank, added_on=(1,))[1]


def a_group_of_other_values(rank):
    return grown(rank, equal_values=False)[1]


def only_frozen_parameters(rank):
    return [grown(rank, added_on=added, frozen=True)[1] for added in ((0, 1), (0,))]


def another_scale_on_one_rank(rank):
    """Load 128 on rank 1 in the middle; return the messages, and whether gradients survive. Then rank 0 loads it."""
    model = make_model()
    session, optimizer, called = prepared(model, "O1", **COMBINED, loss_scale="dynamic", dynamic_init_scale=1024.0)
    backward(session, optimizer, called(batch_of(0, rank)).square().mean())
    before = [param.grad.clone() for param in model.parameters()]
    saved = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}
    said = []
    for loads in (rank == 1, False, rank == 0):
        if loads:
            session.load_state_dict(saved)
        said.append(message_of(lambda: backward(session, optimizer, called(batch_of(1, rank)).square().mean())))
        if len(said) == 1:
            said.append(equal(before, [param.grad for param in model.parameters()]))
    return said


def saved_scales(rank):
    """Return the saved scale of two steps at each level with a static scale of 1.0, under `combine_ddp` and DDP."""
    found = {}
    for level in ("O0", "O1", "O2", "O3"):
        found[level] = []
        for settings in (COMBINED, {}):
            session, optimizer, called = prepared(make_model(), level, loss_scale=1.0, **settings)
            for step in range(2):
                with session.casting():
                    backward(session, optimizer, called(batch_of(step, rank)).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
            found[level].append(session.state_dict()["loss_scaler0"])
    return found


def frozen_on_one_rank_under_a_moving_scale(rank):
    """Rank 0 freezes a layer alone: its gradients count as zero, whether or not ranks compare a new scale."""
    model = make_model()
    session, optimizer, called = prepared(model, **COMBINED, loss_scale="dynamic", scale_window=1)
    for step in range(3):
        model[0].requires_grad_(step == 0 or rank == 1)
        optimizer.zero_grad()
        backward(session, optimizer, called(batch_of(step, rank)).square().mean())
        optimizer.step()
    return same_on_all_ranks(model.parameters())


def another_number_of_steps(rank):
    """Rank 0 accumulates two backwards; rank 1 steps after each, so that its second one is of other weights."""
    model = make_model()
    del model[1]  # without buffers the ranks exchange nothing but gradients
    session, optimizer, called = prepared(model, **COMBINED)
    said = []
    for step in range(2):
        said.append(message_of(lambda step=step: backward(session, optimizer, called(batch_of(step, rank)).sum())))
        if rank == 1:
            optimizer.step()
            optimizer.zero_grad()
    return said


def a_tool_steps_on_one_rank(rank):
    model = make_model()
    session, optimizer, called = prepared(model, **COMBINED)
    if rank == 0:
        with on_this_rank_alone():
            backward(session, optimizer, called(batch_of(0, rank)).sum())
            optimizer.step()
        optimizer.zero_grad()
    return message_of(lambda: backward(session, optimizer, called(batch_of(0, rank)).sum()))


def a_sparse_gradient_on_one_rank(rank):
    """Rank 1 reaches the sparse embedding, rank 0 does not: both raise, and nothing waits."""
    model = nn.ModuleDict({"table": nn.Embedding(8, 4, sparse=True), "head": nn.Linear(4, 1)})
    session, optimizer, _ = prepared(model, **COMBINED)
    inputs = model["table"](torch.tensor([1])) if rank == 1 else torch.ones(1, 4)
    return message_of(lambda: backward(session, optimizer, model["head"](inputs).sum()))


def alone_with_a_new_group(rank):
    """One rank alone runs a backward after its optimizer has changed."""
    model, more = make_model(), nn.Linear(FEATURES, 4)
    session, optimizer, called = prepared(model, **COMBINED)
    if rank == 0:
        optimizer.add_param_group({"params": list(more.parameters())})
        with on_this_rank_alone():
            backward(session, optimizer, (called(batch_of(0, 0)) + more(batch_of(0, 0))).square().mean())
    return rank == 1 or all(param.grad is not None for param in (*model.parameters(), *more.parameters()))


def copies_on_one_rank(rank):
    """Train copies of a model on rank 0 alone, then the model on both ranks."""
    model = make_model()
    session, optimizer, called = prepared(model, **COMBINED)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), torch.load(saved, weights_only=False)] if rank == 0 else []
    for each in copies:
        each(batch_of(0, rank)).square().mean().backward()
    backward(session, optimizer, called(batch_of(1, rank)).square().mean())
    return same_on_all_ranks([param.grad for param in model.parameters()])


CHECKS = {
    **{
        f"equals DDP at {level}": lambda rank, level=level: equals_ddp(rank, level)
        for level in ("O0", "O1", "O2", "O3")
    },
    **{
        function.__name__: function
        for function in (
            large_models_are_sent_in_the_backward,
            unreached_parameters,
            accumulation_without_averages,
            two_optimizers_in_one_block,
            reentrant_checkpoints,
            a_parameter_that_joins_later,
            a_failed_backward,
            models_that_differ,
            settings_that_differ,
            parameters_frozen_on_one_rank,
            a_backward_outside_of_scale_loss,
            ddp_around,
            a_complex_parameter,
            a_sparse_gradient,
            a_group_that_joins_on_every_rank,
            a_group_that_joins_equals_ddp,
            a_group_that_joins_on_one_rank,
            a_group_of_other_values,
            only_frozen_parameters,
            another_scale_on_one_rank,
            a_sparse_gradient_on_one_rank,
            alone_with_a_new_group,
            copies_on_one_rank,
            another_number_of_steps,
            a_tool_steps_on_one_rank,
            saved_scales,
            frozen_on_one_rank_under_a_moving_scale,
        )
    },
}


def all_checks(rank):
    """Return the result of each check by name."""
    return {name: check(rank) for name, check in CHECKS.items()}


def joined_batch(rank):
    """Train on a quarter of each batch; return the weights and the scale, and whether they are those of every rank."""
    model = make_model(rank)
    del model[1]  # BatchNorm normalizes over the batch of a rank
    settings = {"loss_scale": "dynamic", "dynamic_init_scale": 1024.0} | COMBINED
    session, optimizer, called = prepared(model, "O2", **settings)
    for step in range(4):
        optimizer.zero_grad()
        loss = called(batch_of(step, 0)[2 * rank : 2 * rank + 2]).square().mean()
        backward(session, optimizer, loss * (float("inf") if (step, rank) == (1, 3) else 1.0))
        optimizer.step()
    weights = [weight.detach() for weight in session.master_params(optimizer)]
    return weights, session.loss_scale(), same_on_all_ranks(weights)


# -- the tests -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    """What both ranks found, for each check the results of rank 0 and rank 1."""
    first, second = run_ranks(all_checks)
    return {name: (first[name], second[name]) for name in first}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_trains_to_the_bit_as_distributed_data_parallel(found, level):
    """Two ranks that start from different weights; one overflows alone in one step; gradients are clipped."""
    assert found[f"equals DDP at {level}"] == (True, True)


def test_buckets_leave_while_the_backward_runs(found):
    """The first backward records the order of arrival; later ones send all buckets but those of the last layer."""
    for sent, is_equal in found["large_models_are_sent_in_the_backward"]:
        assert sent[0] == 0
        assert min(sent[1:]) > 2
        assert is_equal


def test_a_parameter_that_not_every_rank_reaches(found):
    unreached = ["never.weight", "never.bias"]
    assert found["unreached_parameters"] == ((True, [unreached, unreached]),) * 2


@pytest.mark.parametrize(
    "check",
    [
        "accumulation_without_averages",
        "two_optimizers_in_one_block",
        "reentrant_checkpoints",
        "a_parameter_that_joins_later",
        "frozen_on_one_rank_under_a_moving_scale",
    ],
)
def test_averages_are_those_of_all_ranks(found, check):
    assert found[check] == (True, True)


def test_a_backward_that_raises_changes_nothing(found):
    assert found["a_failed_backward"] == ((True, True),) * 2


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("models_that_differ", r"RuntimeError: The models differ .*1\.weight of shape \(4, 4\).*rank 1 has .*\(5, 4\)"),
        ("parameters_frozen_on_one_rank", r"RuntimeError: The gradients differ .*5\.bias .* is on rank 0 only\."),
        ("ddp_around", r"RuntimeError: DistributedDataParallel around .*combine_ddp=True"),
        ("a_complex_parameter", r"RuntimeError: weight is torch\.complex64: combine_ddp=True"),
        ("a_sparse_gradient", r"RuntimeError: weight has a gradient of torch\.sparse_coo"),
    ],
)
def test_what_cannot_be_averaged_is_refused_on_every_rank(found, check, said):
    for message in found[check]:
        assert re.match(said, message)


def test_saved_scale_is_that_of_distributed_data_parallel(found):
    counted = {"O0": 0, "O1": 0, "O2": 2, "O3": 0}  # apex counts a static scale of 1.0 with masters only
    expected = {level: [{"loss_scale": 1.0, "unskipped": count}] * 2 for level, count in counted.items()}
    assert found["saved_scales"] == (expected, expected)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("loss_scale", r"loss_scale is 1024 on rank 0 and 128 on rank 1\. .* the same values on every rank"),
        ("level", r"opt_level is 'O1' on rank 0 and 'O0' on rank 1; "),
        ("rule", r"the rule of the loss scale is Dyn.*=100.* on rank 0 and Dyn.*=200.* on rank 1\."),
        ("lr", r"the optimizer's param_groups\[0\]\['lr'\] is 0\.1 on rank 0 and 0\.2 on rank 1\."),
        ("class", r"the optimizer is torch.optim.sgd.SGD on rank 0 and torch.optim.adam.Adam on rank 1\. "),
        ("buckets", r"ddp_replica_count is 4 on rank 0 and 8 on rank 1\."),
        ("policy", r"policy is .*float32 on rank 0 and .*bfloat16 on rank 1\."),
        ("on_collapse", r"on_collapse is raise on rank 0 and warn on rank 1\."),
    ],
)
def test_settings_that_differ_are_refused_on_every_rank(found, setting, said):
    begin = r"RuntimeError: The settings of amp\.initialize .* differ between ranks: "
    for messages in found["settings_that_differ"]:
        assert re.match(begin + said, messages[setting])


def test_settings_that_are_equal_in_other_words_are_taken(found):
    for messages in found["settings_that_differ"]:
        assert messages["equal"] == messages["equal scale"] == "nothing was raised"


def test_gradients_of_one_rank_alone_are_refused(found):
    """A backward outside of scale_loss is refused by the step and by the next scale_loss, until zero_grad."""
    for messages in found["a_backward_outside_of_scale_loss"]:
        for refused in (0, 1, 3, 4):
            assert re.match(r"RuntimeError: \d\..* has a gradient of this rank only", messages[refused])
        assert messages[2] == messages[5] == "nothing was raised"


def test_parameters_that_join_the_optimizer_later_are_averaged(found):
    assert found["a_group_that_joins_on_every_rank"] == (({"nothing was raised"}, True, True),) * 2
    assert found["a_group_that_joins_equals_ddp"] == (True, True)
    assert found["alone_with_a_new_group"] == (True, True)


def test_copies_of_a_model_belong_to_one_rank(found):
    """An average of weights, for example, which rank 0 alone trains, saves or evaluates."""
    assert found["copies_on_one_rank"] == (True, True)


def test_parameters_that_join_on_one_rank_are_refused_on_every_rank(found):
    for said in found["a_group_that_joins_on_one_rank"]:
        assert said[0] == "nothing was raised"
        for message in said[1:]:
            assert re.match(r"RuntimeError: The gradients differ .*shape \(4, 16\) .* is on rank 1 only\.", message)
    for on_both, on_one in found["only_frozen_parameters"]:
        assert set(on_both) == {"nothing was raised"}
        assert re.match(r"RuntimeError: The gradients differ .* on rank 0 only\.", on_one[1])


def test_parameters_that_join_with_other_values_are_refused_on_every_rank(found):
    for said in found["a_group_of_other_values"]:
        assert re.match(r"RuntimeError: The gradients differ .*shape \(4, 16\).* with values of checksum", said[1])


def test_a_loss_scale_that_one_rank_loads_is_refused_until_all_have_it(found):
    begin = (
        r"RuntimeError: .* differ between ranks: the loss scale of loss_id 0 is 1024\.0 on rank 0 and 128\.0 on rank 1"
    )
    for first, is_restored, second, third in found["another_scale_on_one_rank"]:
        assert re.match(begin, first)
        assert re.match(begin, second)
        assert is_restored
        assert third == "nothing was raised"


def test_ranks_of_which_one_is_a_step_ahead_are_refused(found):
    for first, second in found["another_number_of_steps"]:
        assert first == "nothing was raised"
        assert re.match(r"RuntimeError: .* the number of steps is 0 on rank 0 and 1 on rank 1\.", second)
    assert found["a_tool_steps_on_one_rank"] == ("nothing was raised",) * 2


def test_a_gradient_that_one_rank_cannot_average_is_refused_on_every_rank(found):
    first, second = found["a_sparse_gradient_on_one_rank"]
    assert first == second
    assert re.match(r"RuntimeError: table\.weight has a gradient of torch\.sparse_coo.*Found on rank 1\.", first)


def one_batch_more(rank):
    """Rank 0 has one batch more than rank 1, which ends."""
    model = make_model()
    session, optimizer, called = prepared(model, **COMBINED)
    said = []
    for step in range(2 - rank):
        said.append(message_of(lambda step=step: backward(session, optimizer, called(batch_of(step, rank)).sum())))
        optimizer.zero_grad()
    return said


def test_a_rank_that_waits_for_one_that_has_ended_says_so():
    (first, second), _ = run_ranks(one_batch_more)
    assert first == "nothing was raised"
    assert re.match(r"RuntimeError: This rank waited for the others to .*the same number of batches.*gloo", second)


def test_four_ranks_train_as_one_on_the_joined_batch():
    results = run_ranks(joined_batch, world_size=4)
    model = make_model()
    del model[1]
    optimizer = sgd(model.parameters())
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale="dynamic", dynamic_init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch_of(step, 0)).square().mean() * (float("inf") if step == 1 else 1.0)
        backward(session, optimizer, loss)
        optimizer.step()
    for weights, scale, is_same in results:
        assert is_same
        assert scale == session.loss_scale() == 512.0
        for one, other in zip(weights, session.master_params(optimizer), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=2e-4)  # gradients are averaged in half


def test_buckets_are_cut_between_parts():
    assert bucket_ends([48, 96], 4, 4) == [2]
    million = 2**20
    assert bucket_ends([million * part for part in range(1, 9)], 4, 4) == [2, 4, 6, 8]
    assert bucket_ends([million * part for part in range(1, 9)], 4, 1) == [8]
    assert bucket_ends([30 * million, 60 * million, 61 * million], 4, 1) == [1, 2, 3]  # 24 million at most in float32
    assert bucket_ends([30 * million, 60 * million, 61 * million], 2, 1) == [2, 3]


def test_a_process_group_is_needed():
    model = make_model()
    with pytest.raises(RuntimeError, match=r"combine_ddp=True without a process group.*torchrun"):
        amp.Session().initialize(model, sgd(model.parameters()), opt_level="O0", verbosity=0, **COMBINED)
