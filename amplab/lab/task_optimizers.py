"""The optimizers of an experiment, which its task has built, and the settings of a config that they follow."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer

from amplab.amp.backward.optimizer_params import params_of
from amplab.lab.config import OWN, ExperimentConfig
from amplab.lab.schedule_states import schedules_in_hooks, sets_rates
from amplab.lab.session_settings import optimizer_maker
from amplab.lab.tasks import Task

__all__ = ["TaskOptimizers"]


class TaskOptimizers:
    """The optimizers that a task builds of a model, at the learning rate and momentum of a config.

    Args:
        task: Builds them.
        model: The model.
        config: The config.

    Attributes:
        all: The optimizers, in the task's order.
        names: Those of the parameters of each, in the model.
    """

    def __init__(self, task: Task, model: nn.Module, config: ExperimentConfig) -> None:
        self.all: list[Optimizer] = task.optimizers(model, optimizer_maker(config))
        names = {id(weight): name for name, weight in model.named_parameters()}
        self.names = [[names[id(weight)] for weight in params_of(each)] for each in self.all]
        self._rates = [[group.get("lr") for group in each.param_groups] for each in self.all]
        self.set_rates(config)
        self.set_momentum(config)

    def set_rates(self, config: ExperimentConfig) -> None:
        """Use the learning rate of a config."""
        for group, rate in self._rates_of(config):
            group["lr"] = rate

    def set_momentum(self, config: ExperimentConfig) -> None:
        """Use the momentum of a config, where an optimizer has one and is not one's own."""
        for group in [group for each in self.all for group in each.param_groups]:
            if "momentum" in group and config.optimizer != OWN:
                group["momentum"] = config.momentum

    def have_own_rates(self, config: ExperimentConfig) -> bool:
        """Whether code of one's own sets the learning rates: a schedule, or something that has changed them.

        Args:
            config: The config in effect.
        """
        if any(map(sets_rates, schedules_in_hooks(self.all))):
            return True
        return any(not math.isclose(group["lr"], rate, rel_tol=1e-6) for group, rate in self._rates_of(config))

    def _rates_of(self, config: ExperimentConfig) -> list[tuple[dict[str, Any], Any]]:
        """Return the groups with the rates of a config: that of the first; those of others keep their ratio to it."""
        first = self._rates[0][0]
        if not first:
            return []
        return [
            (group, config.learning_rate * (rate / first))
            for optimizer, rates in zip(self.all, self._rates, strict=True)
            for group, rate in zip(optimizer.param_groups, rates, strict=False)  # a hook may have added groups
            if rate is not None
        ]
