"""Builds the rollout engine that a service's table of the configuration names."""

from __future__ import annotations

from rlhf.errors import ConfigError
from services.engines.implementation import implementation_of
from services.rollout.base import RolloutEngine, RolloutSetup
from settings.generation import GeneratingTable


def make_rollout(table: GeneratingTable, setup: RolloutSetup) -> RolloutEngine:
    """Builds the rollout engine named by `table.rollout_engine`. Its weights must be loaded (`load_weights`) before
    it generates. Collective.

    Args:
        table: Table of the service.
        setup: Shards, mesh and device.

    Raises:
        ConfigError: The engine's libraries are not installed, it cannot be imported, or it cannot run the model.
    """
    name, spec = table.rollout_engine, table.rollout_spec
    implementation = implementation_of("rollout_engine", name, spec, RolloutEngine)
    options = spec.options.model_validate(getattr(table, spec.options_key))
    try:
        return implementation.create(table, options, setup)
    except ValueError as error:
        raise ConfigError(f"rollout_engine {name}: {error}") from error
