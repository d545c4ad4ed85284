"""The functions of ``amp_C`` in apex's argument order, against torch's optimizers and apex's formulas in float64."""

import math
import subprocess
import sys

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

import amplab
from amplab.multi_tensor_apply import amp_c, apex_c, multi_tensor_applier

SHAPES = [(3, 5), (7,), (2, 3, 4), (0,), ()]
CHUNK = 65536


def flag(value=0):
    return torch.full((1,), value, dtype=torch.int32)


def randoms(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def zeros(dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


def close(mine, exact, limit=2e-6):
    pairs = zip(mine, exact, strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=limit, atol=limit) for a, b in pairs)


def in_double(tensors):
    return [each.detach().double() for each in tensors]


# -- scale, add, measure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_scale_unscales_gradients_into_masters_to_the_bit(low):
    grads, masters, overflow = randoms(low), zeros(), flag()
    multi_tensor_applier(amp_c.multi_tensor_scale, overflow, [grads, masters], 1 / 128)
    assert all(torch.equal(m, g.float() / 128) for m, g in zip(masters, grads, strict=True))
    assert overflow.item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, -1])
def test_the_flag_is_set_by_what_is_not_finite_and_never_cleared(bad, place):
    tensors, overflow = randoms(), flag()
    tensors[0].view(-1)[place] = bad
    for op, lists, args in (
        (amp_c.multi_tensor_scale, [tensors, zeros()], (1.0,)),
        (amp_c.multi_tensor_axpby, [tensors, randoms(), zeros()], (1.0, 1.0, 0)),
        (amp_c.multi_tensor_l2norm, [tensors], ()),
        (amp_c.multi_tensor_l2norm_scale, [tensors, zeros()], (1.0,)),
        (amp_c.multi_tensor_unscale_l2norm, [tensors], (torch.ones(1),)),
    ):
        overflow.zero_()
        op(CHUNK, overflow, lists, *args)
        assert overflow.item() == 1, op
        amp_c.multi_tensor_scale(CHUNK, overflow, [randoms(), zeros()], 1.0)
        assert overflow.item() == 1


@pytest.mark.parametrize("arg_to_check", [-1, 0, 1])
def test_axpby_adds_and_checks_as_its_arguments_say(arg_to_check):
    xs, ys, outs = randoms(torch.float16), randoms(seed=1), zeros()
    overflow = flag()
    amp_c.multi_tensor_axpby(CHUNK, overflow, [xs, ys, outs], 0.5, 2.0, arg_to_check)
    assert all(torch.equal(o, x.float() * 0.5 + y * 2.0) for o, x, y in zip(outs, xs, ys, strict=True))
    ys[1][0] = math.inf
    amp_c.multi_tensor_axpby(CHUNK, overflow, [xs, ys, outs], 0.5, 2.0, arg_to_check)
    assert overflow.item() == (arg_to_check != 0)


def test_axpby_may_write_what_it_reads():
    xs, ys = randoms(), randoms(seed=1)
    expected = [x + y for x, y in zip(xs, ys, strict=True)]
    amp_c.multi_tensor_axpby(CHUNK, flag(), [xs, ys, xs], 1.0, 1.0, -1)
    assert all(map(torch.equal, xs, expected))


def test_norms_are_those_of_float64():
    tensors = randoms(torch.float16)
    lengths = [each.double().norm().item() for each in tensors]
    whole = math.sqrt(sum(length**2 for length in lengths))
    norm, none = amp_c.multi_tensor_l2norm(CHUNK, flag(), [tensors], False)
    assert (norm.shape, none.shape) == ((1,), (0,))
    assert norm.item() == pytest.approx(whole)
    norm, each = amp_c.multi_tensor_l2norm_mp(CHUNK, flag(), [tensors], True)
    assert each.tolist() == pytest.approx(lengths)
    norm, each = amp_c.multi_tensor_unscale_l2norm(CHUNK, flag(), [tensors], torch.tensor([0.25]), True)
    assert (norm.item(), each.tolist()) == (pytest.approx(whole / 4), pytest.approx([one / 4 for one in lengths]))
    outs = zeros()
    norm, each = amp_c.multi_tensor_l2norm_scale(CHUNK, flag(), [tensors, outs], 0.25, True)
    assert (norm.item(), each.tolist()) == (pytest.approx(whole / 4), pytest.approx([one / 4 for one in lengths]))
    assert all(torch.equal(o, x.float() / 4) for o, x in zip(outs, tensors, strict=True))


