"""Explain what is wrong in mixed-precision training, and how to fix it: of a machine, of one step, of a whole run.

    tool              runs the model                              restores all state    file
    doctor            a step once, more often if not finite;      yes                   examination
                      a train step 1 to 9 times
    first_nonfinite   a step, several times                       yes                   first_nonfinite
    followed_step     only the loop's own step                    no                    followed_step
    twin              two copies, for a few steps                 trains copies         twin
    ladder            a new model per precision, a few steps      trains new models     ladder
    what_if           never: replays the record of a run          reads only            what_if
    run_findings      never: reads the record of a run            reads only            rules/run

A rule returns a `Finding`, and `CATALOGUE` lists all of them. `ranking` leaves out the findings that others supersede.
`Observation` is what rules about runs read.

    rules/           each file examines one kind of evidence: values, gradients, parameters, a run, ...
    remedies/        the code that a finding suggests, for each API that a training loop may use
    observed_step/   one step with the values of every op
    train_step/      a whole training step: rehearsed with all state restored, its code, its schedulers, lost updates
"""

from amplab.diagnose.catalogue import CATALOGUE
from amplab.diagnose.examination import doctor
from amplab.diagnose.finding import Finding, Findings
from amplab.diagnose.first_nonfinite import FirstNonfinite, first_nonfinite
from amplab.diagnose.followed_step import FollowedStep, followed_step
from amplab.diagnose.ladder import LadderReport, LadderRung, ladder
from amplab.diagnose.machine import MachineReport
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.rules.nonfinite import finding_of
from amplab.diagnose.rules.run import run_findings
from amplab.diagnose.twin import twin
from amplab.diagnose.twin_report import TwinReport
from amplab.diagnose.what_if import ScaleHistory, WhatIf, WhatIfs, what_if, what_ifs

__all__ = [
    "CATALOGUE",
    "doctor",
    "first_nonfinite",
    "FirstNonfinite",
    "FollowedStep",
    "Finding",
    "Findings",
    "LadderReport",
    "LadderRung",
    "MachineReport",
    "Observation",
    "ScaleHistory",
    "StepObservation",
    "TwinReport",
    "WhatIf",
    "WhatIfs",
    "finding_of",
    "followed_step",
    "ladder",
    "run_findings",
    "twin",
    "what_if",
    "what_ifs",
]
