"""What a run in a cell prints."""

from amplab.lab import ExperimentConfig, History
from amplab.views.run_report import run_report


def test_the_report_counts_its_own_steps(eventful: History) -> None:
    report = run_report(ExperimentConfig(), eventful, 4)
    assert (report.steps, report.total, report.skipped) == (4, 10, 1)
    assert repr(run_report(ExperimentConfig(), eventful, 10)) == (
        "amplab/1 task=digits model=mlp opt_level=O1\n"
        "steps       10 (now at 10), 2 skipped\n"
        "loss scale  2^16 -> 2^16\n"
        "loss        1.0 -> 1.0\n"
        "accuracy    not measured yet"
    )


def test_accuracy_is_a_whole_percent(record) -> None:
    history = History()
    history.append(record(0, score=0.8583))
    assert "accuracy    86 %" in repr(run_report(ExperimentConfig(), history, 1))