def test_empty_lists():
    overflow = flag()
    amp_c.multi_tensor_scale(CHUNK, overflow, [[], []], 1.0)
    assert amp_c.multi_tensor_l2norm(CHUNK, overflow, [[]], True)[0].item() == 0.0
    amp_c.multi_tensor_adam(CHUNK, overflow, [[], [], [], []], 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert overflow.item() == 0


# -- steps, against torch ----------------------------------------------------------------------------------------------


def stepped(make, steps=4):
    """The parameters after some steps of torch's optimizer in float64, on the gradients of ``randoms``."""
    params = [torch.nn.Parameter(each.double()) for each in randoms()]
    optimizer = make(params)
    for step in range(steps):
        for param, grad in zip(params, randoms(seed=step + 1), strict=True):
            param.grad = grad.double()
        optimizer.step()
    return in_double(params)


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.2, False), (0.9, 0.0, True)]
)
def test_sgd(momentum, dampening, nesterov):
    params, momenta, copies = randoms(), zeros(), zeros(torch.float16)
    for step in range(4):
        grads = [grad * 8 for grad in randoms(seed=step + 1)]
        lists = [grads, params, momenta, copies]
        amp_c.multi_tensor_sgd(
            CHUNK, flag(), lists, 0.01, momentum, dampening, 0.1, nesterov, step == 0, False, 1 / 8
        )  # fmt: skip
    exact = stepped(lambda params: SGD(params, 0.1, momentum, dampening, 0.01, nesterov))
    assert close(params, exact)
    assert all(torch.equal(p.half(), c) for p, c in zip(params, copies, strict=True))


@pytest.mark.parametrize(("mode", "twin"), [(0, Adam), (1, AdamW)])
def test_adam(mode, twin):
    params, firsts, seconds = randoms(), zeros(), zeros()
    for step in range(4):
        lists = [randoms(seed=step + 1), params, firsts, seconds]
        amp_c.multi_tensor_adam(CHUNK, flag(), lists, 0.01, 0.9, 0.99, 1e-8, step + 1, mode, 1, 0.1)
    assert close(params, stepped(lambda params: twin(params, 0.01, (0.9, 0.99), 1e-8, 0.1)))


@pytest.mark.parametrize("masters", [False, True])
def test_capturable_adam_takes_tensors_and_leaves_gradients_unscaled(masters):
    params, firsts, seconds = randoms(), zeros(), zeros()
    halves = [each.half() for each in params]
    op = amp_c.multi_tensor_adam_capturable_master if masters else amp_c.multi_tensor_adam_capturable
    for step in range(4):
        grads = [grad * 64 for grad in randoms(seed=step + 1)]
        lists = [grads, halves, firsts, seconds, params] if masters else [grads, params, firsts, seconds]
        numbers = (torch.tensor(0.01), 0.9, 0.99, 1e-8, torch.tensor([step + 1], dtype=torch.int32), 1, 1, 0.1)
        op(CHUNK, flag(), lists, *numbers, torch.tensor(1 / 64))
        assert all(map(torch.equal, grads, randoms(seed=step + 1)))
    assert close(params, stepped(lambda params: AdamW(params, 0.01, (0.9, 0.99), 1e-8, 0.1)))
    assert not masters or all(torch.equal(h, p.half()) for h, p in zip(halves, params, strict=True))
    grads = [grad * 64 for grad in randoms()]
    before = [each.clone() for each in params]
    lists = [grads, halves, firsts, seconds, params] if masters else [grads, params, firsts, seconds]
    op(CHUNK, flag(1), lists, *numbers, torch.tensor(1 / 64))
    assert all(map(torch.equal, params, before))
    assert all(torch.equal(grad, each * 64) for grad, each in zip(grads, randoms(), strict=True))


def test_adagrad():
    params, sums = randoms(), zeros()
    for step in range(4):
        amp_c.multi_tensor_adagrad(CHUNK, flag(), [randoms(seed=step + 1), params, sums], 0.1, 1e-10, 0, 0.1)
    assert close(params, stepped(lambda params: Adagrad(params, 0.1, weight_decay=0.1, eps=1e-10)))


