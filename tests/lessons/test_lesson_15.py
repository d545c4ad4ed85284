"""The checks of lesson 15 accept the solutions, and say what is wrong with other answers."""

import inspect
import re
import textwrap

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.lessons import lesson_15 as lesson

REMEDIES = {"bfloat16", "eps=1e-4", "attention in float32"}


def test_words_are_those_of_the_text():
    assert lesson.words()[:3] == ("the", "zen", "of")
    assert len(set(lesson.words())) == len(lesson.words())


def test_denominators_are_eps_at_padding():
    word, _, _ = lesson.batches(1)[0]
    found = lesson.denominators(2.0**-20)
    assert found.counts[found.exponents == -20].sum() == (word == 0).sum()


def test_the_fault_is_the_attention():
    assert not lesson.is_a_remedy(1e-8, opt_level="O1")
    assert lesson.is_a_remedy(1e-8, opt_level="O0")


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lesson.check_smallest_eps, 2.0**-24),
        (lesson.check_remedies, REMEDIES),
        (lesson.check_tools, dict(lesson.TOOLS)),
    ],
)
def test_solutions_are_right(check, answer):
    assert str(check(answer)).startswith("Right.")
    assert "Not answered yet" in str(check(...))


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (lesson.check_smallest_eps, "2**-24", "not a number"),
        (lesson.check_smallest_eps, 1e-8, "not a power of two"),
        (lesson.check_smallest_eps, 2.0**-25, "is 0 in half"),
        (lesson.check_smallest_eps, 2.0**-10, "works too"),
        (lesson.check_remedies, "bfloat16", "not a list or a set"),
        (lesson.check_remedies, {"more data"}, "none of the changes"),
        (lesson.check_remedies, {*REMEDIES, "loss_scale=1.0"}, "is no remedy"),
        (lesson.check_remedies, {"bfloat16"}, "3 of the six"),
        (lesson.check_tools, {}, "Keep the five questions"),
        (lesson.check_tools, dict.fromkeys(lesson.TOOLS, ...), "Not answered yet"),
        (lesson.check_tools, dict.fromkeys(lesson.TOOLS, "watch"), "records a run"),
    ],
)
def test_wrong_answers_are_told_what_is_wrong(check, answer, said):
    verdict = check(answer)
    assert not verdict.right
    assert said in str(verdict)


def test_checks_leave_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    lesson.check_smallest_eps(2.0**-24)
    assert torch.equal(torch.rand(2), expected)


FAULTY = re.compile(r"^( *)scaled = memory .*$", re.MULTILINE)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The remedies that the doctor prints for the translator, each as code to paste."""
    model, optimizer = lesson.translator(lesson.Attention)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    (batch,) = lesson.batches(1)
    remedy = amplab.doctor(model, step=lambda: lesson.loss_of(model, batch), optimizer=optimizer)[0].remedy
    amp.reset()
    return re.split(r"^# or.*\n", remedy, flags=re.MULTILINE)


def pasted(line: str) -> type[nn.Module]:
    """Return the attention with other code in place of the faulty line."""
    source = textwrap.dedent(inspect.getsource(lesson.Attention.forward))
    found = FAULTY.search(source)
    assert found is not None
    names = {**vars(lesson), "amp": amp}
    exec(FAULTY.sub(textwrap.indent(line.rstrip(), found[1]), source), names)
    return type("Mended", (lesson.Attention,), {"forward": names["forward"]})


def gradient_is_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    with amp.scale_loss(lesson.loss_of(model, *lesson.batches(1)), optimizer) as scaled_loss:
        scaled_loss.backward()
    return all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)


def test_a_printed_line_mends_the_attention(printed: list[str]) -> None:
    assert len(printed) == 3
    original = FAULTY.search(textwrap.dedent(inspect.getsource(lesson.Attention.forward)))
    assert original is not None
    for line, mends in ((original[0].strip(), False), (printed[0], True), (printed[1], True)):
        model, optimizer = lesson.translator(pasted(line))
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        assert gradient_is_finite(model, optimizer) is mends
        amp.reset()


def test_the_printed_policy_mends_the_attention(printed: list[str]) -> None:
    model, optimizer = lesson.translator(lesson.Attention)
    names = {"amplab": amplab, "amp": amp, "model": model, "optimizer": optimizer}
    exec(printed[2], names)
    assert gradient_is_finite(names["model"], names["optimizer"])
    amp.reset()
