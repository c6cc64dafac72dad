"""Engines that can begin the gradient of an optimizer step before the step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.engines.base import LossFn, Output, TrainEngine
from services.engines.deterministic import deterministic_kernels
from services.engines.loss_accumulator import LossAccumulator


class AccumulatingEngine(TrainEngine):
    """Base class of engines whose `step` adds the gradients of its micro-batches to those of `accumulate`.

    A gradient is held from the first `accumulate` until the next `step`, whether that fails or not, or until it is
    dropped: by `drop_gradient`, by an `accumulate` that fails, and by `restore`, `load`, `start_over` and `offload`.
    """

    _sums: LossAccumulator | None = None
    """Sums of the optimizer step whose gradient is held."""
    _counts_loss: bool = True
    """Whether the loss of this rank's micro-batches is added to the sum over ranks, not that of another rank with the
    same ones."""

    @abstractmethod
    def _add_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        loss_fn: LossFn[Output],
        sums: LossAccumulator,
        *,
        are_last: bool,
    ) -> None:
        """Runs forward and backward passes of micro-batches, and adds their gradients to those of earlier ones since
        the last `_drop_gradients`. Collective.

        Args:
            micro_batches, head, loss_fn: As in `step`.
            sums: Sums of the optimizer step, to which loss and statistics are added.
            are_last: Whether these are the last micro-batches of the optimizer step.
        """

    @abstractmethod
    def _store_gradients(self) -> None:
        """Stores the accumulated gradients, summed over ranks, in `.grad` of this rank's shards. Collective."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Frees all gradients. Not collective."""

    @abstractmethod
    def _check_learns(self) -> None:
        """Raises RuntimeError if the engine has no optimizer, and EngineOffloaded if it is offloaded."""

    @property
    def holds_gradient(self) -> bool:
        """Whether this rank holds a gradient that `accumulate` has begun."""
        return self._sums is not None

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> None:
        """Begins the gradient of the next `step`, or goes on with it: the step is then on the sum of `loss_fn` over
        these micro-batches too, as if they came before its own. Changes no weight. Collective.

        Args:
            micro_batches, head, loss_fn: As in `step`, with the errors of that.
        """
        self._check_learns()
        self._sums = self._sums or LossAccumulator(self.device)
        try:
            with deterministic_kernels(self.device):
                self._add_gradients(micro_batches, head, loss_fn, self._sums, are_last=False)
        except BaseException:
            self.drop_gradient()
            raise

    def drop_gradient(self) -> None:
        """Drops the gradient that `accumulate` has begun, if there is one. Not collective."""
        if self.holds_gradient:
            self._end_gradient()

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        """Computes the gradient of the whole mini-batch and stores it in `.grad` of this rank's shards; returns the
        loss over all ranks and this rank's statistics. Collective."""
        sums = self._sums or LossAccumulator(self.device)
        with deterministic_kernels(self.device):
            self._add_gradients(micro_batches, head, loss_fn, sums, are_last=True)
            self._store_gradients()
            return sums.total(is_primary=self._counts_loss)

    def _end_gradient(self) -> None:
        """Frees all gradients, held or not. Not collective."""
        self._sums = None
        self._drop_gradients()
