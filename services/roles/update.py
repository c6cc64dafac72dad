"""Runs an update: one optimizer step per mini-batch, which together take effect on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rlhf.errors import CallCancelled, InvalidRequest
from services.engines.agreement import takes_effect
from services.engines.base import RejectedGradient, TrainEngine
from services.engines.rollback import undo
from services.roles.rejected import RowKeeper
from services.roles.update_loss import UpdateLoss
from services.roles.update_plan import MiniBatch
from services.runtime.ranks import Ranks, known_to_all
from services.runtime.worker import CallContext, CallRows

Metrics = dict[str, tuple[float, float]]
"""(sum, count) of each metric, by name."""

STEP_METRICS = ("loss", "grad_norm", "lr")


class Updater:
    """Runs the optimizer steps of updates.

    Args:
        engine: Engine that is trained.
        ranks: Ranks of the service.
        keeper: Keeps the rows of a mini-batch whose gradient is refused.
    """

    def __init__(self, engine: TrainEngine, ranks: Ranks, keeper: RowKeeper) -> None:
        self._engine, self._ranks, self._keeper = engine, ranks, keeper

    def run(
        self,
        mini_batches: list[MiniBatch],
        update_loss: UpdateLoss[Any],
        call: CallContext,
        rows: CallRows,
        *,
        copy_weights: Callable[[], None] | None = None,
    ) -> Metrics:
        """Makes one optimizer step per mini-batch. If anything fails on a rank, if a mini-batch has no rows on any rank
        (InvalidRequest), if a gradient is refused (UpdateRejected), or if the call is stopped (CallCancelled), every
        rank raises, and weights and optimizer state are as before. Collective.

        If there is one mini-batch and the engine's step is atomic, all checks are made before the weights change. Any
        other update starts with a snapshot, as large as weights and optimizer state, and is undone from it if it fails.
        A rank that cannot undo it, or that fails in an atomic step after all checks, raises OutOfStep, upon which its
        process exits.

        Args:
            mini_batches: This rank's part of each mini-batch; equally many on every rank.
            update_loss: Loss to minimize.
            call: The call.
            rows: Rows of the call. The update fails if any that were read in place have been released since the
                fetch.
            copy_weights: Copies the new weights to a further copy, on every rank or on none, as a part of the update;
                None for no copy.

        Returns:
            (sum, count) by name: the loss's statistics over response tokens on this rank, and "loss", "grad_norm" and
            "lr" over optimizer steps.
        """

        def verify_together() -> None:
            with self._ranks.together(call.peers_deadline):
                rows.fetched.verify()

        if len(mini_batches) == 1 and self._engine.step_is_atomic and copy_weights is None:
            with ExitStack() as agreed:

                def confirm() -> None:
                    verify_together()
                    agreed.enter_context(takes_effect("an optimizer step"))

                return self._steps(mini_batches, update_loss, call, rows, confirm=confirm)
        with self._ranks.together(call.peers_deadline):
            before = self._engine.snapshot()
        try:
            metrics = self._steps(mini_batches, update_loss, call, rows)
            verify_together()
            if copy_weights is not None:
                copy_weights()
        except BaseException as failure:
            undo(self._engine, before, failure)
            raise
        return metrics

    def _steps(
        self,
        mini_batches: list[MiniBatch],
        update_loss: UpdateLoss[Any],
        call: CallContext,
        rows: CallRows,
        confirm: Callable[[], None] = lambda: None,
    ) -> Metrics:
        """Makes one optimizer step per mini-batch and returns the metrics of `run`. Weights that earlier steps have
        changed are left so if a later one fails. `confirm` is called in each step before the weights change, and may
        raise."""
        sums: dict[str, float] = {}
        for done, mine in enumerate(mini_batches):
            num_tokens, num_rows, term_tokens = self._totals(mine, len(mini_batches), call)
            head, loss = update_loss.for_mini_batch(num_tokens, num_rows, term_tokens)
            try:
                step = self._engine.step(mine.micro_batches, head, loss, confirm=confirm)
            except RejectedGradient as error:
                raise self._keeper.rejected(error, rows, mine.indices, call) from error
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
        """Returns the response tokens, the rows and the tokens of the loss term of a mini-batch, summed over all
        ranks. Collective.

        Raises:
            CallCancelled: The call should stop on some rank.
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
