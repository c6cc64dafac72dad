"""Verifies the weights in the memory of the services between steps."""

from __future__ import annotations

from controller.checkpoints.saver import Checkpointer
from controller.role_groups.cluster import Cluster


class WeightVerifier:
    """Has all services compare checksums of the tensors in their memory.

    Args:
        every: Number of steps between verifications (`run.verify_every`); 0: never.
        cluster: Connected services.
        checkpointer: Writes checkpoints, before each of which weights are verified too. Default: none are written.
    """

    def __init__(self, every: int, cluster: Cluster, checkpointer: Checkpointer | None = None) -> None:
        self._every, self._cluster, self._checkpointer = every, cluster, checkpointer

    def verify(self) -> None:
        """Verifies the weights of all services, and waits for it, unless weights are never verified.

        Raises:
            CorruptWeights: Tensors in the memory of a service are not what they were, or replicas differ.
        """
        if self._every:
            self._cluster.verify_weights()

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Verifies after a step where that is due, a checkpoint of the step is, or the step is the last; raises as
        `verify`."""
        saver = self._checkpointer
        if (
            is_last
            or (self._every and step % self._every == 0)
            or (saver and saver.is_due(step, is_last=is_last))
        ):
            self.verify()
