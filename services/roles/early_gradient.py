"""The gradient of some rows of an update, computed before the update itself while other rows of it are not there yet
(FlexRLHF, Xiao et al. 2023, arXiv 2312.11819)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np

from rlhf.errors import CallCancelled
from services.compute.heads import Head
from services.engines.accumulating import AccumulatingEngine
from services.engines.base import LossFn, Output, TrainEngine
from services.roles.update_plan import NO_ROWS, MiniBatch
from services.runtime.ranks import Ranks, known_to_all
from services.runtime.worker import CallContext, CallRows


class EarlyGradient:
    """Gradient of rows of the first mini-batch of an update, which the engine holds until the update. It is a cache:
    where it is not there, or was computed for another update, the update computes all of its rows.

    Args:
        engine: Engine that holds it. Without one that accumulates, there is never a gradient.
        ranks: Ranks of the service.
    """

    def __init__(self, engine: TrainEngine, ranks: Ranks) -> None:
        self._engine = engine if isinstance(engine, AccumulatingEngine) else None
        self._ranks = ranks
        self._of: Hashable = None
        self._numbers = NO_ROWS

    def add(
        self,
        of: Hashable,
        mine: MiniBatch,
        head: Head[Output],
        loss: LossFn[Output],
        rows: CallRows,
        call: CallContext,
    ) -> None:
        """Computes the gradient of rows and adds it to that of earlier calls for the same update. If anything fails on
        a rank, every rank raises and holds none. Collective.

        Args:
            of: Id of the update, by its place in the session, its loss, and the weights that it begins with.
            mine: This rank's rows of the first mini-batch.
            head, loss: Head, and loss of the mini-batch.
            rows: Rows of the call.
            call: The call.

        Raises:
            CallCancelled: The call should stop on some rank.
        """
        if self._engine is None:
            return
        numbers = rows.numbers[mine.indices]
        goes_on = self._is_of(of) and not np.isin(numbers, self._numbers).any()
        restarting, stopping = self._ranks.total([not goes_on, call.stopping], call.peers_deadline)
        if restarting or stopping:
            self.drop()
        if stopping:
            raise known_to_all(CallCancelled(f"call {call.call.call_id} was stopped before its gradient"))
        known, self._of = self._numbers, None
        try:
            self._engine.accumulate(mine.micro_batches, head, loss)
            with self._ranks.together(call.peers_deadline):
                rows.fetched.verify()
        except BaseException:
            self.drop()
            raise
        self._of, self._numbers = of, np.concatenate([known, numbers])

    @contextmanager
    def used(self, of: Hashable, first: np.ndarray, call: CallContext) -> Iterator[np.ndarray]:
        """Context manager of an update. Yields the numbers of those of this rank's rows whose gradient the engine adds
        to that of the first optimizer step in the block; none unless all ranks hold that of this update. Collective
        where `of` is not None.

        Args:
            of: As for `add`. None: of an update that was not prepared.
            first: Numbers of this rank's rows in the first mini-batch.
            call: The call.
        """
        fits = self._is_of(of) and bool(np.isin(self._numbers, first).all())
        if of is None or any(self._ranks.total([not fits], call.peers_deadline)):
            self.drop()
        try:
            yield self._numbers
        finally:
            self.drop()

    def drop(self) -> None:
        """Drops the gradient, if there is one. Not collective."""
        if self._engine is not None:
            self._engine.drop_gradient()
        self._of, self._numbers = None, NO_ROWS

    def _is_of(self, of: Hashable) -> bool:
        return self._engine is not None and of is not None and self._of == of and self._engine.holds_gradient
