"""Plans the mini-batches of an update: which rows of this rank are in which, split into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.wire import MAX_ROWS
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2
from services.compute.microbatch import MicroBatch
from services.roles.columns import Sequences, sequence_columns
from services.roles.micro_batching import MicroBatcher
from services.roles.minibatch import check_schedule, deal
from services.roles.update_loss import LossTerm, LossTermBatch, UpdateLoss
from services.runtime.worker import CallContext, CallRows

NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class MiniBatch:
    """This rank's part of a mini-batch.

    Attributes:
        micro_batches: Micro-batches of the rows whose gradient is not held, followed by those of the loss term's
            sequences.
        tokens: Response tokens of the rows.
        rows: Number of rows.
        term_tokens: Response tokens of the loss term's sequences; 0 without a term.
        indices: Indices of the rows among this rank's rows of the call, [rows].
    """

    micro_batches: list[MicroBatch]
    tokens: int
    rows: int
    term_tokens: int
    indices: np.ndarray


def plan_mini_batches(
    rows: CallRows,
    schedule: actor_pb2.Schedule,
    call: CallContext,
    micro_batcher: MicroBatcher,
    loss: UpdateLoss[Any],
    held: np.ndarray = NO_ROWS,
) -> list[MiniBatch]:
    """Plans this rank's part of every mini-batch of every epoch, in the order of the optimizer steps.

    Args:
        rows: Rows of the call.
        schedule: Numbers of epochs and of mini-batches per epoch.
        call: The call, whose seed shuffles the rows, and which may be stopped between two mini-batches.
        micro_batcher: Splits the rows of a mini-batch into micro-batches.
        loss: Loss of the update; the sequences of its term are in the mini-batches of their rows.
        held: Numbers of the rows of the first mini-batch whose gradient is held. Default: none.

    Raises:
        InvalidRequest: The schedule is out of range, or a column does not have one value per response token.
        CallCancelled, DeadlineExceeded: The call was stopped.
    """
    check_schedule(schedule.epochs, schedule.mini_batches)
    sequences, term = _checked_sequences(rows, loss.columns), loss.term
    lengths = sequences.lengths
    parts: list[MiniBatch] = []
    for epoch in range(schedule.epochs):
        for mine in deal(rows.numbers, schedule.mini_batches, _key(call, epoch)):
            call.check()
            further, term_tokens = _term_batches(micro_batcher, term, mine) if term else ([], 0)
            left = mine if parts else mine[~np.isin(rows.numbers[mine], held)]
            micro_batches = [*micro_batcher.split(sequences, left), *further]
            parts.append(MiniBatch(micro_batches, int(lengths[mine].sum()), len(mine), term_tokens, mine))
    return parts


def plan_first(
    rows: CallRows,
    schedule: actor_pb2.Schedule,
    call: CallContext,
    micro_batcher: MicroBatcher,
    loss: UpdateLoss[Any],
    num_rows: int,
) -> tuple[MiniBatch, int]:
    """Plans those of this rank's rows that are in the first mini-batch of an update of `num_rows` rows over all ranks.
    Returns them, and the number of rows of this mini-batch over all ranks. Other arguments and errors as for
    `plan_mini_batches`."""
    if not 0 < num_rows <= MAX_ROWS or (rows.numbers >= num_rows).any():
        raise InvalidRequest(f"rows: {num_rows} are fewer than the numbers of rows say, or above {MAX_ROWS}")
    mine, sequences = first_rows(rows.numbers, schedule, call), _checked_sequences(rows, loss.columns)
    tokens = int(sequences.lengths[mine].sum())
    planned = MiniBatch(micro_batcher.split(sequences, mine), tokens, len(mine), 0, mine)
    return planned, len(first_rows(np.arange(num_rows), schedule, call))


def first_rows(numbers: np.ndarray, schedule: actor_pb2.Schedule, call: CallContext) -> np.ndarray:
    """Returns which rows are in the first mini-batch of an update, as ascending indices into `numbers`, the numbers of
    rows [rows] int64. Raises InvalidRequest where the schedule is out of range."""
    check_schedule(schedule.epochs, schedule.mini_batches)
    return deal(numbers, schedule.mini_batches, _key(call, 0))[0]


def _key(call: CallContext, epoch: int) -> tuple[int, ...]:
    """Returns the key by which the rows of an epoch are dealt to mini-batches."""
    return call.call.seed, call.call.step, call.call.ordinal, epoch


def _checked_sequences(rows: CallRows, columns: Sequence[Jagged[Tensor]]) -> Sequences:
    """Returns the sequences of rows; raises InvalidRequest where a column does not have one value per response
    token."""
    sequences = sequence_columns(rows)
    for column in columns:
        if not np.array_equal(column.lengths, sequences.lengths):
            raise InvalidRequest("a column does not have one value per response token")
    return sequences


def _term_batches(
    micro_batcher: MicroBatcher, term: LossTerm[Any], rows: np.ndarray
) -> tuple[list[LossTermBatch], int]:
    """Returns the micro-batches of a loss term's sequences at the given rows, and the number of their response
    tokens."""
    lengths = term.sequences.lengths
    filled = rows[lengths[rows] > 0]
    micro_batches = micro_batcher.split(term.sequences, filled)
    return [LossTermBatch.of(each) for each in micro_batches], int(lengths[filled].sum())
