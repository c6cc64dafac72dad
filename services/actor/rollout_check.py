"""Compares the weights that an actor generates with with those that it trains."""

from __future__ import annotations

import torch.distributed as dist

from services.engines.generation_shards import GenerationWeights
from services.roles.weight_check import WeightCheck, checksums_of
from services.rollout.base import RolloutEngine


def verify_rollout(rollout: RolloutEngine, weights: GenerationWeights, check: WeightCheck) -> None:
    """Loads the weights of the training engine into the rollout engine, which must have those of the same policy
    version already, and compares the checksums of the rollout engine's tensors before and after. Collective.

    Args:
        rollout: Rollout engine of this rank.
        weights: Source of its weights.
        check: Tells all ranks what any of them finds.

    Raises:
        CorruptWeights: A tensor has changed, so it was not what the training engine has.
    """
    before = checksums_of(rollout.held()).of
    rollout.load_weights(weights.rollout_weights())
    after = checksums_of(rollout.held()).of
    check.raise_together(
        f"{key[0]} on rank {dist.get_rank()} is not what the training engine has"
        for key, checksum in after.items()
        if before.get(key) != checksum
    )