# -- steps, against apex's formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nvlamb", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("mode", [0, 1])
def test_lamb(mode, decay, nvlamb):
    params, firsts, seconds = randoms(), zeros(), zeros()
    exact, m, v = in_double(params), in_double(firsts), in_double(seconds)
    for step in (1, 2, 3):
        grads = randoms(seed=step)
        norm = amp_c.multi_tensor_l2norm(CHUNK, flag(), [grads])[0]
        lists = [grads, params, firsts, seconds]
        amp_c.multi_tensor_lamb(
            CHUNK, flag(), lists, 0.01, 0.9, 0.99, 1e-6, step, 1, decay, 1, mode, norm, 2.0, nvlamb
        )  # fmt: skip
        assert all(map(torch.equal, grads, randoms(seed=step)))
        clip = max(norm.item() / 2.0, 1.0)
        for i, (grad, p) in enumerate(zip(in_double(grads), exact, strict=True)):
            g = grad / clip + (decay * p if mode == 0 else 0.0)
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.99 * v[i] + 0.01 * g * g
            update = m[i] / (1 - 0.9**step) / ((v[i] / (1 - 0.99**step)).sqrt() + 1e-6)
            update = update + (decay * p if mode == 1 else 0.0)
            adapts = (nvlamb or decay != 0) and p.norm() != 0 and update.norm() != 0
            exact[i] = p - 0.01 * (p.norm() / update.norm() if adapts else 1.0) * update
    assert close(params, exact, 1e-5)


def test_lamb_mp_unscales_clips_scaled_norms_and_writes_half_weights():
    params, firsts, seconds, halves = randoms(), zeros(), zeros(), zeros(torch.float16)
    plain, m, v = randoms(), zeros(), zeros()
    for step in (1, 2):
        grads = randoms(seed=step)
        scaled = [grad * 64 for grad in grads]
        norm, scaled_norm = (amp_c.multi_tensor_l2norm(CHUNK, flag(), [each])[0] for each in (grads, scaled))
        amp_c.multi_tensor_lamb(
            CHUNK, flag(), [grads, plain, m, v], 0.01, 0.9, 0.99, 1e-6, step, 1, 0.1, 1, 1, norm, 2.0
        )  # fmt: skip
        amp_c.multi_tensor_lamb_mp(
            CHUNK, flag(), [scaled, params, firsts, seconds, halves],
            torch.tensor(0.01, dtype=torch.float64), 0.9, 0.99, 1e-6, torch.tensor([step]), 1, 0.1, 1, 1,
            scaled_norm, torch.tensor(128.0), False, torch.zeros(1), torch.tensor(1 / 64),
        )  # fmt: skip
    assert close(params, plain)
    assert all(torch.equal(p.half(), h) for p, h in zip(params, halves, strict=True))


@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("moment_mode", [0, 1])
def test_novograd(moment_mode, maximum):
    params, moments, norms = randoms(), zeros(), torch.zeros(len(SHAPES))
    exact, m, n = in_double(params), in_double(moments), [0.0] * len(SHAPES)
    for step in (1, 2, 3):
        grads = randoms(seed=step)
        amp_c.multi_tensor_novograd(
            CHUNK, flag(), [grads, params, moments], norms,
            0.1, 0.9, 0.99, 1e-8, step, 1, 0.1, 1, moment_mode, 0 if maximum else 2,
        )  # fmt: skip
        c1, c2 = 1 - 0.9**step, math.sqrt(1 - 0.99**step)
        for i, (g, p) in enumerate(zip(in_double(grads), exact, strict=True)):
            length = (g.abs().max() if maximum else g.norm()).item() if g.numel() else 0.0
            n[i] = 0.99 * n[i] + 0.01 * length if maximum else math.sqrt(0.99 * n[i] ** 2 + 0.01 * length**2)
            denominator = n[i] / c2 + 1e-8
            m[i] = 0.9 * m[i] + 0.1 * (g / denominator + 0.1 * p if moment_mode == 0 else g)
            update = m[i] / c1 if moment_mode == 0 else m[i] / c1 / denominator + 0.1 * p
            exact[i] = p - 0.1 * update
    assert close(params, exact, 1e-5)
    assert norms.tolist() == pytest.approx(n)


