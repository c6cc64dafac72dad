"""Declarations of the two engines: what a configuration knows of them. This module imports no torch."""

from pydantic import Field

from settings.engines import EngineSpec, RolloutSpec
from settings.strict import Strict


class PlainOptions(Strict):
    """Options of rollout engine plain, in `[services.actor.rollout_options]`."""

    rows_at_once: int = Field(default=64, ge=1)
    """Maximum number of rows in a forward pass."""


plain = RolloutSpec(implementation="rlhf_example.plain_rollout:PlainRollout", options=PlainOptions)

replicated = EngineSpec(implementation="rlhf_example.replicated_engine:ReplicatedEngine")
