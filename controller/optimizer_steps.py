"""The number of optimizer steps of a run, over which learning rates fall where no other number is given."""

from __future__ import annotations

from controller.config.config import Config
from controller.config.memory import steps_of_update
from rlhf.errors import ConfigError
from rlhf.roles import find_role
from settings.model import OptimizerTable, optimizer_without_end
from settings.service import ServiceTable
from settings.strict import validate

LONG_STEPS = 1 << 30
"""Optimizer steps of a run that is longer than any warm-up."""


def with_total_steps(config: Config) -> Config:
    """Returns the configuration with `total_steps` of each optimizer whose learning rate depends on it and that does
    not give it: the optimizer steps of the service in the run, if each of its steps makes one update with all rows.

    Args:
        config: Configuration of the run, with its number of steps.

    Raises:
        ConfigError: The warm-up is as long as the run, or longer, or no step of the run updates the service.
    """
    services = {}
    for name, table in config.services.items():
        if optimizer := optimizer_without_end(table):
            steps = _updates(config, table) * steps_of_update(config, table)
            if not steps:
                raise ConfigError(
                    f"services.{name}.optimizer.total_steps: has to be given where no step of the run updates the "
                    f"service: run.steps is {config.run.steps}, algorithm.critic_warmup_steps is "
                    f"{config.algorithm.critic_warmup_steps}"
                )
            given = {**optimizer.model_dump(exclude_unset=True), "total_steps": steps}
            where = f"services.{name}.optimizer, for a run of {steps} optimizer steps"
            table = table.model_copy(update={"optimizer": validate(OptimizerTable, given, where)})
        services[name] = table
    return config.model_copy(update={"services": services})


def as_of_a_long_run(table: ServiceTable) -> ServiceTable:
    """Returns the table of a service with `LONG_STEPS` as `total_steps` of its optimizer where `with_total_steps` would
    compute them, so that a few updates run at the learning rates of the start of a run."""
    optimizer = optimizer_without_end(table)
    if optimizer is None:
        return table
    return table.model_copy(update={"optimizer": optimizer.model_copy(update={"total_steps": LONG_STEPS})})


def _updates(config: Config, table: ServiceTable) -> int:
    """Returns the number of steps of the run that update a service."""
    is_actor = find_role(table.role).name == "actor"
    return max(0, config.run.steps - (config.algorithm.critic_warmup_steps if is_actor else 0))
