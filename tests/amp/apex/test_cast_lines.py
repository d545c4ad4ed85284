"""verbosity=2: a line for each cast, none for a cast that is used again."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp
from amplab.amp.apex.cast_lines import VerboseEngine
from amplab.policies import PrecisionPolicy


@pytest.fixture
def printed(capsys):
    """The lines since the last call, without the banner's."""
    return lambda: [line for line in capsys.readouterr().out.splitlines() if "->" in line]


def test_each_cast_is_printed(printed):
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=2)
    inputs, half = torch.ones(3, 2), torch.ones(3, 2).half()
    with amp.default_session().casting():
        outputs = model(inputs)
        assert printed() == ["Float->Half (linear)"] * 3  # the input, the weight, the bias
        model(outputs)
        assert printed() == []
        F.mse_loss(outputs, inputs)
        assert printed() == ["Half->Float (mse_loss)"]
        half + inputs, torch.cat([half, half, inputs])
        assert printed() == ["Half->Float (add)", "Half->Float (cat)", "Half->Float (cat)"]
        half.clone().add_(inputs)
        assert printed() == ["Float->Half (add_)"]
        torch.mm(inputs.double(), inputs.double().t()), torch.relu(inputs)
        with amp.disable_casts():
            torch.mm(inputs, inputs.t())
        assert printed() == []


@pytest.mark.parametrize("verbosity", [0, 1, 3, True])
def test_other_verbosities_print_no_casts(printed, verbosity):
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=verbosity)
    model(torch.ones(1, 2))
    assert printed() == []


def test_it_ends_with_another_initialize(printed):
    model = nn.Linear(2, 2)
    for verbosity, told in ((2, 3), (1, 0), (2, 3)):
        amp.initialize(model, opt_level="O1", verbosity=verbosity)
        model(torch.ones(1, 2))
        assert len(printed()) == told


def test_results_are_the_same(problem):
    def run(verbosity):
        session, model = amp.Session(), problem.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.initialize(model, optimizer, opt_level="O1", verbosity=verbosity)
        return problem.train(session, model, optimizer, range(3))

    assert run(2) == run(0)


def test_a_copy_in_another_process_is_silent():
    engine = VerboseEngine(PrecisionPolicy())
    again = pickle.loads(pickle.dumps(engine))
    assert type(again) is not VerboseEngine
    assert again.policy == engine.policy
