"""The loss that an update minimizes: of the call's rows, and optionally of further sequences in the same steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.engines.base import LossFn
from services.roles.columns import Sequences

Output = TypeVar("Output")
Other = TypeVar("Other")


@dataclass(frozen=True)
class LossTerm(Generic[Other]):
    """An additional loss over sequences of its own, such as the pre-training loss of PPO-ptx.

    Attributes:
        sequences: One per row of the update. A sequence with an empty response is skipped.
        head: Head whose output the loss takes.
        loss_for: Loss function for the response tokens of a mini-batch over all ranks.
        metrics: Names of the sums that the loss function returns; their counts are those tokens.
    """

    sequences: Sequences
    head: Head[Other]
    loss_for: Callable[[int], LossFn[Other]]
    metrics: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class LossTermBatch(MicroBatch):
    """A micro-batch of the sequences of a `LossTerm`."""


@dataclass(frozen=True)
class UpdateLoss(Generic[Output]):
    """A loss over the rows of a mini-batch, plus an optional term.

    Attributes:
        head: Head whose output the loss takes.
        loss_for: Loss function for the response tokens and rows of a mini-batch over all ranks.
        term: Additional loss; None for none.
    """

    head: Head[Output]
    loss_for: Callable[[int, int], LossFn[Output]]
    term: LossTerm[Any] | None = None

    def for_mini_batch(
        self, num_tokens: int, num_rows: int, term_tokens: int
    ) -> tuple[Head[Any], LossFn[Any]]:
        """Head and loss function for all micro-batches of a mini-batch with these counts over all ranks."""
        head, loss = self.head, self.loss_for(num_tokens, num_rows)
        if self.term is None:
            return head, loss
        term_head, term_loss = self.term.head, self.term.loss_for(term_tokens)

        def either_head(raw: Tensor, micro_batch: MicroBatch) -> Any:
            return (term_head if isinstance(micro_batch, LossTermBatch) else head)(raw, micro_batch)

        def either_loss(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return (term_loss if isinstance(micro_batch, LossTermBatch) else loss)(output, micro_batch)

        return either_head, either_loss
