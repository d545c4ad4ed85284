"""What apex says to misuse, line by line of its list, and what amplab says, or does, in the same place.

    REFUSED    an exception, of the type that apex raises unless the row says why not
    WELCOME    what apex refuses, or fails at, and amplab does

More refusals of arguments are in test_initialize_arguments and test_opt_levels, of losses in test_loss_scaling.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp, fp16_utils


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def initialize(models, optimizers=None, level="O1", loss_scale=4.0, **options):
    return amp.initialize(models, optimizers, opt_level=level, loss_scale=loss_scale, verbosity=0, **options)


def pair(level="O1", **options):
    """A model and its optimizer, initialized."""
    model = nn.Linear(2, 2)
    return initialize(model, sgd(model), level, **options)


def scaled(loss, optimizer, loss_id=0):
    """Run a backward under scale_loss."""
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()


def loss_of(model):
    return model(torch.ones(1, 2)).float().sum()


def half_model():
    return nn.Linear(2, 2).half()


def half_buffer():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).half())
    return model


class FP16_Optimizer:
    """Known by its name: there are copies of it in many a script."""


def a_wrapped_one():
    return fp16_utils.FP16_Optimizer(sgd(half_model()), verbose=False)


def with_a_name_taken(name):
    optimizer = sgd(nn.Linear(2, 2))
    setattr(optimizer, name, lambda: None)
    return optimizer


def a_foreign_optimizer():
    model, _ = pair()
    scaled(loss_of(model), torch.optim.Adam(model.parameters()))


def a_loss_id_beyond_the_last():
    model, optimizer = pair(num_losses=2)
    scaled(loss_of(model), optimizer, loss_id=2)


def a_closure_with_masters():
    pair("O2")[1].step(lambda: None)


def a_closure_for_a_step_that_is_skipped():
    model, optimizer = pair(loss_scale="dynamic")
    scaled(loss_of(model) * float("inf"), optimizer)
    optimizer.step(lambda: None)


def binary_cross_entropy_of_halves():
    pair()
    F.binary_cross_entropy(torch.full((2,), 0.5).half(), torch.ones(2).half())


def an_in_place_function_of_the_float32_list():
    pair()
    torch.exp_(torch.ones(2).half())


def an_in_place_method_of_the_float32_list():
    pair()
    torch.ones(2).half().exp_()


INCOMING = "An incoming optimizer is an instance of <class"
CLOSURE = "Currently, Amp does not support closure use with optimizers."
NO_STATE = "`, but internal Amp state has not been initialized.  model, optimizer = amp.initialize("

REFUSED = {
    "models in a tuple": (
        lambda: initialize((nn.Linear(2, 2),)),
        (
            TypeError,
            "models must be either a single model or a list of models. Found a tuple of 1; pass torch.nn.Module.",
        ),
    ),
    "models that are none": (
        lambda: initialize("net"),
        (
            TypeError,
            "models must be either a single model or a list of models. Found an object of type str; pass torch.",
        ),
    ),
    "one of the models is none": (
        lambda: initialize([nn.Linear(2, 2), 3]),
        (
            TypeError,
            "models must be either a single model or a list of models. Found an object of type int; pass torch.",
        ),
    ),
    "optimizers in a tuple": (
        lambda: initialize(nn.Linear(2, 2), ()),
        (
            TypeError,
            "optimizers must be either a single optimizer or a list of optimizers. Found a tuple of 0; pass tor",
        ),
    ),
    "optimizers that are none": (
        lambda: initialize(nn.Linear(2, 2), [1]),
        (
            TypeError,
            "optimizers must be either a single optimizer or a list of optimizers. Found an object of type int;",
        ),
    ),
    "an FP16_Optimizer": (lambda: initialize(nn.Linear(2, 2), a_wrapped_one()), (RuntimeError, INCOMING)),
    "an FP16_Optimizer in a list": (lambda: initialize(nn.Linear(2, 2), [a_wrapped_one()]), (RuntimeError, INCOMING)),
    "somebody's copy of it": (lambda: initialize(nn.Linear(2, 2), FP16_Optimizer()), (RuntimeError, INCOMING)),
    "a model in DataParallel": (
        lambda: initialize(nn.DataParallel(nn.Linear(2, 2))),
        (
            RuntimeError,
            "Incoming model is an instance of <class 'torch.nn.parallel.data_parallel.DataParallel'>. Parallel",
        ),
    ),
    "a half parameter": (
        lambda: initialize(half_model()),
        (
            RuntimeError,
            "Found param weight with type torch.HalfTensor, expected torch.FloatTensor. When using amp.initi",
        ),
    ),
    "a half buffer": (
        lambda: initialize(half_buffer()),
        (
            RuntimeError,
            "Found buffer mask with type torch.HalfTensor, expected torch.FloatTensor. When using amp.initia",
        ),
    ),
    **{
        f"an optimizer with a {name} of its own": (
            lambda name=name: initialize(nn.Linear(2, 2), with_a_name_taken(name)),
            (
                RuntimeError,
                f"Incoming optimizer already has {name} defined. amp.initialize needs this name",
            ),
        )
        for name in (
            "_lazy_init_maybe_master_weights",
            "_master_params_to_model_params",
            "_prepare_amp_backward",
            "_post_amp_backward",
            "_amp_lazy_init",
            "_amp_stash",
        )
    },
    "scale_loss before initialize": (
        lambda: scaled(loss_of(nn.Linear(2, 2)), None),
        (RuntimeError, "Invoked 'with amp.scale_loss" + NO_STATE),
    ),
    "an optimizer that initialize has not seen": (  # AttributeError on an internal name in apex
        a_foreign_optimizer,
        (
            RuntimeError,
            "This Adam was not part of amp.initialize: expected one of the 1 optimizer(s) that were; pass it",
        ),
    ),
    "a loss_id beyond the last": (
        a_loss_id_beyond_the_last,
        (
            IndexError,
            "loss_id=2: there are 2 loss scalers, numbered from 0; pass num_losses to amp.initialize to have m",
        ),
    ),
    "a closure with masters": (a_closure_with_masters, (RuntimeError, CLOSURE)),
    "a closure for a step that is skipped": (a_closure_for_a_step_that_is_skipped, (RuntimeError, CLOSURE)),
    "state_dict before initialize": (  # AttributeError on an internal name in apex
        amp.state_dict,
        (RuntimeError, "Invoked `amp.state_dict" + NO_STATE),
    ),
    "load_state_dict before initialize": (  # the same
        lambda: amp.load_state_dict({}),
        (RuntimeError, "Invoked `amp.load_state_dict" + NO_STATE),
    ),
    "binary_cross_entropy of halves": (
        binary_cross_entropy_of_halves,
        (NotImplementedError, "binary_cross_entropy"),
    ),
    "an in-place function of the float32 list": (
        an_in_place_function_of_the_float32_list,
        (NotImplementedError, "exp_"),
    ),
    "an in-place method of the float32 list": (
        an_in_place_method_of_the_float32_list,
        (NotImplementedError, "exp_"),
    ),
    "wrap_optimizer without an optimizer": (lambda: amp.init().wrap_optimizer(3), (TypeError, "optimizers must be")),
}


@pytest.mark.parametrize("misuse", REFUSED)
def test_refused(misuse):
    call, (error, said) = REFUSED[misuse]
    with pytest.raises(error) as refusal:
        call()
    assert said in str(refusal.value)
    assert type(refusal.value) is error
    assert len(refusal.value.args) == 1


# -- what apex refuses and amplab does -----------------------------------------------------------------


def a_model_on_the_cpu(level):
    model, optimizer = pair(level)
    return train(model, optimizer)


def train(model, optimizer):
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    scaled(loss_of(model), optimizer)
    optimizer.step()
    return not any(map(torch.equal, before, amp.master_params(optimizer)))


def a_model_of(dtype):
    def use(level):
        model = nn.Linear(2, 2).to(dtype)
        return train(*initialize(model, sgd(model), level)) if level != "O1" else _as_given(model, dtype)

    return use


def _as_given(model, dtype):
    """At O1 weights stay as they are; ops do not narrow float64, and take bfloat16 as torch does."""
    model, optimizer = initialize(model, sgd(model))
    with amp.scale_loss(model(torch.ones(1, 2, dtype=dtype)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return model.weight.dtype is dtype and amp.last_step(optimizer).stepped


def initialize_twice(level):
    model, optimizer = pair(level)
    again = initialize(model, optimizer, level)
    return again == (model, optimizer) and train(model, optimizer)


def initialize_twice_with_new_objects(level):
    """In apex the second call replaces the scalers and properties of the first."""
    (first, first_optimizer), (second, second_optimizer) = pair(level), pair(level)
    return train(first, first_optimizer) and train(second, second_optimizer)


def optimizers_of_scale_loss_in_a_tuple(level):
    model, optimizer = pair(level)
    scaled(loss_of(model), (optimizer,))
    grad = next(amp.master_params(optimizer)).grad
    return torch.equal(grad, torch.ones(2, 2))


def a_closure_without_masters(level):
    if level == "O2":
        return True
    model, optimizer = pair(level)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        scaled(loss, optimizer)
        return loss

    before = closure().item()
    optimizer.step(closure)
    return loss_of(model).item() < before


def disable_casts_at_any_level(level):
    pair(level)
    with amp.disable_casts():
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def disable_casts_before_initialize(_level):
    with amp.disable_casts():
        return True


def promotion_with_doubles(level):
    pair(level)
    return (torch.ones(2, dtype=torch.float64) + torch.ones(2).half()).dtype is torch.float64


def gradients_that_are_not_contiguous(level):
    """apex's fused kernels: A tensor was not contiguous."""
    model, optimizer = pair(level)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        model.weight.grad = torch.tensor([[4.0, 8.0], [12.0, 16.0]], dtype=model.weight.dtype).t()
    expected = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    return torch.equal(next(amp.master_params(optimizer)).grad.float(), expected)


