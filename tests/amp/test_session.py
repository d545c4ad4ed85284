"""A session from initialize to reset: levels, scales, refusals, records; two sessions side by side."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp
from amplab.policies import cpu_half

LEVELS = ("O0", "O1", "O2", "O3")


def dtypes_inside(model, inputs):
    """The dtypes that the first layer gets and gives, and that the model gives."""
    seen = []
    handle = model[0].register_forward_hook(lambda _, args, output: seen.extend((args[0].dtype, output.dtype)))
    try:
        seen.append(model(inputs).dtype)
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("level", "weight", "norm", "seen"),
    [
        ("O0", torch.float32, torch.float32, [torch.float32, torch.float32, torch.float32]),
        ("O1", torch.float32, torch.float32, [torch.float32, torch.float16, torch.float16]),
        ("O2", torch.float16, torch.float32, [torch.float16, torch.float16, torch.float32]),
        ("O3", torch.float16, torch.float16, [torch.float16, torch.float16, torch.float32]),
    ],
)
def test_dtypes_of_a_level(session, problem, level, weight, norm, seen):
    model = problem.model()
    session.initialize(model, opt_level=level, verbosity=0)
    assert (model[0].weight.dtype, model[1].weight.dtype, model[1].running_mean.dtype) == (weight, norm, norm)
    with session.casting():
        assert dtypes_inside(model, problem.inputs) == seen


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(p, 0.01)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_ends_where_float32_training_does(problem, level, make):
    final = []
    for chosen in ("O0", level):
        session, model = amp.Session(), problem.model()
        optimizer = make(model.parameters())
        session.initialize(model, optimizer, opt_level=chosen, verbosity=0)
        losses = problem.train(session, model, optimizer, range(60))
        final.append(sum(losses[-16:]) / 16)
    assert final[0] < 0.1 * losses[0]
    assert final[1] == pytest.approx(final[0], rel=0.05)


def test_training_in_pure_half(session, problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.initialize(model, optimizer, opt_level="O3", loss_scale=128.0, verbosity=0)
    losses = problem.train(session, model, optimizer, range(60))
    assert losses[-1] < 0.2 * losses[0]
    assert {param.dtype for param in session.master_params(optimizer)} == {torch.float16}


def test_o0_is_float32_training_bit_for_bit(session, problem):
    plain, model = problem.model(), problem.model()
    plain_optimizer = torch.optim.Adam(plain.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    session.initialize(model, optimizer, opt_level="O0", verbosity=0)
    problem.train(session, model, optimizer, range(5))
    for step in range(5):
        problem.loss(plain, step).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))


def test_o2_is_training_with_masters_written_by_hand(session, problem):
    """Oracle: a half model and float32 masters in plain torch, with the CPU's own half products on both sides."""
    model, by_hand = problem.model(batch_norm=False), problem.model(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    masters = [param.detach().clone() for param in by_hand.parameters()]
    hand_optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    by_hand.half()
    session.initialize(model, optimizer, opt_level="O2", loss_scale=1024.0, verbosity=0)
    with cpu_half("native"):
        problem.train(session, model, optimizer, range(6))
    for step in range(6):
        inputs, labels = problem.batch(step)
        (F.cross_entropy(by_hand(inputs.half()).float(), labels) * 1024).backward()
        for master, param in zip(masters, by_hand.parameters(), strict=True):
            master.grad, param.grad = param.grad.float() / 1024, None
        hand_optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, by_hand.parameters(), strict=True):
                param.copy_(master)
    assert all(map(torch.equal, masters, session.master_params(optimizer)))
    assert all(map(torch.equal, by_hand.parameters(), model.parameters()))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_gradients_of_half_products_are_accumulated_in_float32(session, level):
    torch.manual_seed(0)
    model = nn.Linear(512, 64, bias=False)
    session.initialize(model, opt_level=level, verbosity=0)
    inputs, above = torch.randn(256, 512).half(), torch.randn(256, 64).half()
    with cpu_half("fp32_accumulate"):
        output = model(inputs.float())
        output.backward(above.float())
    assert torch.equal(output, (inputs.float() @ model.weight.float().T).half().float())
    assert torch.equal(model.weight.grad, (above.float().T @ inputs.float()).half())


