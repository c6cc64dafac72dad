"""Cut rows into micro-batches of bounded size, and move per-token values between jagged rows and padded grids.

Two grids are used. `[B, T]` holds sequences, prompt then response, padded on the right; a causal model needs no
attention mask there, because no real token sees what comes after it. `[B, R]` holds one cell per response token,
responses aligned to the left: cell j belongs to the j-th response token, and what a model says about it is read at
the position that predicts it, the one before. So a log-probability is that of the token itself, and a value is
that of the state in which the token was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.columns import Jagged


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B sequences that are computed together.

    Args:
        rows: which rows of the rank these are, [B] int64.
        response_lengths: their response tokens, [B] int64.
        input_ids_BT: prompt and response, padded on the right.
        predicting_BR: position in T whose output predicts the response token; any valid position in the padding.
        response_mask_BR: True on response tokens. R is at least 1, also where all responses are empty.
        num_scored: the last so many positions of T hold all that predict a response token.
    """

    rows: np.ndarray
    response_lengths: np.ndarray
    input_ids_BT: Tensor
    predicting_BR: Tensor
    response_mask_BR: Tensor
    num_scored: int

    def to(self, device: torch.device) -> MicroBatch:
        return replace(
            self,
            input_ids_BT=self.input_ids_BT.to(device),
            predicting_BR=self.predicting_BR.to(device),
            response_mask_BR=self.response_mask_BR.to(device),
        )

    def spread(self, column: Jagged[Tensor]) -> Tensor:
        """The rows of a column with one value per response token as [B, R], 0 in the padding.

        Raises:
            ValueError: a row of the column is not as long as the response.
        """
        differs = np.flatnonzero(column.lengths[self.rows] != self.response_lengths)
        if len(differs):
            row, tokens = self.rows[differs[0]], self.response_lengths[differs[0]]
            raise ValueError(f"row {row} has {column.lengths[row]} values for {tokens} response tokens")
        mask_BR = self.response_mask_BR
        x_BR = torch.zeros(mask_BR.shape, dtype=column.values.dtype, device=mask_BR.device)
        x_BR[mask_BR] = take(column, self.rows).to(mask_BR.device)
        return x_BR

    def collect(self, x_BR: Tensor) -> Tensor:
        """The inverse of `spread`: the values of all response tokens end to end, in the order of `rows`."""
        return x_BR[self.response_mask_BR]


def cut(lengths: np.ndarray, token_budget: int, rows: np.ndarray | None = None) -> list[np.ndarray]:
    """Deal rows out to micro-batches of at most `token_budget` tokens each, padding included.

    Rows of like length go together, longest first, so little padding is computed and a budget that is too large
    for the memory fails at once. The same lengths always give the same cut.

    Args:
        lengths: tokens per row, prompt and response, [rows] int64.
        token_budget: upper bound on rows * longest row of a micro-batch.
        rows: the rows to deal out, default all.

    Returns:
        The rows of each micro-batch; every row is in exactly one.

    Raises:
        ValueError: a row that is longer than the budget.
    """
    rows = np.arange(len(lengths)) if rows is None else rows
    left = rows[np.argsort(-lengths[rows], kind="stable")]
    cuts = []
    while len(left):
        longest = int(lengths[left[0]])
        if longest > token_budget:
            raise ValueError(
                f"row {left[0]} has {longest} tokens, more than the token budget of {token_budget}"
            )
        num_rows = token_budget // max(1, longest)
        cuts.append(left[:num_rows])
        left = left[num_rows:]
    return cuts


def pad(prompts: Jagged[Tensor], responses: Jagged[Tensor], rows: np.ndarray, pad_id: int) -> MicroBatch:
    """Put the sequences of `rows` into one micro-batch, on the device of the prompts.

    Raises:
        ValueError: an empty prompt: nothing would predict the first token of its response.
    """
    if not prompts.lengths[rows].all():
        raise ValueError(f"row {rows[prompts.lengths[rows].argmin()]} has an empty prompt")
    device = prompts.values.device
    prompt_lengths_B1 = torch.from_numpy(prompts.lengths[rows]).to(device)[:, None]
    response_lengths_B1 = torch.from_numpy(responses.lengths[rows]).to(device)[:, None]
    num_positions = int((prompts.lengths[rows] + responses.lengths[rows]).max())
    num_responses = max(1, int(responses.lengths[rows].max()))

    position_T = torch.arange(num_positions, device=device)
    is_prompt_BT = position_T < prompt_lengths_B1
    is_response_BT = ~is_prompt_BT & (position_T < prompt_lengths_B1 + response_lengths_B1)
    input_ids_BT = torch.full(is_prompt_BT.shape, pad_id, dtype=torch.int64, device=device)
    input_ids_BT[is_prompt_BT] = take(prompts, rows)
    input_ids_BT[is_response_BT] = take(responses, rows).to(device)

    token_R = torch.arange(num_responses, device=device)
    return MicroBatch(
        rows=rows,
        response_lengths=responses.lengths[rows],
        input_ids_BT=input_ids_BT,
        predicting_BR=(prompt_lengths_B1 - 1 + token_R).clamp(max=num_positions - 1),
        response_mask_BR=token_R < response_lengths_B1,
        num_scored=num_positions - int(prompts.lengths[rows].min()) + 1,
    )


def split(
    prompts: Jagged[Tensor],
    responses: Jagged[Tensor],
    *,
    token_budget: int,
    pad_id: int,
    rows: np.ndarray | None = None,
) -> list[MicroBatch]:
    """`cut` and `pad` the sequences of `rows` (default all): what an engine computes on, in order.

    Raises:
        ValueError: as `cut` and `pad`.
    """
    parts = cut(prompts.lengths + responses.lengths, token_budget, rows)
    return [pad(prompts, responses, part, pad_id) for part in parts]


def blank() -> MicroBatch:
    """A micro-batch of one token and no response: what a rank computes while others have more to do."""
    return MicroBatch(
        rows=np.empty(0, dtype=np.int64),
        response_lengths=np.zeros(1, dtype=np.int64),
        input_ids_BT=torch.zeros((1, 1), dtype=torch.int64),
        predicting_BR=torch.zeros((1, 1), dtype=torch.int64),
        response_mask_BR=torch.zeros((1, 1), dtype=torch.bool),
        num_scored=1,
    )


def take(column: Jagged[Tensor], rows: np.ndarray) -> Tensor:
    """The values of `rows` end to end, in that order."""
    return column.values[_positions(column.lengths, rows).to(column.values.device)]


def assemble(parts: Sequence[np.ndarray], values: Sequence[Tensor], lengths: np.ndarray) -> Jagged[Tensor]:
    """Put rows computed in parts back into their order: the inverse of `take` over a cut.

    Args:
        parts: rows of each part, at least one part; together all rows, each once.
        values: of each part, the values of its rows end to end.
        lengths: values per row, [rows] int64.
    """
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths))), "each row is in one part"
    whole = torch.empty_like(torch.cat(list(values)))
    for rows, part in zip(parts, values, strict=True):
        whole[_positions(lengths, rows).to(whole.device)] = part
    return Jagged(whole, lengths)


def _positions(lengths: np.ndarray, rows: np.ndarray) -> Tensor:
    """Where the values of `rows` lie in a jagged column, row after row."""
    counts = lengths[rows]
    starts = (np.cumsum(lengths) - lengths)[rows]
    before = np.cumsum(counts) - counts
    return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(counts.sum()))
