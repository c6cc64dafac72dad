"""Builds the rollout engine that an actor's table of the configuration names."""

from __future__ import annotations

import torch

from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError
from services.engines.base import TrainEngine
from services.engines.implementation import implementation_of
from services.rollout.base import RolloutEngine
from settings.actor import ActorTable


def make_rollout(table: ActorTable, engine: TrainEngine, mesh: Mesh, device: torch.device) -> RolloutEngine:
    """Builds the rollout engine named by `table.rollout_engine`. Its weights must be loaded (`load_weights`) before
    it generates. Collective.

    Args:
        table: Table of the actor's service.
        engine: Training engine of this rank.
        mesh: Training and generation mesh of the service.
        device: Device of this rank.

    Raises:
        ConfigError: The engine's libraries are not installed, it cannot be imported, or it cannot run the model.
    """
    name, spec = table.rollout_engine, table.rollout_spec
    implementation = implementation_of("rollout_engine", name, spec, RolloutEngine)
    options = spec.options.model_validate(getattr(table, spec.options_key))
    try:
        return implementation.create(table, options, engine=engine, mesh=mesh, device=device)
    except ValueError as error:
        raise ConfigError(f"rollout_engine {name}: {error}") from error