def test_scale_grows_after_the_window_and_stops_at_the_ceiling(session, problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.initialize(
        model, optimizer, opt_level="O1", verbosity=0, dynamic_init_scale=64, scale_window=3, scale_growth_factor=4,
        max_loss_scale=512,
    )  # fmt: skip
    scales = []
    session.subscribe(lambda record: scales.append(record.loss_scale))
    problem.train(session, model, optimizer, range(8))
    assert scales == [64, 64, 64, 256, 256, 256, 512, 512]


def overflow(session, optimizer, param):
    with session.scale_loss(param.sum() * 0, optimizer) as scaled_loss:
        scaled_loss.backward()
        param.grad.fill_(float("inf"))
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Loss scaler 0 has skipped 20 steps")
@pytest.mark.parametrize(
    ("floor", "lowest"), [(None, torch.finfo(torch.float32).tiny), (0, torch.finfo(torch.float32).tiny), (4.0, 4.0)]
)
def test_scale_never_falls_below_its_floor(session, floor, lowest):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, verbosity=0, min_loss_scale=floor, on_collapse="warn")
    for _ in range(200):
        overflow(session, optimizer, model.weight)
    assert session.loss_scale() == lowest
    optimizer.zero_grad()
    with session.scale_loss(model.weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad.item() == 1.0


def test_disabled_changes_nothing(session, problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert session.initialize(model, optimizer, enabled=False, opt_level="no such") == (model, optimizer)
    loss = problem.loss(model, 0)
    with session.scale_loss(loss, "anything") as scaled_loss:
        assert scaled_loss is loss
    assert (session.opt_level, session.loss_scale(), session.state_dict()) == (None, 1.0, {})
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_return_mirrors_the_input(session, problem):
    one, two = problem.model(), problem.model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    assert session.initialize(one, verbosity=0) is one
    assert session.initialize([one], verbosity=0) == [one]
    assert session.initialize(one, [], verbosity=0) == (one, [])
    assert session.initialize([one, two], optimizers[0], verbosity=0) == ([one, two], optimizers[0])
    assert session.initialize([one, two], optimizers, verbosity=0) == ([one, two], optimizers)
    assert session.initialize(models=one, optimizers=optimizers[0], verbosity=0) == (one, optimizers[0])


def test_loss_ids_have_scales_of_their_own(session):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, num_losses=2, verbosity=0)
    with session.scale_loss(model.weight.sum(), optimizer, loss_id=1) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    assert (session.loss_scale(0), session.loss_scale(1)) == (2.0**16, 2.0**15)


def test_records_name_the_gradient_nearest_the_loss(session, problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, verbosity=0)
    records = []
    unsubscribe = session.subscribe(records.append)
    for _ in range(2):
        with session.casting(), session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
            model[0].weight.grad[0, 0] = float("nan")
            model[1].bias.grad[0] = float("inf")
        unsubscribe()
    optimizer.step()
    expected = amp.ScaleRecord(0, 2.0**16, 2.0**15, found_inf=True, skipped=True, first_nonfinite="1.bias")
    assert records == [expected]
    outcome = session.last_step(optimizer)
    assert (outcome.stepped, outcome.first_nonfinite) == (False, "1.bias")
    assert outcome.reason == "gradient overflow at loss scale 65536.0 of loss scaler 0, first in the gradient of 1.bias"


def test_the_records_of_one_optimizer_say_why_its_step_was_skipped(session):
    """Of three backwards the first two overflow; the third one, which overflows too, is that of another optimizer."""
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    session.initialize(models, optimizers, num_losses=3, verbosity=0)
    records, ends = ([], []), []
    for each, optimizer in zip(records, optimizers, strict=True):
        ends.append(session.subscribe(each.append, optimizer))
    for loss_id, place in ((1, 0), (0, 0), (2, 1)):
        with session.scale_loss(models[place].weight.sum(), optimizers[place], loss_id=loss_id) as scaled_loss:
            (scaled_loss * float("inf")).backward()
    assert [[each.loss_id for each in of_one] for of_one in records] == [[1, 0], [2]]
    for optimizer, of_one in zip(optimizers, records, strict=True):
        optimizer.step()
        assert session.last_step(optimizer).overflow is of_one[0]
        optimizer.zero_grad()
    ends[0]()
    with session.scale_loss(models[0].weight.sum() + models[1].weight.sum(), optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        assert session.last_step(optimizer).overflow is None
    assert [[each.loss_id for each in of_one] for of_one in records] == [[1, 0], [2, 0]]
    with pytest.raises(RuntimeError, match=r"^This Adam was not part of amp.initialize"):
        session.subscribe(print, torch.optim.Adam(models[0].parameters()))


def test_names_distinguish_models(session):
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    session.initialize(models, optimizer, opt_level="O2", verbosity=0)
    records = []
    session.subscribe(records.append)
    with session.scale_loss(models[0](torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        (scaled_loss * float("nan")).backward()
    assert records[0].first_nonfinite == "models[0].bias"


def test_a_static_scale_is_checked_for_subscribers_and_never_skips(session):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O0", verbosity=0)
    records = []
    session.subscribe(records.append)
    with session.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    optimizer.step()
    assert records == [amp.ScaleRecord(0, 1.0, 1.0, found_inf=True, skipped=False, first_nonfinite="bias")]
    assert session.last_step(optimizer).stepped
    assert not model.weight.isfinite().all()


def test_a_subscriber_that_raises_leaves_everything_in_order(session, problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    unsubscribe = session.subscribe(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        problem.train(session, model, optimizer, [0])
    unsubscribe()
    optimizer.step()
    assert session.last_step(optimizer).stepped
    assert session.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_a_session_keeps_nothing_alive(session, problem):
    model = problem.model()
    optimizer = torch.optim.Adam(model.parameters())
    for level in LEVELS[:3]:
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
        problem.train(session, model, optimizer, range(2))
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert session.memory().total == 0


def test_two_sessions_in_two_threads_do_not_meet(problem):
    """Each thread's run is bitwise the run that it is alone."""

    def run(level, losses, meet, model):
        session = amp.Session()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session.initialize(model, optimizer, opt_level=level, verbosity=0)
        for step in range(20):
            meet()
            losses += problem.train(session, model, optimizer, [step])

    alone = {level: [] for level in LEVELS[:3]}
    for level, losses in alone.items():
        run(level, losses, lambda: None, problem.model())
    together = {level: [] for level in alone}
    barrier = threading.Barrier(len(together))
    threads = [  # the models are made here: threads share the generator that seeds them
        threading.Thread(target=run, args=(level, losses, barrier.wait, problem.model()))
        for level, losses in together.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_half_copies_of_weights_go_with_their_backward(session):
    model = nn.Linear(37, 41)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def copies():
        tensors = (kept for kept in gc.get_objects() if type(kept) is torch.Tensor)
        return sum(kept.shape == (41, 37) and kept.dtype == torch.float16 for kept in tensors)

    with session.casting():
        loss = model(torch.ones(1, 37)).sum()
        assert copies() == 1
        with session.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        del loss, scaled_loss
        assert copies() == 0


def test_casting_ends_with_its_block(session, problem):
    model = problem.model()
    session.initialize(model, opt_level="O1", verbosity=0)
    weight = torch.ones(2, 2)
    with session.casting():
        assert (weight @ weight).dtype == torch.float16
    assert (weight @ weight).dtype == torch.float32


def test_forward_casts_without_casting_too(session, problem):
    model = problem.model()
    session.initialize(model, opt_level="O1", verbosity=0)
    assert model(problem.inputs).dtype == torch.float16


def test_half_inputs_reach_recurrent_layers_of_o1(session):
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3))
    session.initialize(model, opt_level="O1", verbosity=0)
    outputs, (hidden, _) = model(torch.randn(5, 2, 4))
    assert (outputs.dtype, hidden.dtype) == (torch.float16, torch.float16)


def test_outputs_are_cast_as_asked(session, problem):
    model = problem.model()
    session.initialize(model, opt_level="O1", cast_model_outputs=torch.float32, verbosity=0)
    assert model(problem.inputs).dtype == torch.float32
    session.initialize(model, opt_level="O2", cast_model_outputs=torch.float16, verbosity=0)
    assert model(problem.inputs).dtype == torch.float16


def test_bfloat16_trains_at_o2(session, problem):
    model = problem.model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    session.initialize(model, optimizer, opt_level="O2", cast_model_type=torch.bfloat16, verbosity=0)
    losses = problem.train(session, model, optimizer, range(40))
    assert model[0].weight.dtype == torch.bfloat16
    assert losses[-1] < 0.2 * losses[0]


def test_masters_hold_what_the_model_had_before_rounding(session, problem):
    model = problem.model()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert all(map(torch.equal, before, session.master_params(optimizer)))


def test_a_refusal_leaves_the_running_experiment_alone(session, problem):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError):
        session.initialize(model, optimizer, opt_level="O1", master_weights=True, verbosity=0)
    assert session.opt_level == "O2"
    assert model[0].weight.dtype == torch.float16
    problem.train(session, model, optimizer, [0])


def uninitialized(session):
    return [
        lambda: session.scale_loss(torch.ones(()), []).__enter__(),
        session.state_dict,
        lambda: session.load_state_dict({}),
        session.loss_scale,
    ]


@pytest.mark.parametrize("call", range(4))
def test_initialize_comes_first(session, call):
    with pytest.raises(RuntimeError, match=r"internal Amp state has not been initialized.  model, optimizer = amp"):
        uninitialized(session)[call]()
