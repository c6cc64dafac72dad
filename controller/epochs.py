"""The number of steps of a run that is given in passes over its training rows."""

from __future__ import annotations

from controller.config.checks import check_best
from controller.config.config import Config
from reports.units import counted
from rlhf.errors import ConfigError


def with_steps(config: Config, num_rows: int) -> Config:
    """Returns the configuration with `run.steps` computed from `run.epochs`, where it is given: as many steps as draw
    each row that often, rounded up.

    Args:
        config: Configuration of the run.
        num_rows: Number of training rows of all sources.

    Raises:
        ConfigError: The run has fewer steps than `checkpoint.best` needs.
    """
    if config.run.epochs is None:
        return config
    steps = -(-config.run.epochs * num_rows // config.data.prompts_per_step)
    run = config.run.model_copy(update={"steps": steps})
    try:
        check_best(config.checkpoint, run)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config.model_copy(update={"run": run})


def steps_of_epochs(config: Config, num_rows: int) -> str:
    """Returns a line on the number of steps that `run.epochs` are, for the terminal; empty where it is not given.
    Arguments are those of `with_steps`, which returned the configuration."""
    if config.run.epochs is None:
        return ""
    return (
        f"run.epochs {config.run.epochs}: {counted(config.run.steps, 'step')} of "
        f"{counted(config.data.prompts_per_step, 'prompt')}, from {counted(num_rows, 'training row')}"
    )
