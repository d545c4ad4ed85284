"""Lesson 0, the lab: the checks of its exercises; one of them looks at the run of the dashboard."""

from __future__ import annotations

from amplab.lessons.exercises import exercise
from amplab.views import Dashboard

__all__ = ["check_o3_scale", "check_share_of_skips", "check_skipped_step"]


@exercise("00-1")
def check_skipped_step(lab: Dashboard) -> str | None:
    """Ask for a run that has skipped a step, and goes on.

    Form:
        pass `lab`, the lab of the first cell.

    Right:
        The step changed no weight, the scale is halved, and the run goes on.
    """
    history = lab.trainer.history
    skipped = history.skipped_steps()
    if not skipped:
        return (
            f"no step was skipped in the {len(history)} steps of this run; "
            "press Start, then choose Inject a fault ▸ Overflow, and run this cell again."
        )
    if len(history) <= skipped[-1] + 1:
        return f"step {skipped[-1]} was skipped and is the last one; let the run go on for a few steps."
    return None


@exercise("00-2")
def check_share_of_skips(answer: float) -> str | None:
    """Ask which share of the steps is skipped at most, with a window of 50.

    Right:
        After a skip the scale has to grow once before it can overflow again, and that takes 50 steps: at most one step
        in 51. With apex's window of 2000 it is at most one in 2001.
    """
    if not 0 < answer < 1:
        return f"{answer!r} is not a share; write a number between 0 and 1, such as 0.1."
    if 0.0195 <= answer <= 0.0201:
        return None
    if 0.0004 <= answer <= 0.0006:
        return f"{answer!r} is the share with a window of 2000; the window is 50."
    return f"{answer!r} is not the share; how many steps does the scale need to grow once, between two overflows?"


@exercise("00-3")
def check_o3_scale(answer: float) -> str | None:
    """Ask for the loss scale that O3 sets.

    Right:
        A static scale of 1 changes nothing, so small gradients become zero. With a dynamic scale they come back.
    """
    if answer == 1:
        return None
    if answer == 2**16:
        return f"{answer:g} is where a dynamic scale starts; O3 has a static one. Choose O3 and look at *Loss scale*."
    return f"O3 does not set a scale of {answer!r}; choose O3 and look at *Loss scale*."
