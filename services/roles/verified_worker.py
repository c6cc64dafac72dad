"""Base class of workers whose weights VerifyWeights compares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.engines.base import HeldTensor, TrainEngine
from services.roles.weight_check import WeightCheck
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register


class VerifiedWorker(Worker):
    """Worker of a role with weights, which implements VerifyWeights.

    Attributes:
        engine: Training engine; None for weights that are in no engine.
        weight_check: Compares the weights. A subclass creates it, and tells it of loads.
    """

    engine: TrainEngine | None = None
    weight_check: WeightCheck

    def held(self) -> Iterator[HeldTensor]:
        """Yields the tensors of this rank that only updates and loads change. Collective. Default: those of the
        engine."""
        assert self.engine is not None, "a worker without an engine overrides this"
        return self.engine.held()

    def verify_copies(self, call: CallContext) -> None:
        """Compares further copies of the weights with them, such as those that an actor generates with. Collective.
        Default: there are none."""

    @register("ONE_TO_ALL")
    def verify_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self._check_onloaded(call)
        verified = self.weight_check.verify(self.held())
        self.verify_copies(call)
        return CallResult(fields={"verified_bytes": verified})

    def verify_before_update(self, call: CallContext) -> None:
        """Compares the weights with their checksums of the last VerifyWeights, unless they were updated since then.
        Collective."""
        if self.weight_check.is_armed:
            self._check_onloaded(call)
            self.weight_check.verify_before_update(self.held())
            self.verify_copies(call)

    def _check_onloaded(self, call: CallContext) -> None:
        with self.ranks.together(call.peers_deadline):
            if self.engine is not None:
                self.engine.check_onloaded()
