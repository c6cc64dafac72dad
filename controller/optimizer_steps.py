"""The number of optimizer steps of a run, over which learning rates fall where no other number is given."""

from __future__ import annotations

from controller.config.config import Config
from controller.config.memory import steps_of_update
from rlhf.roles import find_role
from settings.model import OptimizerTable
from settings.service import ServiceTable
from settings.strict import validate


def with_total_steps(config: Config) -> Config:
    """Returns the configuration with `total_steps` of each optimizer whose learning rate depends on it and that does
    not give it: the optimizer steps of the service in the run, if each of its steps makes one update with all rows.

    Args:
        config: Configuration of the run, with its number of steps.

    Raises:
        ConfigError: The warm-up is as long as the run, or longer.
    """
    services = {}
    for name, table in config.services.items():
        optimizer = getattr(table, "optimizer", None)
        if isinstance(optimizer, OptimizerTable) and optimizer.lacks_total_steps:
            steps = _updates(config, table) * steps_of_update(config, table)
            given = {**optimizer.model_dump(exclude_unset=True), "total_steps": steps}
            where = f"services.{name}.optimizer, for a run of {steps} optimizer steps"
            table = table.model_copy(update={"optimizer": validate(OptimizerTable, given, where)})
        services[name] = table
    return config.model_copy(update={"services": services})


def _updates(config: Config, table: ServiceTable) -> int:
    """Returns the number of steps of the run that update a service."""
    is_actor = find_role(table.role).name == "actor"
    return max(0, config.run.steps - (config.algorithm.critic_warmup_steps if is_actor else 0))
