"""Splits rows into micro-batches of limited numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from services.compute.jagged_rows import first_equal_rows
from services.compute.microbatch import MicroBatch, pack, pad
from services.compute.sequence_parallel import SequenceRanks


def cut(
    lengths: np.ndarray,
    token_budget: int,
    rows: np.ndarray | None = None,
    *,
    padded: bool = True,
    alike: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Assigns rows to micro-batches of at most `token_budget` tokens each. Deterministic.

    Rows are sorted by length, longest first: rows of similar length share a micro-batch, which keeps padding small, and
    a budget too large for the memory fails at the first micro-batch. Without padding, tokens are spread evenly over the
    fewest micro-batches possible, since a small last one would be slow per token.

    Args:
        lengths: tokens per row, prompt and response, [rows] int64.
        token_budget: most tokens of a micro-batch.
        rows: indices of the rows to assign, [n] int64. Default: all.
        padded: whether rows are padded to the longest of their micro-batch, and the padding counts as tokens.
        alike: result of `first_equal_rows` for the prompts of `rows`, if rows with the same prompt should follow each
            other, for packing. Default: none.

    Returns:
        The rows of each micro-batch, longest row first; every row is in exactly one micro-batch.

    Raises:
        ValueError: a row is longer than the budget.
    """
    rows = np.arange(len(lengths)) if rows is None else rows
    order = np.argsort(-lengths[rows], kind="stable")
    if alike is not None:
        # Rows with the same prompt take the place of the longest of them.
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
        # All but the last micro-batch then exceed an equal share, so their number stays the same.
        enough = int(lengths[rows].sum()) // len(parts) + int(lengths[longest])
        parts = _filled(lengths, left, min(enough, token_budget), padded)
    return [part[np.argsort(-lengths[part], kind="stable")] for part in parts]


def _filled(lengths: np.ndarray, rows: np.ndarray, token_budget: int, padded: bool) -> Iterator[np.ndarray]:
    """Yields consecutive runs of `rows`, each with as many rows as the token budget allows. If `padded`, `rows` must
    begin with the longest, and a row counts as many tokens as the first of its run."""
    while len(rows):
        sizes = np.full(len(rows), lengths[rows[0]]) if padded else lengths[rows]
        num_rows = int(np.searchsorted(np.cumsum(sizes), token_budget, side="right"))
        yield rows[:num_rows]
        rows = rows[num_rows:]


def split(
    prompts: Jagged[Tensor],
    responses: Jagged[Tensor],
    *,
    token_budget: int,
    pad_id: int,
    rows: np.ndarray | None = None,
    packed: bool = False,
    mask: Jagged[Tensor] | None = None,
    ranks: SequenceRanks | None = None,
) -> list[MicroBatch]:
    """Splits sequences into micro-batches, on the device of the prompts, as `cut` assigns rows; an empty list if there
    are no rows.

    Args:
        prompts, responses: token ids of all rows of this rank.
        token_budget: most tokens of a micro-batch, padding included.
        pad_id: token id of the padding; not used if packed.
        rows: indices of the rows to take, [n] int64. Default: all.
        packed: whether micro-batches are packed instead of padded.
        mask: whether the policy sampled each response token; see `pad`. Default: all.
        ranks: sequence-parallel group over which the tokens of packed micro-batches are sharded. Default: this rank
            computes all tokens.

    Raises:
        ValueError: a row is longer than the budget, or its prompt is empty.
    """
    assert packed or ranks is None, "padded micro-batches are not sharded"
    lengths = prompts.lengths + responses.lengths
    if not packed:
        return [pad(prompts, responses, part, pad_id, mask) for part in cut(lengths, token_budget, rows)]
    alike = first_equal_rows(prompts, np.arange(prompts.rows) if rows is None else rows)
    parts = cut(lengths, token_budget, rows, padded=False, alike=alike)
    return [pack(prompts, responses, part, mask, ranks) for part in parts]