WELCOME = {
    "a model on the CPU": a_model_on_the_cpu,
    "a float64 model": a_model_of(torch.float64),
    "a bfloat16 model": a_model_of(torch.bfloat16),
    "initialize twice": initialize_twice,
    "initialize twice with new objects": initialize_twice_with_new_objects,
    "optimizers of scale_loss in a tuple": optimizers_of_scale_loss_in_a_tuple,
    "a closure without masters": a_closure_without_masters,
    "disable_casts at any level": disable_casts_at_any_level,
    "disable_casts before initialize": disable_casts_before_initialize,
    "promotion with float64": promotion_with_doubles,
    "gradients that are not contiguous": gradients_that_are_not_contiguous,
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("use", WELCOME)
def test_welcome(use, level):
    assert WELCOME[use](level)


def test_disabled_accepts_whatever_it_is_given():
    """apex returns before every check."""
    model = nn.DataParallel(half_model())
    assert amp.initialize((model,), "optimizer", enabled=False, opt_level="O9") == ((model,), "optimizer")


# -- what apex does not notice -------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_the_block_is_refused(problem, level):
    model, another = problem.model(), nn.Linear(1, 1)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, another))
    session = amp.Session()
    session.initialize([model, another], [optimizer, other], opt_level=level, loss_scale=4.0, verbosity=0)
    for delay in (False, True):
        refused = pytest.raises(
            RuntimeError, match=r"^SGD.step\(\) inside the block of scale_loss, .* after the block\.$"
        )
        with refused, session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
        with session.scale_loss(problem.loss(model, 0), optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
            other.step()  # none of this block
    with session.scale_loss(problem.loss(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert session.last_step(optimizer).stepped