@pytest.mark.parametrize(
    ("op", "states", "numbers"),
    [
        (amp_c.multi_tensor_sgd, 1, (0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)),
        (amp_c.multi_tensor_adam, 2, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)),
        (amp_c.multi_tensor_adagrad, 1, (0.1, 1e-10, 0, 0.0)),
        (amp_c.multi_tensor_lamb, 2, (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 1, torch.ones(1), 1.0)),
        (amp_c.multi_tensor_novograd, 1, (torch.zeros(len(SHAPES)), 0.1, 0.9, 0.99, 1e-8, 1, 1, 0.0, 1, 1, 2)),
    ],
)
def test_a_set_flag_skips_the_step(op, states, numbers):
    lists = [randoms(seed=1), randoms(), *(zeros() for _ in range(states))]
    op(CHUNK, flag(1), lists, *numbers)
    assert all(map(torch.equal, lists[1], randoms()))
    assert all(map(torch.equal, lists[2], zeros()))
    op(CHUNK, flag(0), lists, *numbers)
    assert not all(map(torch.equal, lists[1], randoms()))


def test_update_scale_hysteresis_is_that_of_apex():
    scale, growth, patience = torch.tensor([1024.0]), torch.zeros(1, dtype=torch.int32), torch.full((1,), 2).int()
    seen = []
    for found_inf in (1.0, 1.0, 0.0, 0.0):
        returned = amp_c.update_scale_hysteresis(scale, growth, patience, torch.tensor([found_inf]), 2.0, 0.5, 2, 2)
        seen.append(returned.item())
    assert seen == [1024.0, 512.0, 512.0, 1024.0]
    assert returned is scale


# -- the modules by apex's names ---------------------------------------------------------------------------------------


def test_what_is_absent_says_so_by_name():
    with amplab.as_apex():
        import amp_C
        import apex_C

        with pytest.raises(AttributeError, match=r"amp_C\.multi_tensor_lamb_stage1_cuda: .* multi_tensor_lamb"):
            _ = amp_C.multi_tensor_lamb_stage1_cuda
        with pytest.raises(AttributeError, match=r"apex_C\.flat: .* flatten or unflatten"):
            _ = apex_C.flat
        assert not hasattr(amp_C, "multi_tensor_distopt_adam")
        with pytest.raises(ImportError, match="multi_tensor_anything"):
            exec("from amp_C import multi_tensor_anything", {})


def test_dir_lists_the_functions_alone():
    assert dir(apex_c) == ["flatten", "unflatten"]
    assert "multi_tensor_scale" in dir(amp_c)
    assert "Tensor" not in dir(amp_c)


def test_flat_tensors_go_back_to_their_shapes():
    tensors = randoms(shapes=[(2, 3), (4,)])
    flat = apex_c.flatten(tensors)
    assert flat.shape == (10,)
    assert all(map(torch.equal, apex_c.unflatten(flat, tensors), tensors))


# As in NVIDIA's BERT: the gradients of half weights go to masters, are measured, clipped by the norm, and stepped.
SCRIPT = """
import torch
try:
    import amp_C
    import apex_C
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    pass

torch.manual_seed(0)
model = torch.nn.Linear(16, 4).half()
inputs, targets = torch.randn(32, 16).half(), torch.randn(32, 4)
weights = list(model.parameters())
masters = [weight.detach().float() for weight in weights]
moments = [[torch.zeros_like(master) for master in masters] for _ in range(2)]
overflow_buf, scale, losses, skips = torch.tensor([0], dtype=torch.int), 2.0**20, [], 0
for step in range(1, 41):
    loss = (model(inputs).float() - targets).square().mean()
    losses.append(loss.item())
    model.zero_grad()
    (loss * scale).backward()
    grads = [weight.grad for weight in weights]
    flat = apex_C.flatten(grads)
    for grad, synced in zip(grads, apex_C.unflatten(flat, grads)):
        grad.copy_(synced)
    overflow_buf.zero_()
    unscaled = [torch.empty_like(master) for master in masters]
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [grads, unscaled], 1.0 / scale)
    if overflow_buf.item():
        scale, skips = scale / 2, skips + 1
        continue
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow_buf, [unscaled], False)
    multi_tensor_applier(
        amp_C.multi_tensor_lamb, overflow_buf, [unscaled, masters, *moments],
        0.02, 0.9, 0.999, 1e-6, step - skips, 1, 0.01, 1, 1, norm, 1.0, False,
    )
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow_buf, [masters, [w.data for w in weights]], 1.0)
assert 0 < skips < 12, skips
assert losses[-1] < 0.8 * losses[0], losses
print("trained")
"""


def test_a_script_that_steps_with_amp_c_trains(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "amplab", "run", "--device", "cpu", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
