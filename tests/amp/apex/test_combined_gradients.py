"""combine_grad: training is the same to the bit, gradients lie in flat buffers, and come back to them."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import GradScaler
from amplab.amp import Session

LEVELS = ["O0", "O1", "O2", "O3"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4, weight_decay=0.01),
}
STEPS = 30


class Sometimes(nn.Module):
    """A layer that every third step goes without, so that its gradients are None then."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, inputs, step):
        hidden = self.always(inputs)
        return hidden if step % 3 == 0 else hidden + self.sometimes(hidden)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.body, self.head = Sometimes(), nn.Linear(64, 3)

    def forward(self, inputs, step=1):
        hidden = F.relu(self.norm(self.conv(self.body(inputs, step).unsqueeze(1))))
        return self.head(hidden.flatten(1))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss_of(model, step, *, overflow=False):
    inputs, labels = batch(step)
    loss = F.cross_entropy(model(inputs, step).float(), labels)
    return loss * (math.inf if overflow else 1.0)


def bits(tensors):
    """Integers, so that -0.0 and 0.0 differ and NaN is NaN."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [None if each is None else each.detach().clone().view(kinds[each.element_size()]) for each in tensors]


def same(left, right):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(left, right, strict=True))


def snapshot(model, optimizers):
    tensors = [*model.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            tensors += [each for param in group["params"] for each in (param, param.grad)]
            states = (optimizer.state[param] for param in group["params"] if param in optimizer.state)
            tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return bits(tensors)


def make(name, *, several=False):
    torch.manual_seed(0)
    model = Net()
    if not several:
        return model, [OPTIMIZERS[name](model.parameters())]
    head = {id(param) for param in model.head.parameters()}
    rest = [param for param in model.parameters() if id(param) not in head]
    return model, [OPTIMIZERS[name](rest), OPTIMIZERS[name](model.head.parameters())]


def clear(optimizers, step):
    """Both ways of clearing, in turn."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=step % 4 != 3)


def train_apex(level, name, combine, *, accumulate=1, delay=False, several=False, skips=True, steps=STEPS):
    model, optimizers = make(name, several=several)
    session = Session()
    scale = {"dynamic_init_scale": 2.0**10} if skips else {}
    options = {"loss_scale": "dynamic"} if skips else {}
    session.initialize(
        model, optimizers, opt_level=level, verbosity=0, combine_grad=combine, check_combined_tensors=combine,
        **options, **scale,
    )  # fmt: skip
    seen = []
    with session.casting():
        for step in range(steps):
            for part in range(accumulate):
                loss = loss_of(model, step * accumulate + part, overflow=skips and step % 7 == 5 and part == 0)
                delayed = delay and part < accumulate - 1
                with session.scale_loss(loss, optimizers, delay_unscale=delayed) as scaled_loss:
                    scaled_loss.backward()
            seen.append(snapshot(model, optimizers))
            for optimizer in optimizers:
                optimizer.step()
            clear(optimizers, step)
            seen.append(snapshot(model, optimizers))
    if combine:
        assert all(sum(map(len, session.combined_grads(optimizer))) > 0 for optimizer in optimizers)
    outcomes = [session.last_step(optimizer) for optimizer in optimizers]
    session.reset()
    return seen, outcomes


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"skips": False},
        {"accumulate": 3},
        {"accumulate": 2, "delay": True, "skips": False},
        {"several": True},
        {"several": True, "accumulate": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_apex_face_trains_to_the_bit_as_without(level, name, how, capsys):
    with_buffers, outcomes = train_apex(level, name, True, **how)
    without, expected = train_apex(level, name, None, **how)
    for step, (mine, theirs) in enumerate(zip(with_buffers, without, strict=True)):
        assert same(mine, theirs), f"after half-step {step}"
    assert outcomes == expected
    said = capsys.readouterr().out
    late = "afterwards, parameter [0-9]: it has a gradient for the first time. The same holds for 1 more.\n"
    assert len(re.findall(late, said)) == said.count("\n") == (0 if how.get("delay") else 1)


def train_torch(name, combine, *, how):
    model, optimizers = make(name, several="several" in how)
    if "fused" in how:
        model, optimizers = make_fused(name)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=4, num_losses=2, combine_grad=combine)
    seen = []
    for step in range(STEPS):
        overflow = step % 7 == 5
        if "blocks" in how:
            for loss_id in range(2):
                loss = loss_of(model, 2 * step + loss_id, overflow=overflow and loss_id == 0)
                with scaler.scale_loss(loss, optimizers, loss_id) as scaled_loss:
                    scaled_loss.backward()
        else:
            for part in range(3 if "accumulate" in how else 1):
                scaler.scale(loss_of(model, 3 * step + part, overflow=overflow)).backward()
        for optimizer in optimizers if "unscale first" in how else ():
            scaler.unscale_(optimizer)
        seen.append(snapshot(model, optimizers))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        clear(optimizers, step)
        seen.append([*snapshot(model, optimizers), *bits([torch.tensor(scaler.get_scale())])])
    return seen


