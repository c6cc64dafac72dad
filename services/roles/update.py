"""An update: one optimizer step per mini-batch, applied on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf.errors import CallCancelled, InvalidRequest
from services.engines.base import TrainEngine
from services.roles.update_loss import UpdateLoss
from services.roles.update_plan import MiniBatch
from services.runtime.ranks import Ranks, known_to_all
from services.runtime.worker import CallContext

Metrics = dict[str, tuple[float, float]]
"""(sum, count) by name."""

STEP_METRICS = ("loss", "grad_norm", "lr")


class Updater:
    """Runs the optimizer steps of updates."""

    def __init__(self, engine: TrainEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks

    def run(
        self,
        mini_batches: list[MiniBatch],
        update_loss: UpdateLoss[Any],
        call: CallContext,
        *,
        verify: Callable[[], None],
        copy_weights: Callable[[], None] | None = None,
    ) -> Metrics:
        """One optimizer step per mini-batch; if anything fails, weights and optimizer state are as before. Collective.

        A single step of an engine whose step is atomic is verified before it moves the weights. Any other update is
        undone from a snapshot, which takes as much host memory as weights and optimizer state.

        Args:
            mini_batches: The same number on every rank.
            verify: Raises where the rows are no longer valid.
            copy_weights: Copies the new weights; a part of the update, on every rank or on none.
        """

        def verify_together() -> None:
            with self._ranks.together(call.peers_deadline):
                verify()

        if len(mini_batches) == 1 and self._engine.step_is_atomic and copy_weights is None:
            return self._steps(mini_batches, update_loss, call, confirm=verify_together)
        with self._ranks.together(call.peers_deadline):
            before = self._engine.snapshot()
        try:
            metrics = self._steps(mini_batches, update_loss, call)
            verify_together()
            if copy_weights is not None:
                copy_weights()
        except BaseException:
            self._engine.restore(before)
            raise
        return metrics

    def _steps(
        self,
        mini_batches: list[MiniBatch],
        update_loss: UpdateLoss[Any],
        call: CallContext,
        confirm: Callable[[], None] = lambda: None,
    ) -> Metrics:
        sums: dict[str, float] = {}
        for done, mine in enumerate(mini_batches):
            num_tokens, num_rows, term_tokens = self._totals(mine, len(mini_batches), call)
            head, loss = update_loss.for_mini_batch(num_tokens, num_rows, term_tokens)
            step = self._engine.step(mine.micro_batches, head, loss, confirm=confirm)
            measured = {**step.stats, "loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}
            for name, value in measured.items():
                sums[name] = sums.get(name, 0.0) + value
            call.progress(done + 1, len(mini_batches))
        counts: dict[str, int] = {name: len(mini_batches) for name in STEP_METRICS}
        if update_loss.term is not None:
            counts |= dict.fromkeys(update_loss.term.metrics, sum(mine.term_tokens for mine in mini_batches))
        tokens = sum(mine.tokens for mine in mini_batches)
        return {name: (value, counts.get(name, tokens)) for name, value in sums.items()}

    def _totals(self, mine: MiniBatch, num_mini_batches: int, call: CallContext) -> tuple[int, int, int]:
        """Response tokens, rows and term tokens of a mini-batch over all ranks. Collective.

        Raises:
            CallCancelled: A rank is to stop.
            InvalidRequest: The mini-batch has no rows on any rank.
        """
        is_owner = self._ranks.is_row_owner
        share = [count * is_owner for count in (mine.tokens, mine.rows, mine.term_tokens)]
        *counts, stopping = self._ranks.total([*share, call.stopping], call.peers_deadline)
        if stopping:
            raise known_to_all(CallCancelled(f"call {call.call.call_id} was stopped between mini-batches"))
        num_tokens, num_rows, term_tokens = map(int, counts)
        if not num_rows:
            raise known_to_all(
                InvalidRequest(
                    f"a mini-batch of {num_mini_batches} has no rows: schedule.mini_batches is too large"
                )
            )
        return num_tokens, num_rows, term_tokens
