"""The loss that an update minimizes: that of the call's rows, and optionally that of further sequences, in the same
optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from nccl_transfer.refs.columns import Jagged
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
        sequences: One sequence per row of the update. A sequence with an empty response is skipped.
        head: Head whose output the loss function takes.
        loss_for: Returns the loss function of a mini-batch, given the response tokens of its `sequences` over all
            ranks.
        metrics: Names of the statistics that the loss function returns: sums over these response tokens.
    """

    sequences: Sequences
    head: Head[Other]
    loss_for: Callable[[int], LossFn[Other]]
    metrics: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class LossTermBatch(MicroBatch):
    """A micro-batch of the sequences of a `LossTerm`; its class tells it from a micro-batch of the update's rows."""

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> LossTermBatch:
        """Converts a micro-batch, and its `part`, to this class."""
        part = micro_batch.part and cls.of(micro_batch.part)
        return cls(**{**vars(micro_batch), "part": part})


@dataclass(frozen=True)
class UpdateLoss(Generic[Output]):
    """A loss over the rows of a mini-batch, plus an optional term.

    Attributes:
        head: Head whose output the loss function takes.
        loss_for: Returns the loss function of a mini-batch, given its numbers of response tokens and of rows over all
            ranks.
        columns: Columns that the loss function reads, with one value per response token.
        term: Additional loss; None for none.
    """

    head: Head[Output]
    loss_for: Callable[[int, int], LossFn[Output]]
    columns: Sequence[Jagged[Tensor]] = ()
    term: LossTerm[Any] | None = None

    def for_mini_batch(
        self, num_tokens: int, num_rows: int, term_tokens: int
    ) -> tuple[Head[Any], LossFn[Any]]:
        """Returns one head and one loss function for all micro-batches of a mini-batch: on a `LossTermBatch` they are
        those of the term, on any other micro-batch those of the rows.

        Args:
            num_tokens: Response tokens of the mini-batch's rows, over all ranks.
            num_rows: Rows of the mini-batch, over all ranks.
            term_tokens: Response tokens of the term's sequences, over all ranks; ignored without a term.
        """
        head, loss = self.head, self.loss_for(num_tokens, num_rows)
        if self.term is None:
            return head, loss
        term_head, term_loss = self.term.head, self.term.loss_for(term_tokens)

        def either_head(raw: Tensor, micro_batch: MicroBatch) -> Any:
            return (term_head if isinstance(micro_batch, LossTermBatch) else head)(raw, micro_batch)

        def either_loss(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return (term_loss if isinstance(micro_batch, LossTermBatch) else loss)(output, micro_batch)

        return either_head, either_loss