def make_fused(name):
    torch.manual_seed(0)
    model = Net()
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    return model, [kind(model.parameters(), lr=0.01, fused=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "how",
    [
        ("unscale first",),
        ("accumulate",),
        ("several", "unscale first"),
        ("several",),
        ("blocks",),
        ("blocks", "several"),
        ("fused",),
        ("fused", "unscale first", "accumulate"),
    ],
    ids=", ".join,
)
def test_the_torch_face_trains_to_the_bit_as_without(name, how):
    for step, (mine, theirs) in enumerate(
        zip(train_torch(name, True, how=how), train_torch(name, False, how=how), strict=True)
    ):
        assert same(mine, theirs), f"after half-step {step}"


def prepared(level="O1", name="sgd", *, combine=True, check=True, **options):
    model, (optimizer,) = make(name)
    session = Session()
    session.initialize(
        model, optimizer, opt_level=level, verbosity=0, combine_grad=combine, check_combined_tensors=check, **options
    )
    return session, model, optimizer


def backward(session, model, optimizer, step=1, **options):
    with session.casting(), session.scale_loss(loss_of(model, step), optimizer) as scaled_loss:
        scaled_loss.backward(**options)


def lie_in_buffers(session, optimizer):
    memory = {buffer.untyped_storage().data_ptr() for buffer in session.combined_grads(optimizer)}
    grads = [param.grad for param in session.master_params(optimizer) if param.grad is not None]
    return bool(grads) and all(grad.untyped_storage().data_ptr() in memory for grad in grads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_lie_in_one_buffer_for_each_kind_and_come_back_to_it(level, set_to_none, capsys):
    session, model, optimizer = prepared(level, loss_scale=128.0)
    known = None
    for step in (1, 2, 3):
        backward(session, model, optimizer, step)
        buffers = session.combined_grads(optimizer)
        assert lie_in_buffers(session, optimizer)
        kinds = {"O2": [torch.float32] * 2, "O3": [torch.float16]}.get(level, [torch.float32])
        assert [buffer.dtype for buffer in buffers] == kinds
        if known is not None:
            assert all(now is before for now, before in zip(buffers, known, strict=True))
        known = buffers
        grads = [param.grad for param in session.master_params(optimizer) if param.grad is not None]
        squares = sum(grad.double().square().sum() for grad in grads)
        assert torch.isclose(sum(buffer.double().square().sum() for buffer in buffers), squares, rtol=1e-12)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all(buffer.count_nonzero() == 0 for buffer in session.combined_grads(optimizer))
    assert capsys.readouterr().out == ""


BREAKS = {
    "a new group": "has a gradient for the first time",
    "other parameters": "another parameter replaced it",
    "assigned gradients": "another tensor was assigned",
    "a graph": "made a new gradient with a graph",
    "unfrozen": "has a gradient for the first time",
}


def break_buffers(how, model, optimizer, extra):
    if how == "a new group":
        optimizer.add_param_group({"params": [extra]})
    elif how == "other parameters":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = list(model.parameters())
    elif how == "assigned gradients":
        model.head.weight.grad = model.head.weight.grad.clone()
    elif how == "unfrozen":
        model.head.requires_grad_(True)


def with_break(how, *, combine, check=True):
    session, model, optimizer = prepared("O0", combine=combine, check=check and combine, loss_scale=128.0)
    extra = nn.Parameter(torch.ones(3))
    if how == "unfrozen":
        model.head.requires_grad_(False)
    seen = []
    for step in range(6):
        if step == 3 and how != "assigned gradients":
            break_buffers(how, model, optimizer, extra)
        for part in range(2):
            loss = loss_of(model, step + 1) + (extra.square().sum() if step >= 3 and how == "a new group" else 0.0)
            with session.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward(create_graph=step == 3 and how == "a graph")
            if step == 3 and part == 0 and how == "assigned gradients":
                break_buffers(how, model, optimizer, extra)
        seen.append(snapshot(model, [optimizer]))
        optimizer.step()
        optimizer.zero_grad()
        if combine and step != 3:
            backward(session, model, optimizer)
            assert lie_in_buffers(session, optimizer)
            optimizer.zero_grad()
    seen.append(snapshot(model, [optimizer]))
    return seen


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("how", BREAKS)
def test_what_breaks_the_buffers_is_said_and_mended_to_the_bit(how, capsys):
    mine = with_break(how, combine=True)
    said = [line for line in capsys.readouterr().out.splitlines() if "O0" not in line]
    assert all(line.startswith("Combined grad has been destroyed and will be recombined afterwards, ") for line in said)
    assert any(BREAKS[how] in line for line in said)
    theirs = with_break(how, combine=False)
    assert all(same(*each) for each in zip(mine, theirs, strict=True))
    with_break(how, combine=True, check=False)
    assert capsys.readouterr().out == ""


def test_memory_counts_what_buffers_take_beyond_gradients():
    session, model, optimizer = prepared("O1", loss_scale=128.0)
    assert session.memory().gradient_buffers == 0
    backward(session, model, optimizer)
    use = session.memory()
    (buffer,) = session.combined_grads(optimizer)
    assert use.gradients == sum(param.numel() for param in model.parameters()) * 4
    assert use.gradient_buffers == buffer.nbytes - use.gradients > 0
    optimizer.zero_grad()
    assert (session.memory().gradients, session.memory().gradient_buffers) == (0, buffer.nbytes)
    assert session.memory().total == use.total
    session.reset()
    assert session.memory().gradient_buffers == 0


def test_sparse_gradients_stay_outside():
    def train(combine):
        torch.manual_seed(0)
        table, head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)
        optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
        session = Session()
        options = {"combine_grad": combine, "loss_scale": 128.0, "verbosity": 0}
        session.initialize([table, head], optimizer, opt_level="O0", **options)
        for step in range(4):
            with session.scale_loss(head(table(torch.tensor([step, 3]))).square().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            norm = session.clip_grad_norm_(optimizer, 1e6)
            assert table.weight.grad.is_sparse
            assert combine is None or len(session.combined_grads(optimizer)) == 1
            optimizer.step()
            optimizer.zero_grad()
        return bits([table.weight, head.weight, head.bias]), norm

    (mine, my_norm), (theirs, norm) = train(True), train(None)
    assert same(mine, theirs)
    assert torch.isclose(my_norm, norm, rtol=1e-6)


def test_a_backward_that_fails_leaves_the_buffers_as_they_were():
    session, model, optimizer = prepared("O1", loss_scale=128.0)
    backward(session, model, optimizer)
    before = bits([param.grad for param in model.parameters()])

    def fail():
        with session.scale_loss(loss_of(model, 2), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert same(before, bits([param.grad for param in model.parameters()]))
    assert lie_in_buffers(session, optimizer)
