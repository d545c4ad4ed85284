"""The status line, and the cards of findings."""

from amplab.lab import ExperimentConfig, RunStatus, StateChanged, Trainer, config_remedy
from amplab.views.status import Status, status_payload
from amplab.views.tabs.findings_payload import card_key, findings_payload


def test_what_the_line_shows() -> None:
    assert status_payload(RunStatus("ready", "Ready."))["text"] == "Ready: press Start."
    first = status_payload(RunStatus("ready", "Ready."), state="running")
    assert first["text"] == "Training the first step.", "which may take minutes"
    bad = status_payload(RunStatus("diverged", "Diverged.", 3), state="paused", button="Undo")
    assert (bad["tone"], bad["state"], bad["step"], bad["button"]) == ("bad", "Paused", 3, "Undo")
    assert status_payload(RunStatus("stuck", "Not learning."))["tone"] == "odd"
    failed = status_payload(RunStatus("ready", "Ready."), state="failed")
    assert (failed["tone"], failed["text"][:20]) == ("bad", "Training has failed;")


def test_a_run_that_waits_for_a_comparison_says_so(trainer: Trainer, until) -> None:
    shown: list[dict] = []
    status = Status(trainer, lambda: None, shown.append)
    trainer.compare(steps=400)
    trainer.start()
    until(lambda: (status.tick(), shown and shown[-1]["kind"] == "waiting")[1])
    assert shown[-1]["text"].startswith("This run waits: O")
    trainer.stop_comparison()
    until(lambda: (status.tick(), shown[-1]["kind"] != "waiting")[1])
    wait_idle(trainer)


def wait_idle(trainer: Trainer) -> None:
    trainer.pause()
    assert trainer.wait(20)


def test_a_divergence_after_a_change_offers_to_undo_it_and_the_run_trains(trainer: Trainer, until) -> None:
    def becomes(kind: str) -> None:
        until(lambda: (status.tick(), shown[-1]["kind"] == kind)[1])

    shown: list[dict] = []
    status = Status(trainer, lambda: None, shown.append)
    trainer.subscribe(lambda event: None if type(event).__name__ == "StepRecord" else status.on_event(event))
    trainer.run(20)
    status.tick()
    assert shown[-1]["button"] is None
    trainer.change(lr=1e9)
    trainer.run(15)
    becomes("diverged")
    assert shown[-1]["text"].startswith("Diverged at step 21, after learning rate 0.1 → 1e9: ")
    assert shown[-1]["button"] == "Undo and start again"
    assert status.on_message() is None
    trainer.wait(0.2)
    wait_idle(trainer)
    assert trainer.config.learning_rate == 0.1
    trainer.run(100)
    becomes("healthy")
    assert shown[-1]["button"] is None


def test_a_divergence_from_the_start_offers_the_remedy_of_the_finding() -> None:
    trainer = Trainer(ExperimentConfig(hidden=16, lr=1e9))
    shown: list[dict] = []
    status = Status(trainer, lambda: None, shown.append)
    trainer.run(15)
    status.tick()
    assert shown[-1]["text"] == "Diverged at step 1 at learning rate 1e9: every step since is skipped."
    assert shown[-1]["button"] == "Learning rate 1e9 → 0.1, and start again"
    trainer.stop()


def test_statistics_that_overflow_in_float16_are_named_with_a_remedy_that_works() -> None:
    config = ExperimentConfig(task="digits-1023", model="cnn", opt_level="O2", keep_batchnorm_fp32=False, hidden=32)
    trainer = Trainer(config)
    shown: list[dict] = []
    status = Status(trainer, lambda: None, shown.append)
    trainer.run(75)
    status.tick()
    assert (shown[-1]["kind"], shown[-1]["tone"]) == ("evaluation", "bad")
    assert "no better than chance: norm1.running_var" in shown[-1]["text"]
    assert shown[-1]["button"] == "keep_batchnorm_fp32 False → True, and start again"
    assert status.on_message() is None
    trainer.pause()
    assert trainer.wait(20)
    trainer.run(75)
    status.on_event(StateChanged("paused", 75))
    status.tick()
    assert shown[-1]["kind"] == "healthy"
    trainer.stop()


def test_a_finding_is_a_card_with_its_evidence_its_step_and_its_remedy() -> None:
    trainer = Trainer(ExperimentConfig(hidden=16, lr=1e9))
    trainer.run(15)
    found = trainer.findings()
    remedies = {card_key(each): remedy for each in found if (remedy := config_remedy(each, trainer.config))}
    payload = findings_payload(found, remedies, steps=15)
    first, second = payload["cards"]
    assert (first["severity"], first["title"]) == ("error", "The loss grows: the update steps are too large")
    assert first["apply"] == "Learning rate 1e9 → 0.1, and start again"
    assert ["steps lost", "14"] in first["evidence"]
    assert "group['lr']" in first["remedy"]
    assert (second["name"], second["step"], second["apply"]) == ("overflow-in-half", 1, None)
    assert payload["count"] == "2"
    assert payload["summary"] == "2 errors · examined: 15 steps"
    trainer.stop()


def test_a_refused_remedy_is_said_above_the_cards(trainer: Trainer) -> None:
    assert findings_payload(trainer.findings(), {}, steps=3, refusal="not allowed")["summary"] == "not allowed"
