"""Chooses the worker that serves a table of the reward role."""

from __future__ import annotations

from rlhf.config import RewardTable
from rlhf.errors import ConfigError
from services.runtime.worker import Worker


def worker_class(table: RewardTable) -> type[Worker]:
    """The reward's worker: one that learns where the table has an optimizer.

    Raises:
        ConfigError: The table has an optimizer, and its kind is not "model".
    """
    if table.optimizer is None:
        # Imports the libraries of every kind of reward, so the configuration is checked first.
        from services.reward.worker import RewardWorker

        return RewardWorker
    if table.kind != "model":
        raise ConfigError(f"optimizer: a reward of kind {table.kind} has nothing to learn; only a model has")
    # Imports torch, which other kinds of reward do without.
    from services.reward.model import LearningRewardWorker

    return LearningRewardWorker
