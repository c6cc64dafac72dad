"""Compares the weights of an actor's rollout engine with those of its training engine."""

from __future__ import annotations

import torch.distributed as dist

from services.engines.generation_shards import GenerationWeights
from services.roles.weight_check import WeightCheck, checksums_of
from services.rollout.base import RolloutEngine


def verify_rollout(rollout: RolloutEngine, weights: GenerationWeights, check: WeightCheck) -> None:
    """Compares the checksums of the rollout engine's tensors before and after it loads the training engine's weights.
    Both engines must have the same policy version. Collective.

    Args:
        rollout: Rollout engine of this rank.
        weights: Source of its weights.
        check: Raises the differences of any rank on all ranks.

    Raises:
        CorruptWeights: A tensor has changed, so it differed from the training engine's weights.
    """
    before = checksums_of(rollout.held()).of
    rollout.load_weights(weights.rollout_weights())
    after = checksums_of(rollout.held()).of
    check.raise_together(
        f"{key[0]} on rank {dist.get_rank()} differs from the training engine's"
        for key, checksum in after.items()
        if before.get(key) != checksum
    )
