"""An X-ray of models that it has never seen: what it takes, what it leaves behind, what it refuses."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.policies import PrecisionPolicy, thread_engines
from amplab.trace import trace_step, xray

LEVELS = ("O0", "O1", "O2", "O3")


def state_of(*models: nn.Module) -> dict[str, Any]:
    """All that an X-ray could change, as bits and identities."""
    found: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate()}
    found["numpy"] = np.random.get_state()[1].tobytes()
    for place, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            memory = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{place}.{name}"] = (id(tensor), tensor.data_ptr(), tensor.dtype, memory, id(tensor.grad))
        for path, module in model.named_modules():
            hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
            found[f"{place}.{path}()"] = (module.training, hooks)
    return found


@pytest.fixture(autouse=True)
def nothing_in_force():
    """Leave no session behind, whatever a test did."""
    yield
    amp.reset()
    assert not thread_engines()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Labelled(nn.Module):
    """As the models of a well-known library: names in, an object with its own loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(self.embed(input_ids))
        return Output(None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class InPlace(nn.Module):
    """Ops in place, a buffer that forward moves, and a module called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for _ in range(3):
            x = F.relu_(self.norm(self.fc(x))).add_(0.5)
        return F.dropout(x, 0.5)


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("stats", [False, True])
def test_every_scenario_at_every_level_and_untouched_bit_by_bit(scenario, every_model, level, stats):
    model, loss = scenario(every_model)
    loss().backward()  # gradients that have to come back
    before = state_of(model)
    found = xray(model, step=loss, opt_level=level, stats=stats)
    assert state_of(model) == before
    assert {record.phase for record in found.trace} == {"forward", "backward"}
    half = {"O1", "O2", "O3"}
    assert any(info.dtype is torch.float16 for record in found.trace for info in record.outputs) == (level in half)
    assert found.loss_scale == (2.0**16 if level in ("O1", "O2") else 1.0)
    assert str(found)
    assert found._repr_html_()
    assert len(found.rows(every=True)) == len(found.trace)


def test_statistics_change_nothing_that_is_recorded(scenario, every_model):
    model, loss = scenario(every_model)
    plain, measured = (xray(model, step=loss, opt_level="O1", stats=stats) for stats in (False, True))
    assert plain.trace == measured.trace
    assert plain.kept == measured.kept


def test_the_records_are_those_of_trace_step(scenario, every_model):
    """Counting what is kept for backward changes no op; autograd hands saved outputs over without a detach, a view."""
    model, loss = scenario(every_model)
    counted, plain = (
        [
            (record.aten, record.op, record.module, record.dtypes)
            for record in trace
            if record.aten != "aten.detach.default"
        ]
        for trace in (xray(model, step=loss).trace, trace_step(model, loss))
    )
    assert counted == plain


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_recurrent_nets(kind, level):
    model, batch = Recurrent(kind), torch.randn(3, 5, 8)
    before = state_of(model)
    found = xray(model, batch, opt_level=level)
    assert state_of(model) == before
    assert {"rnn", "head"} <= {record.module for record in found.trace}


def test_a_mapping_goes_in_by_name_and_the_outputs_own_loss_is_taken():
    model, ids = Labelled(), torch.randint(0, 16, (2, 5))
    found = xray(model, {"input_ids": ids, "labels": ids}, opt_level="O1")
    assert found.loss == "the output's own loss"
    assert any(record.op == "cross_entropy" for record in found.trace)
    found = xray(model, {"input_ids": ids, "unknown": 3}, loss=lambda out, batch: out.logits.mean() * batch["unknown"])
    assert found.loss == "lambda, as given"


def test_without_a_loss_it_is_the_sum_of_the_output():
    model = nn.Linear(2, 2)
    found = xray(model, torch.ones(1, 2))
    assert found.loss == "the sum of the output, as no loss is given"
    assert "the sum of the output" in str(found)


def test_inputs_and_labels_in_a_tuple():
    model = nn.Linear(8, 4)
    found = xray(model, (torch.randn(3, 8), torch.tensor([0, 1, 2])), loss=nn.CrossEntropyLoss())
    assert found.loss == "CrossEntropyLoss, as given"
    assert next(record.op for record in found.trace if not record.folds) == "linear"


def test_in_place_ops_buffers_and_a_module_called_again():
    model, batch = InPlace(), torch.randn(4, 8)
    before = state_of(model)
    found = xray(model, batch, opt_level="O1", stats=True)
    assert state_of(model) == before
    products = [record for record in found.trace if record.aten == "aten.addmm.default"]
    assert [record.module for record in products] == ["fc"] * 3
    relus = [record for record in found.trace if record.aten == "aten.relu_.default"]
    assert len(relus) == 3
    for record in relus:  # measured before add_ wrote over it: relu leaves zeros, and 0.5 is added to them
        assert found.statistics[record.index].outputs[0].zeros > 0


def test_two_models_two_optimizers_and_the_loss_runs_both():
    generator, judge = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.5)
    real = torch.ones(3, 4)

    def step(noise):
        fake = generator(noise)
        judge.zero_grad()
        (judge(fake.detach()).mean() - judge(real).mean()).backward()
        optimizer.step()
        return -judge(fake).mean()

    noise = torch.randn(3, 2)
    before = state_of(generator, judge)
    found = xray({"generator": generator, "judge": judge}, noise, step=step, opt_level="O1")
    assert state_of(generator, judge) == before
    modules = {record.module for record in found.trace}
    assert {"generator.0", "generator.2", "judge"} <= modules
    judged = [record for record in found.trace if record.module == "judge" and record.aten == "aten.addmm.default"]
    assert len(judged) == 3
    assert "Generator" not in str(found)
    named = xray([generator, judge], noise, step=step)
    assert "Linear" in {record.module for record in named.trace}


def test_a_gradient_penalty():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)

    def loss():
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()

    before = state_of(model)
    for level in (None, "O1"):
        found = xray(model, step=loss, opt_level=level)
        assert state_of(model) == before
        assert {"0", "1", "2"} <= {record.module for record in found.trace if record.phase == "backward"}


def test_data_parallel_on_the_cpu():
    model = nn.DataParallel(nn.Linear(4, 2))
    assert {record.module for record in xray(model, torch.ones(1, 4)).trace} >= {"module"}
    found = xray(model, torch.ones(1, 4), opt_level="O1")
    assert any(record.is_cast and record.module == "module" for record in found.trace)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_initialized_model_is_examined_in_its_precision(level):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    batch = torch.randn(4, 8)
    expected = xray(model, batch, opt_level=level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = state_of(model)
    found = xray(model, batch)
    assert state_of(model) == before
    assert found.precision == f"{level}, as initialized"
    assert found.loss_scale == amp.loss_scale() == 2.0**16
    assert [(record.op, record.dtypes) for record in found.trace] == [
        (record.op, record.dtypes) for record in expected.trace
    ]


def test_a_level_on_top_of_one_is_refused():
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    with pytest.raises(ValueError, match="already in force"):
        xray(model, torch.ones(1, 2), opt_level="O0")


@pytest.mark.parametrize("region", [torch.autocast, amplab.autocast])
def test_autocast_by_its_arguments_and_by_an_instance(region):
    model, batch = nn.Linear(8, 4), torch.randn(2, 8)
    settings = {"dtype": torch.bfloat16} | ({} if region is torch.autocast else {"policy": None})
    by_arguments = xray(model, batch, autocast=settings)
    by_instance = xray(model, batch, autocast=region("cpu", dtype=torch.bfloat16))
    with region("cpu", dtype=torch.bfloat16):
        around = xray(model, batch)
    products = [record for record in by_arguments.trace if record.aten == "aten.addmm.default"]
    assert products[0].outputs[0].dtype is torch.bfloat16
    assert by_arguments.trace == by_instance.trace
    assert [record.dtypes for record in around.trace if record.phase == "forward"] == [
        record.dtypes for record in by_arguments.trace if record.phase == "forward"
    ]
    assert "bfloat16" in by_arguments.precision


def test_a_policy_with_a_rule_by_module_and_back_again():
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(2, 8)
    policy = PrecisionPolicy(module_rules={"1": "float32"})
    before = state_of(model)
    found = xray(model, batch, policy=policy)
    assert state_of(model) == before
    outputs = {record.module: record.outputs[0].dtype for record in found.trace if "addmm" in record.aten}
    assert outputs == {"0": torch.float16, "1": torch.float32}
    assert found.trace == xray(model, batch, policy=str(policy)).trace
    assert found.loss_scale == 2.0**16
    assert xray(model, batch, policy="apex/bfloat16").loss_scale == 1.0
    weights = {
        record.module: record.inputs[1].dtype
        for record in xray(model, batch, opt_level="O2", policy=policy).trace
        if "addmm" in record.aten
    }
    assert weights == {"0": torch.float16, "1": torch.float32}


def test_a_model_that_calls_torch_func_is_seen_without_its_memory():
    class Differentiates(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(torch.func.grad(lambda v: (v**2).sum())(x))

    model, batch = Differentiates(), torch.randn(3, 4)
    before = state_of(model)
    found = xray(model, batch, opt_level="O1", stats=True)
    assert state_of(model) == before
    assert found.kept is None
    assert "not counted, since torch.func" in str(found)
    assert "fc" in found._repr_html_()
    assert "kept for backward 0 B" in " ".join(str(found.diff(found)).split())


def test_a_packed_sequence_is_one_value():
    batch = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    found = xray(nn.LSTM(4, 3), batch, opt_level="O1")
    assert any(record.op == "lstm" for record in found.trace)


def test_contradicting_arguments():
    model, batch = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match="expected one of them"):
        xray(model, batch, opt_level="O1", autocast={})
    with pytest.raises(TypeError, match="autocast=3"):
        xray(model, batch, autocast=3)
    with pytest.raises(TypeError, match="policy=3"):
        xray(model, batch, policy=3)
    with pytest.raises(TypeError, match=r"xray\(model, step=loss_of\)"):
        xray(model)
    with pytest.raises(TypeError, match=r"xray\(models, batch, step=loss_of\)"):
        xray([model], batch)
    with pytest.raises(TypeError, match="model=int"):
        xray(3, batch)
    with pytest.raises(TypeError, match="loss=int"):
        xray(model, batch, loss=3)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiled_and_scripted_models_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="is compiled"):
        xray(torch.compile(model, backend="eager"), torch.ones(1, 2))
    with pytest.raises(ValueError, match="is scripted"):
        xray(torch.jit.script(model), torch.ones(1, 2))


def test_what_a_model_raises_passes_and_everything_is_put_back():
    model, batch = InPlace(), torch.randn(4, 9)
    before = state_of(model)
    for level in (None, *LEVELS):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            xray(model, batch, opt_level=level)
        assert state_of(model) == before


def test_a_training_flag_and_a_frozen_parameter_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    model[0].weight.requires_grad_(False)
    batch = torch.randn(2, 4)
    before = state_of(model)
    xray(model, batch, opt_level="O2")
    assert state_of(model) == before
    assert not model[0].weight.requires_grad


def test_the_lines_of_code(scenario):
    model, loss = scenario("mlp")
    found = xray(model, step=loss, opt_level="O1")
    lines = {(row["op"], row["phase"]): row["code"] for row in found.rows() if not row["cast"]}
    assert lines["relu", "forward"] == lines["relu", "backward"] == "return self.fc2(torch.relu(self.fc1(x)))"
    assert lines["cross_entropy", "forward"].startswith("return F.cross_entropy(out[")
    assert all("conftest.py:" in row["line"] for row in found.rows() if row["op"] in ("linear", "relu"))


def test_it_comes_lazily_with_the_package():
    assert amplab.xray is xray


class Stateful(nn.Module):
    """A count, a spare tensor and a generator of its own, none of them in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.count, self.last = nn.Linear(4, 4), 0, None
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        self.count += 1
        self.last = self.layer(x) * torch.rand((), generator=self.generator)
        return self.last


@pytest.mark.parametrize("look", [xray, amplab.gradient_range])
def test_plain_attributes_and_generators_are_what_they_were(look):
    model = Stateful()
    before = model.generator.get_state()
    look(model, torch.ones(2, 4))
    assert (model.count, model.last) == (0, None)
    assert torch.equal(model.generator.get_state(), before)
