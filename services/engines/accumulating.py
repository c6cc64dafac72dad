"""Engines that can begin the gradient of an optimizer step before the step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from torch import Tensor

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.engines.agreement import all_or_none
from services.engines.base import LossFn, Output, TrainEngine
from services.engines.deterministic import deterministic_kernels
from services.engines.loss_accumulator import LossAccumulator


@dataclass(frozen=True, eq=False)
class PassLosses(Generic[Output]):
    """Computes the losses of micro-batches, and adds them and their statistics to sums. An error is kept until the
    passes have ended, since other ranks take part in them.

    Attributes:
        head, loss_fn: As in `TrainEngine.step`.
        sums: Sums of the optimizer step.
        are_last: Whether these are the last micro-batches of the optimizer step.
        failures: The error of the first loss that failed, if one has.
    """

    head: Head[Output]
    loss_fn: LossFn[Output]
    sums: LossAccumulator
    are_last: bool
    failures: list[Exception] = field(default_factory=list)

    def loss_of(self, output: Callable[[], Output], micro_batch: MicroBatch) -> Tensor | None:
        """Returns the loss of a micro-batch, given a function that returns the head's output for it; None if the
        function fails or the loss does, or an earlier one has."""
        if self.failures:
            return None
        try:
            loss, stats = self.loss_fn(output(), micro_batch)
        except Exception as error:  # noqa: BLE001 - raised after the backward passes
            self.failures.append(error)
            return None
        self.sums.add(loss, stats)
        return loss


class AccumulatingEngine(TrainEngine):
    """Base class of engines whose `step` adds the gradients of its micro-batches to those of `accumulate`.

    A gradient is held from the first `accumulate` until the next `step`, whether that fails or not, or until it is
    dropped: by `drop_gradient`, by an `accumulate` that fails, and by `restore`, `load`, `start_over` and `offload`.
    """

    _sums: LossAccumulator | None = None
    """Sums of the optimizer step whose gradient is held."""
    _counts_loss: bool = True
    """Whether the sum of the loss over ranks includes this rank. False if another rank computes the same micro-batches
    and contributes their loss."""

    @abstractmethod
    def _run_passes(self, micro_batches: Sequence[MicroBatch], losses: PassLosses[Output]) -> None:
        """Runs the forward and backward passes of micro-batches and accumulates their gradients. If `losses` returns no
        loss for a micro-batch, its backward pass uses a loss of 0. Collective."""

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
        """Whether this rank holds a gradient from `accumulate`."""
        return self._sums is not None

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> None:
        """Accumulates the gradient of micro-batches for the next `step`, whose loss then includes them, as if they
        preceded its own micro-batches. Does not change weights. Collective.

        Args:
            micro_batches, head, loss_fn: As in `step`, with the errors of that.
        """
        self._check_learns()
        self._sums = self._sums or LossAccumulator(self.device)
        try:
            self._add_gradients(micro_batches, PassLosses(head, loss_fn, self._sums, are_last=False))
        except BaseException:
            self.drop_gradient()
            raise

    def drop_gradient(self) -> None:
        """Frees the gradient that `accumulate` has computed, if there is one. Not collective."""
        if self.holds_gradient:
            self._end_gradient()

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        """Computes the gradient of the whole mini-batch and stores it in `.grad` of this rank's shards; returns the
        loss over all ranks and this rank's statistics. Collective."""
        sums = self._sums or LossAccumulator(self.device)
        self._add_gradients(micro_batches, PassLosses(head, loss_fn, sums, are_last=True))
        with deterministic_kernels(self.device):
            self._store_gradients()
            return sums.total(is_primary=self._counts_loss)

    def _add_gradients(self, micro_batches: Sequence[MicroBatch], losses: PassLosses[Output]) -> None:
        """Adds the gradients of micro-batches to those of earlier ones, and their losses to the sums. If a loss fails,
        every rank raises. Collective."""
        with deterministic_kernels(self.device):
            self._run_passes(micro_batches, losses)
        with all_or_none("the loss"):
            for error in losses.failures:
                raise error

    def _end_gradient(self) -> None:
        """Frees all gradients, held or not. Not collective."""
        self._sums = None
        self._drop_gradients()
