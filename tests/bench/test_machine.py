"""Facts of the machine, for the reader of the figures."""

import json
from datetime import datetime

import torch

from amplab import kernels
from amplab.bench import machine_facts


def test_facts_fit_into_json_and_are_those_of_this_machine():
    facts = json.loads(json.dumps(machine_facts(), allow_nan=False))
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == 1
    assert facts["kernels"] == kernels.report().status
    assert facts["cpu"]
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(facts["date"])).total_seconds()) < 600
