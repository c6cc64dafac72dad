"""Cut rows into micro-batches of bounded size, and move per-token values between jagged rows and padded grids.

Two grids are used. `[B, T]` holds sequences, prompt then response: padded on the right, where a causal model needs no
attention mask because no real token sees what comes after it; or packed, all end to end in one row, a prompt that
several have only once. `[B, R]` holds one cell per response token, responses aligned to the left: cell j belongs to the
j-th response token, and what a model says about it is read at the position that predicts it, the one before. So a
log-probability is that of the token itself, and a value is that of the state in which the token was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from services.compute.packing import Packing, Places


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B sequences that are computed together.

    Args:
        rows: which rows of the rank these are, [B] int64.
        response_lengths: their response tokens, [B] int64.
        input_ids_BT: prompt and response, padded on the right; or of all sequences end to end, [1, T], without the
            last token of each response.
        response_ids_N: the response tokens end to end.
        predicting_BR: cell of the output, counted row after row, that predicts the response token; any cell in the
            padding.
        response_mask_BR: True on response tokens. R is at least 1, also where all responses are empty.
        num_scored: the last so many columns of the output hold all that predict a response token.
        packing: how sequences lie end to end; None where each has a row.
        read_N: of packed sequences, the tokens of the row that the output has, in order: all those from which a
            response token is predicted. None where it has all of `input_ids_BT`.
    """

    rows: np.ndarray
    response_lengths: np.ndarray
    input_ids_BT: Tensor
    response_ids_N: Tensor
    predicting_BR: Tensor
    response_mask_BR: Tensor
    num_scored: int
    packing: Packing | None = None
    read_N: Tensor | None = None

    @property
    def is_dummy(self) -> bool:
        """Whether it has no rows, and is there for others that have."""
        return not len(self.rows)

    def to(self, device: torch.device) -> MicroBatch:
        return replace(
            self,
            input_ids_BT=self.input_ids_BT.to(device),
            response_ids_N=self.response_ids_N.to(device),
            predicting_BR=self.predicting_BR.to(device),
            response_mask_BR=self.response_mask_BR.to(device),
            packing=self.packing.to(device) if self.packing else None,
            read_N=self.read_N.to(device) if self.read_N is not None else None,
        )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model beside `input_ids_BT`."""
        return {**self.packing.arguments(), "read_N": self.read_N} if self.packing else {}

    def read(self, output_BK: Tensor, which: Tensor) -> Tensor:
        """Gathers model outputs, or their last columns, at the flat token indices `which`, as in
        `predicting_BR`."""
        num_columns = self.input_ids_BT.shape[1] if self.read_N is None else len(self.read_N)
        skipped = num_columns - output_BK.shape[1]
        return output_BK[which // num_columns, which % num_columns - skipped]

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


def cut(
    lengths: np.ndarray,
    token_budget: int,
    rows: np.ndarray | None = None,
    *,
    padded: bool = True,
    alike: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Deal rows out to micro-batches of at most `token_budget` tokens each.

    Rows of like length go together, longest first, so little padding is computed and a budget that is too large
    for the memory fails at once. Where padding does not count, as few micro-batches as that makes are filled alike: a
    small one at the end would be slow for what it holds. The same arguments always give the same cut.

    Args:
        lengths: tokens per row, prompt and response, [rows] int64.
        token_budget: upper bound on the tokens of a micro-batch.
        rows: the rows to deal out, default all.
        padded: whether padding counts, so that a micro-batch has rows * longest row tokens.
        alike: where padding does not count, `first_with_same_prompt` of the rows: those that begin alike go together.

    Returns:
        The rows of each micro-batch, longest first; every row is in exactly one.

    Raises:
        ValueError: a row that is longer than the budget.
    """
    rows = np.arange(len(lengths)) if rows is None else rows
    order = np.argsort(-lengths[rows], kind="stable")
    if alike is not None:
        # The longest of its kin says when a row's turn is.
        first = np.full(len(rows), len(rows))
        np.minimum.at(first, alike[order], np.arange(len(rows)))
        order = order[np.argsort(first[alike[order]], kind="stable")]
    left = rows[order]
    longest = rows[lengths[rows].argmax()] if len(rows) else None
    if longest is not None and lengths[longest] > token_budget:
        raise ValueError(
            f"row {longest} has {lengths[longest]} tokens, more than the token budget of {token_budget}"
        )
    parts = list(_filled(lengths, left, token_budget, padded))
    if parts and not padded:
        # Filled as far as that, all but the last hold more than an equal share: so there are no more of them.
        enough = int(lengths[rows].sum()) // len(parts) + int(lengths[longest])
        parts = _filled(lengths, left, min(enough, token_budget), padded)
    return [part[np.argsort(-lengths[part], kind="stable")] for part in parts]


def _filled(lengths: np.ndarray, rows: np.ndarray, token_budget: int, padded: bool) -> Iterator[np.ndarray]:
    """The rows in order, cut where the budget is spent."""
    while len(rows):
        sizes = np.full(len(rows), lengths[rows[0]]) if padded else lengths[rows]
        num_rows = int(np.searchsorted(np.cumsum(sizes), token_budget, side="right"))
        yield rows[:num_rows]
        rows = rows[num_rows:]


def first_with_same_prompt(prompts: Jagged[Tensor], rows: np.ndarray) -> np.ndarray:
    """For each of `rows` the first of them that has the same prompt: their places in `rows`, [len(rows)] int64."""
    firsts: dict[bytes, int] = {}
    starts = np.cumsum(prompts.lengths) - prompts.lengths
    ids = prompts.values.cpu().numpy()
    texts = (ids[starts[row] : starts[row] + prompts.lengths[row]].tobytes() for row in rows)
    return np.array([firsts.setdefault(text, place) for place, text in enumerate(texts)], dtype=np.int64)


