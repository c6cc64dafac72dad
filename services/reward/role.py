"""Chooses the worker class of a service of the reward role."""

from __future__ import annotations

from rlhf.errors import ConfigError
from services.runtime.worker import Worker
from settings.reward import RewardTable


def worker_class(table: RewardTable) -> type[Worker]:
    """Returns the worker class for a config. For kind "model", the one that learns if the table has an optimizer.

    Raises:
        ConfigError: The table has an optimizer or `sharded`, but its kind is not "model".
    """
    if table.kind == "model":
        # Imported here: they need torch, which takes seconds and which other kinds of reward do without.
        from services.reward import model, sharded

        if table.sharded:
            return sharded.ShardedLearningRewardWorker if table.optimizer else sharded.ShardedRewardWorker
        return model.LearningRewardWorker if table.optimizer else model.ModelRewardWorker
    if table.sharded:
        raise ConfigError(f"sharded: a reward of kind {table.kind} has no weights; only a model has")
    if table.optimizer:
        raise ConfigError(f"optimizer: a reward of kind {table.kind} has nothing to learn; only a model has")
    # Imported here: kind "model" does without its extras.
    from services.reward.worker import RewardWorker

    return RewardWorker
