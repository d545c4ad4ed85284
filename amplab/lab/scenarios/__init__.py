"""Scenarios: single effects of mixed precision, each shown by one run of less than 30 seconds.

conditions    what must be seen in a run, as values
scenario      one scenario as data: a config, faults, texts, a condition, and the change that mends the run
catalogue     all scenarios
player        plays one on a trainer
"""

from amplab.lab.scenarios.catalogue import SCENARIOS
from amplab.lab.scenarios.conditions import Condition, Observed
from amplab.lab.scenarios.player import Play, Player
from amplab.lab.scenarios.scenario import Fix, Injection, Scenario

__all__ = ["SCENARIOS", "Condition", "Fix", "Injection", "Observed", "Play", "Player", "Scenario"]