def pad(prompts: Jagged[Tensor], responses: Jagged[Tensor], rows: np.ndarray, pad_id: int) -> MicroBatch:
    """Put the sequences of `rows` into one micro-batch, on the device of the prompts.

    Raises:
        ValueError: an empty prompt: nothing would predict the first token of its response.
    """
    _check_prompts(prompts, rows)
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
    response_ids_N = take(responses, rows).to(device)
    input_ids_BT[is_response_BT] = response_ids_N

    token_R = torch.arange(num_responses, device=device)
    predicting_BR = (prompt_lengths_B1 - 1 + token_R).clamp(max=num_positions - 1)
    return MicroBatch(
        rows=rows,
        response_lengths=responses.lengths[rows],
        input_ids_BT=input_ids_BT,
        response_ids_N=response_ids_N,
        predicting_BR=predicting_BR + num_positions * torch.arange(len(rows), device=device)[:, None],
        response_mask_BR=token_R < response_lengths_B1,
        num_scored=num_positions - int(prompts.lengths[rows].min()) + 1,
    )


def pack(prompts: Jagged[Tensor], responses: Jagged[Tensor], rows: np.ndarray) -> MicroBatch:
    """Put the sequences of `rows` into one micro-batch without padding, on the device of the prompts: each different
    prompt once, and of responses all but the last token, from which nothing is predicted.

    Raises:
        ValueError: as `pad`.
    """
    _check_prompts(prompts, rows)
    device = prompts.values.device
    prompt_lengths, response_lengths = prompts.lengths[rows], responses.lengths[rows]
    read_lengths = np.maximum(response_lengths - 1, 0)
    owners = first_with_same_prompt(prompts, rows)
    places = Places.of(prompt_lengths + read_lengths, owners, prompt_lengths)
    packing = Packing.of(places).to(device)
    is_owner = owners == np.arange(len(rows))
    parts = np.stack((np.where(is_owner, prompt_lengths, 0), read_lengths), axis=1)
    is_prompt_T = torch.from_numpy(np.repeat(np.tile([True, False], len(rows)), parts.flatten())).to(device)
    response_ids_N = take(responses, rows).to(device)
    is_read_N = np.ones(len(response_ids_N), dtype=bool)
    is_read_N[np.cumsum(response_lengths)[response_lengths > 0] - 1] = False
    input_ids_T = torch.empty(is_prompt_T.shape, dtype=torch.int64, device=device)
    input_ids_T[is_prompt_T] = take(prompts, rows[is_owner])
    input_ids_T[~is_prompt_T] = response_ids_N[torch.from_numpy(is_read_N).to(device)]

    token_R = np.arange(max(1, int(response_lengths.max())))
    predicting_BR = places.cells(np.arange(len(rows))[:, None], prompt_lengths[:, None] - 1 + token_R)
    mask_BR = token_R < response_lengths[:, None]
    # At least one, from which nothing is read: products of nothing are not.
    read_N = np.unique(predicting_BR[mask_BR]) if mask_BR.any() else np.zeros(1, dtype=np.int64)
    output_BR = np.searchsorted(read_N, predicting_BR).clip(max=len(read_N) - 1)
    return MicroBatch(
        rows=rows,
        response_lengths=response_lengths,
        input_ids_BT=input_ids_T[None],
        response_ids_N=response_ids_N,
        predicting_BR=torch.from_numpy(output_BR).to(device),
        response_mask_BR=torch.from_numpy(mask_BR).to(device),
        num_scored=len(read_N),
        packing=packing,
        read_N=torch.from_numpy(read_N).to(device),
    )


def split(
    prompts: Jagged[Tensor],
    responses: Jagged[Tensor],
    *,
    token_budget: int,
    pad_id: int,
    rows: np.ndarray | None = None,
    packed: bool = False,
) -> list[MicroBatch]:
    """`cut` and `pad`, or `pack`, the sequences of `rows` (default all): what an engine computes on, in order.

    Raises:
        ValueError: as these.
    """
    lengths = prompts.lengths + responses.lengths
    if not packed:
        return [pad(prompts, responses, part, pad_id) for part in cut(lengths, token_budget, rows)]
    alike = first_with_same_prompt(prompts, np.arange(prompts.rows) if rows is None else rows)
    parts = cut(lengths, token_budget, rows, padded=False, alike=alike)
    return [pack(prompts, responses, part) for part in parts]


def dummy_micro_batch() -> MicroBatch:
    """A micro-batch of one token and no response: what a rank computes while others have more to do."""
    return MicroBatch(
        rows=np.empty(0, dtype=np.int64),
        response_lengths=np.zeros(1, dtype=np.int64),
        input_ids_BT=torch.zeros((1, 1), dtype=torch.int64),
        response_ids_N=torch.zeros(0, dtype=torch.int64),
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


def _check_prompts(prompts: Jagged[Tensor], rows: np.ndarray) -> None:
    if not prompts.lengths[rows].all():
        raise ValueError(f"row {rows[prompts.lengths[rows].argmin()]} has an empty prompt")


def _positions(lengths: np.ndarray, rows: np.ndarray) -> Tensor:
    """Where the values of `rows` lie in a jagged column, row after row."""
    counts = lengths[rows]
    starts = (np.cumsum(lengths) - lengths)[rows]
    before = np.cumsum(counts) - counts
    return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(counts.sum()))
