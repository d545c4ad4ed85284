"""What a second run tells, and what it cannot: state that is put back, and state that is not."""

import torch
from torch import nn

from amplab.diagnose import first_nonfinite
from amplab.diagnose.rules.nonfinite import finding_of


class Fifth(nn.Module):
    """Divides by 0 when called for the fifth time; where the calls are counted decides whether a rerun sees it."""

    def __init__(self, kept):
        super().__init__()
        self.layer, self.kept, self.calls, self.seen = nn.Linear(4, 4), kept, 4, [0] * 4

    def forward(self, x):
        self.calls += 1
        self.seen.append(0)
        zero = (self.calls if self.kept else len(self.seen)) == 5
        return self.layer(x) / (torch.zeros(4) if zero else torch.ones(4))


def test_a_count_in_an_attribute_is_put_back_so_that_the_model_is_blamed():
    model = Fifth(kept=True)
    found = first_nonfinite(model, step=lambda: model(torch.ones(2, 4)).sum())
    assert (found.cause, found.record.op, model.calls) == ("model", "div", 4)


def test_what_a_second_run_does_not_show_is_no_matter_of_the_format():
    model = Fifth(kept=False)
    found = first_nonfinite(model, step=lambda: model(torch.ones(2, 4)).sum())
    assert (found.cause, found.record.op) == ("state", "div")
    assert (found.in_float32, found.in_bfloat16, found.fitting_scale) == (None, None, None)
    assert "a second run of the same step was finite" in " ".join(str(found).split())
    assert "a second run of the same step was finite" in found._repr_html_()
    assert finding_of(found).name == "nonfinite-once"
    assert "float32" not in finding_of(found).cause


class Spiking(nn.Module):
    """A gradient that overflows in the first run alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), []

    def forward(self, x):
        self.seen.append(0)
        out = self.layer(x)
        if len(self.seen) == 1:
            out.register_hook(lambda grad: grad * torch.inf)
        return out


def test_what_a_second_run_does_not_show_is_no_matter_of_the_scale():
    model = Spiking()
    found = first_nonfinite(model, step=lambda: model(torch.ones(2, 4)).sum(), loss_scale=2.0**16)
    assert (found.phase, found.cause, found.fitting_scale) == ("backward", "state", None)
