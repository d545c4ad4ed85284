"""Measurements that a user can repeat: two implementations alternately in one run, and the ratio of their times.

Reading order: Goal and Row (a result), Case and measure (how it is measured), SUITES and run_suite (what
``amplab bench`` measures), as_text and as_json (what it prints).
"""

from amplab.bench.ddp import run_ddp
from amplab.bench.interleaved import Case, Contestant, Pair, measure
from amplab.bench.rows import BenchResults, Goal, Row, as_json, as_text
from amplab.bench.suites import SUITES, machine_facts, run_cases, run_suite

__all__ = [
    "SUITES",
    "BenchResults",
    "Case",
    "Contestant",
    "Goal",
    "Pair",
    "Row",
    "as_json",
    "as_text",
    "machine_facts",
    "measure",
    "run_cases",
    "run_ddp",
    "run_suite",
]
