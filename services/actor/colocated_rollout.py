"""The rollout engine of an actor, beside the training engine on the same device: its weights, and its sleep."""

from __future__ import annotations

from collections.abc import Callable

from rlhf.errors import RlhfError
from services.actor.rollout_check import verify_rollout
from services.engines.generation_shards import GenerationWeights
from services.roles.weight_check import WeightCheck
from services.rollout.base import RolloutEngine
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext

_NO_WEIGHTS = -1
"""Stands for the policy version of a rollout engine that has no weights."""


class ColocatedRollout:
    """Loads the weights that are trained into a rollout engine, and with `sleeps` frees the engine's memory while the
    training engine computes.

    An engine that sleeps does so for one of two reasons: it rests from the first call that trains or infers after a
    generation until the next generation wakes it, or it was offloaded, until it is onloaded.

    Args:
        engine: Rollout engine of this rank.
        weights: Source of its weights.
        ranks: Ranks of the service.
        version: Returns the version of the policy that is trained.
        sleeps: Whether the engine rests while the actor trains and infers.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        weights: GenerationWeights,
        ranks: Ranks,
        version: Callable[[], int],
        *,
        sleeps: bool,
    ) -> None:
        self.engine = engine
        self._weights, self._ranks, self._trained_version, self._sleeps = weights, ranks, version, sleeps
        self._version = _NO_WEIGHTS
        self._is_resting = False

    def rest(self, call: CallContext) -> None:
        """Frees the engine's memory until `wake`, if it is to sleep and is awake. The weights are lost with an engine
        that can drop them, so the next `refresh` loads them. Collective."""
        if not self._sleeps:
            return
        with self._ranks.together(call.peers_deadline):
            if not self.engine.is_asleep:
                self._version, self._is_resting = _NO_WEIGHTS, True
                self.engine.sleep(keep_weights=False)

    def wake(self, call: CallContext) -> None:
        """Takes memory again for an engine that rests. Does nothing for one that was offloaded. Collective.

        Raises:
            RlhfError: A rank has too little memory. Its engine still sleeps; the next call tries again on all ranks.
        """
        if not self._is_resting:
            return
        with self._ranks.together(call.peers_deadline):
            try:
                self.engine.wake()
            except (MemoryError, RuntimeError) as error:
                raise RlhfError(
                    "the rollout engine sleeps while the actor trains (rollout_sleep), and finds no "
                    f"memory to wake in: {error}"
                ) from error
        self._is_resting = False

    def refresh(self, call: CallContext) -> None:
        """Loads the training engine's weights into the rollout engine on all ranks if their policy versions differ on
        any rank. Collective."""
        is_outdated = self._version != self._trained_version()
        if not any(self._ranks.total([is_outdated], call.peers_deadline)):
            return
        self._version = _NO_WEIGHTS
        self.engine.load_weights(self._weights.rollout_weights())
        self._version = self._trained_version()

    def forget(self) -> None:
        """Notes that the weights are no longer those that are trained, so that the next generation loads them."""
        self._version = _NO_WEIGHTS

    def offload(self) -> int:
        """Frees the engine's memory until `onload`; returns the bytes freed, 0 if it rests."""
        freed = self.engine.sleep(keep_weights=not self._sleeps)
        self._is_resting = False
        if self._sleeps or not self.engine.keeps_weights:
            self._version = _NO_WEIGHTS
        return freed

    def onload(self) -> int:
        """Ends `offload`; returns the bytes allocated. An engine that sleeps while the actor trains stays asleep, and
        rests until the next generation."""
        if self._sleeps:
            self._is_resting = self.engine.is_asleep
            return 0
        return self.engine.wake()

    def verify(self, check: WeightCheck, call: CallContext) -> None:
        """Compares the weights of the rollout engine with those of the training engine, if both have the same policy
        version and the rollout engine is awake on all ranks. Collective."""
        is_apart = self._version != self._trained_version() or self.engine.is_asleep
        if not any(self._ranks.total([is_apart], call.peers_deadline)):
            verify_rollout(self.engine, self._weights, check)
