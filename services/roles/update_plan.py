"""This rank's part of every mini-batch of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2
from services.compute.microbatch import MicroBatch
from services.roles.columns import sequence_columns
from services.roles.micro_batching import MicroBatcher
from services.roles.minibatch import check_schedule, deal
from services.roles.update_loss import LossTerm, LossTermBatch
from services.runtime.worker import CallContext, CallRows


@dataclass(frozen=True)
class MiniBatch:
    """This rank's micro-batches of a mini-batch, with their response tokens, rows and tokens of a loss term."""

    micro_batches: list[MicroBatch]
    tokens: int
    rows: int
    term_tokens: int


def plan_mini_batches(
    rows: CallRows,
    schedule: actor_pb2.Schedule,
    call: CallContext,
    micro_batcher: MicroBatcher,
    columns: Sequence[Jagged[Tensor]],
    term: LossTerm[Any] | None,
) -> list[MiniBatch]:
    """This rank's part of every mini-batch of every epoch, in the order of the optimizer steps.

    Args:
        columns: Columns that the loss reads, with one value per response token.
        term: Additional loss; its micro-batches follow those of the rows.

    Raises:
        InvalidRequest: A schedule out of range, or a column with another number of values.
    """
    check_schedule(schedule.epochs, schedule.mini_batches)
    sequences = sequence_columns(rows)
    lengths = sequences[1].lengths
    for column in columns:
        if not np.array_equal(column.lengths, lengths):
            raise InvalidRequest("a column does not have one value per response token")
    header = call.call
    parts = []
    for epoch in range(schedule.epochs):
        key = (header.seed, header.step, header.ordinal, epoch)
        for mine in deal(rows.numbers, schedule.mini_batches, key):
            call.check()
            further, term_tokens = _term_batches(micro_batcher, term, mine) if term else ([], 0)
            micro_batches = [*micro_batcher.split(sequences, mine), *further]
            parts.append(MiniBatch(micro_batches, int(lengths[mine].sum()), len(mine), term_tokens))
    return parts


def _term_batches(
    micro_batcher: MicroBatcher, term: LossTerm[Any], rows: np.ndarray
) -> tuple[list[LossTermBatch], int]:
    """Micro-batches of a term's sequences at these rows, and their response tokens."""
    lengths = term.sequences[1].lengths
    filled = rows[lengths[rows] > 0]
    micro_batches = micro_batcher.split(term.sequences, filled)
    return [LossTermBatch(**vars(each)) for each in micro_batches], int(lengths[filled].sum())
