"""Rows of a call to micro-batches of the engine, and outputs per token back to rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import TrainEngine
from services.roles.columns import Sequences

Output = TypeVar("Output")
Computed = tuple[MicroBatch, Output]


@dataclass(frozen=True)
class MicroBatcher:
    """Splits sequences into micro-batches that an engine computes.

    Args:
        engine: Sets the tokens that are worth computing together, and whether micro-batches can be packed.
        token_budget: Most tokens of a micro-batch.
        packs: Pack sequences where the engine can.
        pad_id: Token id of the padding; its outputs are never read.
        vocab_size: Token ids that the model has.
    """

    engine: TrainEngine
    token_budget: int
    packs: bool
    pad_id: int
    vocab_size: int

    def split(self, sequences: Sequences, rows: np.ndarray | None = None) -> list[MicroBatch]:
        """Micro-batches of the given rows of `sequences`, by default of all; an empty list for no rows.

        Raises:
            InvalidRequest: A token id that the model does not have.
            ValueError: A row is longer than the budget, or its prompt is empty.
        """
        for ids in sequences:
            check_token_ids(ids.values, self.vocab_size)
        prompts, responses = sequences
        lengths = prompts.lengths + responses.lengths
        lengths = lengths if rows is None else lengths[rows]
        if not len(lengths):
            return []
        return split(
            prompts,
            responses,
            token_budget=self.engine.token_budget_for(self.token_budget, int(lengths.max())),
            pad_id=self.pad_id,
            rows=rows,
            packed=self.packs and self.engine.packs,
        )


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises InvalidRequest where an id is negative or not below `vocab_size`."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InvalidRequest(f"token ids reach from {ids.min()} to {ids.max()}; the model has {vocab_size}")


def per_token(
    computed: list[Computed[Output]], read: Callable[[Output], Tensor], lengths: np.ndarray
) -> Jagged[Tensor]:
    """Outputs of all micro-batches as one float32 column in the order of the rows; nan on pipeline stages without
    outputs, where `computed` is empty.

    Args:
        read: Returns the grid [B, R] of an output that the column is made from.
        lengths: Response tokens per row, [rows] int64.
    """
    if not computed:
        return Jagged(torch.full((int(lengths.sum()),), torch.nan), lengths)
    values = [micro_batch.collect(read(output).cpu()) for micro_batch, output in computed]
    return assemble([micro_batch.rows for micro_batch, _ in computed], values, lengths)
