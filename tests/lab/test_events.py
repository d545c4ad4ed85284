"""Callbacks: what one of them raises is told to all, once, and the run goes on."""

from amplab.lab import Event, Failed, StepRecord


def test_a_callback_that_raises_is_reported_once_and_the_run_continues(trainer, listen):
    def broken(event: Event) -> None:
        raise KeyError("colour")

    trainer.subscribe(broken)
    ear = listen(trainer)
    trainer.run(10)
    (told,) = ear.of(Failed)
    assert told.text.startswith("callback <function test_a_callback_that_raises")
    assert 'raise KeyError("colour")' in told.text
    assert not told.fatal
    assert trainer.failures == (told,)
    assert len(ear.of(StepRecord)) == 10


def test_an_unsubscribed_callback_hears_nothing_more(trainer):
    heard: list[Event] = []
    unsubscribe = trainer.subscribe(heard.append)
    trainer.run(1)
    count = len(heard)
    unsubscribe()
    unsubscribe()
    trainer.run(1)
    assert len(heard) == count > 0


def test_a_callback_that_always_raises_another_error_is_reported_a_limited_number_of_times(trainer, listen):
    count = iter(range(10**6))

    def broken(event: Event) -> None:
        raise ValueError(f"number {next(count)}")

    trainer.subscribe(broken)
    ear = listen(trainer)
    trainer.run(60)
    assert 1 <= len(ear.of(Failed)) <= 20
    assert len(ear.of(StepRecord)) == 60
