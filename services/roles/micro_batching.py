"""Splits a call's rows into micro-batches for an engine, and joins outputs per token to a column in row order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import TrainEngine
from services.roles.columns import Sequences

Output = TypeVar("Output")
Computed = tuple[MicroBatch, Output]
"""A micro-batch and the output of a head for it."""


@dataclass(frozen=True)
class MicroBatcher:
    """Splits sequences into micro-batches that an engine computes.

    Args:
        engine: Engine that computes the micro-batches; it may lower the token budget, and says whether it can pack.
        token_budget: Most tokens of a micro-batch.
        packs: Whether sequences are packed (concatenated without padding), if the engine supports it.
        pad_id: Token id of the padding. Any valid id will do, since outputs of the padding are never read.
        vocab_size: Number of token ids of the model.
    """

    engine: TrainEngine
    token_budget: int
    packs: bool
    pad_id: int
    vocab_size: int

    def split(self, sequences: Sequences, rows: np.ndarray | None = None) -> list[MicroBatch]:
        """Splits sequences into micro-batches.

        Args:
            sequences: Prompts and responses.
            rows: Indices of the rows to take. Default: all.

        Returns:
            The micro-batches; an empty list for no rows.

        Raises:
            InvalidRequest: The model does not have one of the token ids.
            ValueError: A row is longer than the budget, or its prompt is empty.
        """
        prompts, responses, mask = sequences
        for ids in (prompts, responses):
            check_token_ids(ids.values, self.vocab_size)
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
            mask=mask,
            ranks=self.engine.sequence_ranks,
        )


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises InvalidRequest if a token id is negative or not below `vocab_size`."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InvalidRequest(f"token ids reach from {ids.min()} to {ids.max()}; the model has {vocab_size}")


def per_token(
    computed: list[Computed[Output]], read: Callable[[Output], Tensor], lengths: np.ndarray
) -> Jagged[Tensor]:
    """Joins outputs of micro-batches to one column with a number per response token, in the order of the rows.

    Args:
        computed: Micro-batches, which together have every row once, and outputs of a head; empty on pipeline stages
            that have no outputs.
        read: Extracts from an output the grid [B, R] of the numbers to join.
        lengths: Response tokens per row, [rows] int64.

    Returns:
        The column, on the device of the outputs; in host memory and all nan if `computed` is empty.
    """
    if not computed:
        return Jagged(torch.full((int(lengths.sum()),), torch.nan), lengths)
    values = torch.cat([micro_batch.collect(read(output)) for micro_batch, output in computed])
    tokens = torch.cat([micro_batch.tokens_N for micro_batch, _ in computed])
    return Jagged(torch.empty_like(values).scatter_(0, tokens, values), lengths)
