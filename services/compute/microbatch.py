"""Micro-batches, padded or packed, and conversion of values per token between jagged columns and padded grids.

Sequences, prompt then response, lie in a grid `[B, T]`. A padded grid has one sequence per row, padded on the right; a
causal model needs no attention mask for it, since no token attends to later ones. A packed grid has one row with all
sequences concatenated, a prompt that several share only once.

Response tokens lie in a grid `[B, R]`, left-aligned. Cell j belongs to response token j, and its output is read at
the position that predicts the token, the one before it. So a log-probability is that of the token itself, and a value
is that of the state in which the token was chosen.

Where a response has tokens that the policy did not sample, which an environment has added, a mask says so. Such tokens
are input of the model and nothing else: the grid and the columns contain the sampled tokens alone, cell j the j-th of
them. So they have no log-probability, no value and no loss, and no gradient comes from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from services.compute.copies import copy_together
from services.compute.jagged_rows import first_equal_rows, positions, take
from services.compute.packing import Packing, Places
from services.compute.sampled_tokens import SampledTokens
from services.compute.sequence_parallel import SequenceRanks


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B sequences that are computed together.

    Args:
        rows: index of each sequence's row among this rank's rows, [B] int64.
        column_lengths: response tokens of every row of this rank, [rows] int64; like all below, of the sampled ones.
        input_ids_BT: token ids of prompts and responses, padded on the right. If packed, [1, T], without the last
            token of each response.
        response_ids_N: token ids of all responses, concatenated in the order of `rows`.
        predicting_BR: flat index of the model output that predicts each response token; any valid index in the
            padding.
        response_mask_BR: True on response tokens. R is at least 1, even if all responses are empty.
        cells_N: flat index in [B, R] of each response token, in the order of `response_ids_N`.
        tokens_N: index of each response token in a column with one value for each response token of every row of this
            rank, in the same order.
        num_scored: number of last columns of the model output that contain all outputs that predict response tokens.
        packing: layout of the packed sequences; None for a padded micro-batch.
        read_N: sorted positions of the packed row that predict a response token. The last layer computes outputs for
            these alone. None for a padded micro-batch, for which it computes all.
        part: shard of this rank, if the tokens of a packed micro-batch are sharded over a sequence-parallel group: a
            micro-batch of this rank's tokens and of the response tokens that they predict, with grids of the same
            shape. `part.packing` then has the layout of the row. None if this rank computes all tokens.
    """

    rows: np.ndarray
    column_lengths: np.ndarray
    input_ids_BT: Tensor
    response_ids_N: Tensor
    predicting_BR: Tensor
    response_mask_BR: Tensor
    cells_N: Tensor
    tokens_N: Tensor
    num_scored: int
    packing: Packing | None = None
    read_N: Tensor | None = None
    part: MicroBatch | None = None

    @property
    def is_dummy(self) -> bool:
        """Whether the micro-batch has no rows. A rank computes such dummies to take part in the collectives of ranks
        with more micro-batches."""
        return not len(self.rows)

    def to(self, device: torch.device) -> MicroBatch:
        """Returns the micro-batch with its tensors on a device, as `to_device`."""
        return to_device([self], device)[0]

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the micro-batch."""
        own = [getattr(self, name) for name in _TENSORS]
        optional = [] if self.read_N is None else [self.read_N]
        inner = [each for each in (self.packing, self.part) if each is not None]
        return [*own, *optional, *(x for each in inner for x in each.tensors())]

    def with_tensors(self, tensors: Iterator[Tensor]) -> MicroBatch:
        """Returns the micro-batch with the next of the given tensors in place of its own, in the order of
        `tensors`."""
        own = {name: next(tensors) for name in _TENSORS}
        read_N = None if self.read_N is None else next(tensors)
        packing = self.packing.with_tensors(tensors) if self.packing else None
        part = self.part.with_tensors(tensors) if self.part else None
        return replace(self, **own, read_N=read_N, packing=packing, part=part)

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of the model besides the token ids; none for a padded micro-batch."""
        return {**self.packing.arguments(), "read_N": self.read_N} if self.packing else {}

    def read(self, output_BK: Tensor, which: Tensor) -> Tensor:
        """Selects model outputs by flat index.

        Args:
            output_BK: model outputs [B, K, ...] of the last K columns.
            which: flat indices as in `predicting_BR`, of any shape.

        Returns:
            The outputs at these indices, in the shape of `which` and further dimensions of the output.
        """
        num_columns = self.input_ids_BT.shape[1] if self.read_N is None else len(self.read_N)
        skipped = num_columns - output_BK.shape[1]
        return output_BK[which // num_columns, which % num_columns - skipped]

    def spread(self, column: Jagged[Tensor]) -> Tensor:
        """Returns the values of this micro-batch's rows as a grid [B, R], 0 in the padding.

        Args:
            column: column of all rows of this rank, with one value per response token, on the micro-batch's device.

        Raises:
            ValueError: a row of the column has not as many values as its response has tokens.
        """
        differs = np.flatnonzero(column.lengths != self.column_lengths)
        if len(differs):
            row = differs[0]
            raise ValueError(
                f"row {row} has {column.lengths[row]} values for {self.column_lengths[row]} response tokens"
            )
        return self.grid(column.values.index_select(0, self.tokens_N))

    def grid(self, x_N: Tensor) -> Tensor:
        """Returns one value per response token, in the order of `response_ids_N`, as a grid [B, R], 0 in the padding.
        Unlike with a mask, neither this nor its gradient makes the host wait for a GPU."""
        grid_BR, num_columns = x_N.new_zeros(self.response_mask_BR.shape), self.response_mask_BR.shape[1]
        return grid_BR.index_put((self.cells_N // num_columns, self.cells_N % num_columns), x_N)

    def collect(self, x_BR: Tensor) -> Tensor:
        """Returns the values of a grid [B, R] at all response tokens, concatenated in the order of `rows`; the
        inverse of `spread`."""
        return x_BR.flatten().index_select(0, self.cells_N)


_TENSORS = ("input_ids_BT", "response_ids_N", "predicting_BR", "response_mask_BR", "cells_N", "tokens_N")
"""Names of the tensors that every micro-batch has."""


def to_device(micro_batches: Sequence[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """Returns micro-batches with their tensors on a device, to which those in host memory go in one copy."""
    copied = iter(copy_together([x for each in micro_batches for x in each.tensors()], device))
    return [each.with_tensors(copied) for each in micro_batches]


def dummy_micro_batch() -> MicroBatch:
    """Returns a micro-batch of one token without a response, on the CPU, whose `rows` are empty, for a rank that has
    fewer micro-batches than others."""
    return MicroBatch(
        rows=np.empty(0, dtype=np.int64),
        column_lengths=np.empty(0, dtype=np.int64),
        input_ids_BT=torch.zeros((1, 1), dtype=torch.int64),
        response_ids_N=torch.zeros(0, dtype=torch.int64),
        predicting_BR=torch.zeros((1, 1), dtype=torch.int64),
        response_mask_BR=torch.zeros((1, 1), dtype=torch.bool),
        cells_N=torch.zeros(0, dtype=torch.int64),
        tokens_N=torch.zeros(0, dtype=torch.int64),
        num_scored=1,
    )


def pad(
    prompts: Jagged[Tensor],
    responses: Jagged[Tensor],
    rows: np.ndarray,
    pad_id: int,
    mask: Jagged[Tensor] | None = None,
) -> MicroBatch:
    """Builds a padded micro-batch, on the device of the prompts.

    Args:
        prompts, responses: token ids of all rows of this rank.
        rows: indices of the rows to take, [B] int64.
        pad_id: token id of the padding.
        mask: whether the policy sampled each response token, bool, in host memory. Default: all.

    Raises:
        ValueError: a prompt is empty, so nothing predicts the first token of its response.
    """
    _check_prompts(prompts, rows)
    device = prompts.values.device
    prompt_lengths_B1 = torch.from_numpy(prompts.lengths[rows]).to(device)[:, None]
    response_lengths_B1 = torch.from_numpy(responses.lengths[rows]).to(device)[:, None]
    num_positions = int((prompts.lengths[rows] + responses.lengths[rows]).max())
    sampled = SampledTokens.of(responses, rows, mask)

    position_T = torch.arange(num_positions, device=device)
    is_prompt_BT = position_T < prompt_lengths_B1
    is_response_BT = ~is_prompt_BT & (position_T < prompt_lengths_B1 + response_lengths_B1)
    input_ids_BT = torch.full(is_prompt_BT.shape, pad_id, dtype=torch.int64, device=device)
    input_ids_BT[is_prompt_BT] = take(prompts, rows)
    response_ids_N = take(responses, rows).to(device)
    input_ids_BT[is_response_BT] = response_ids_N

    token_BR = torch.from_numpy(sampled.tokens_BR).to(device)
    predicting_BR = (prompt_lengths_B1 - 1 + token_BR).clamp(max=num_positions - 1)
    return MicroBatch(
        rows=rows,
        column_lengths=sampled.column_lengths,
        input_ids_BT=input_ids_BT,
        response_ids_N=sampled.among(response_ids_N),
        predicting_BR=predicting_BR + num_positions * torch.arange(len(rows), device=device)[:, None],
        response_mask_BR=torch.from_numpy(sampled.mask_BR).to(device),
        cells_N=sampled.cells_N.to(device),
        tokens_N=positions(sampled.column_lengths, rows).to(device),
        num_scored=num_positions - int(prompts.lengths[rows].min()) + 1,
    )


def pack(
    prompts: Jagged[Tensor],
    responses: Jagged[Tensor],
    rows: np.ndarray,
    mask: Jagged[Tensor] | None = None,
    ranks: SequenceRanks | None = None,
) -> MicroBatch:
    """Builds a packed micro-batch, on the device of the prompts. It contains each distinct prompt once, and all
    tokens of each response but the last, which predicts nothing.

    Args:
        prompts, responses: token ids of all rows of this rank.
        rows: indices of the rows to take, [B] int64.
        mask: whether the policy sampled each response token, bool, in host memory. Default: all.
        ranks: sequence-parallel group over which the tokens are sharded. Default: this rank computes all tokens.

    Raises:
        ValueError: a prompt is empty.
    """
    _check_prompts(prompts, rows)
    device = prompts.values.device
    prompt_lengths, response_lengths = prompts.lengths[rows], responses.lengths[rows]
    read_lengths = np.maximum(response_lengths - 1, 0)
    owners = first_equal_rows(prompts, rows)
    places = Places.of(prompt_lengths + read_lengths, owners, prompt_lengths)
    packing = Packing.of(places)
    packing = packing.with_tensors(iter(copy_together(packing.tensors(), device)))
    is_owner = owners == np.arange(len(rows))
    parts = np.stack((np.where(is_owner, prompt_lengths, 0), read_lengths), axis=1)
    is_prompt_T = torch.from_numpy(np.repeat(np.tile([True, False], len(rows)), parts.flatten())).to(device)
    response_ids_N = take(responses, rows).to(device)
    is_read_N = np.ones(len(response_ids_N), dtype=bool)
    is_read_N[np.cumsum(response_lengths)[response_lengths > 0] - 1] = False
    input_ids_T = torch.empty(is_prompt_T.shape, dtype=torch.int64, device=device)
    input_ids_T[is_prompt_T] = take(prompts, rows[is_owner])
    input_ids_T[~is_prompt_T] = response_ids_N[torch.from_numpy(is_read_N).to(device)]

    sampled = SampledTokens.of(responses, rows, mask)
    mask_BR = sampled.mask_BR
    predicting_BR = places.cells(
        np.arange(len(rows))[:, None], prompt_lengths[:, None] - 1 + sampled.tokens_BR
    )
    # At least one position, even if unread: some kernels fail on empty matrices.
    read_N = np.unique(predicting_BR[mask_BR]) if mask_BR.any() else np.zeros(1, dtype=np.int64)
    output_BR = np.searchsorted(read_N, predicting_BR).clip(max=len(read_N) - 1)
    packed = MicroBatch(
        rows=rows,
        column_lengths=sampled.column_lengths,
        input_ids_BT=input_ids_T[None],
        response_ids_N=sampled.among(response_ids_N),
        predicting_BR=torch.from_numpy(output_BR).to(device),
        response_mask_BR=torch.from_numpy(mask_BR).to(device),
        cells_N=sampled.cells_N.to(device),
        tokens_N=positions(sampled.column_lengths, rows).to(device),
        num_scored=len(read_N),
        packing=packing,
        read_N=torch.from_numpy(read_N).to(device),
    )
    return packed if ranks is None else _shared(packed, predicting_BR, mask_BR, ranks)


def _shared(
    packed: MicroBatch, predicting_BR: np.ndarray, mask_BR: np.ndarray, ranks: SequenceRanks
) -> MicroBatch:
    """Returns a packed micro-batch with the shard of this rank.

    Args:
        packed: micro-batch that one rank would compute.
        predicting_BR: position in the row that predicts each response token.
        mask_BR: True on response tokens.
        ranks: sequence-parallel group over which the tokens are sharded.
    """
    assert packed.packing is not None, "the micro-batch is packed"
    device = packed.input_ids_BT.device
    own_BR, places_BR = mask_BR & ranks.owns(predicting_BR), ranks.places(predicting_BR)
    read_N = np.unique(places_BR[own_BR]) if own_BR.any() else np.zeros(1, dtype=np.int64)
    output_BR = np.searchsorted(read_N, places_BR).clip(max=len(read_N) - 1)
    own_N = torch.from_numpy(np.flatnonzero(own_BR[mask_BR])).to(device)
    part = MicroBatch(
        rows=packed.rows,
        column_lengths=packed.column_lengths,
        input_ids_BT=ranks.own(packed.input_ids_BT[0])[None],
        response_ids_N=packed.response_ids_N[own_N],
        predicting_BR=torch.from_numpy(output_BR).to(device),
        response_mask_BR=torch.from_numpy(own_BR).to(device),
        cells_N=packed.cells_N[own_N],
        tokens_N=packed.tokens_N[own_N],
        num_scored=len(read_N),
        packing=packed.packing.shared(ranks),
        read_N=torch.from_numpy(read_N).to(device),
    )
    return replace(packed, packing=None, part=part)


def _check_prompts(prompts: Jagged[Tensor], rows: np.ndarray) -> None:
    """Raises ValueError if one of the given rows has an empty prompt."""
    if not prompts.lengths[rows].all():
        raise ValueError(f"row {rows[prompts.lengths[rows].argmin()]} has an empty prompt")
