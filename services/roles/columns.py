"""Converts columns of a call's rows to torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.store.tensors import to_torch
from rlhf.errors import InvalidRequest
from services.runtime.worker import CallRows

Sequences = tuple[Jagged[Tensor], Jagged[Tensor]]
"""(prompts, responses): token ids, int64, as two jagged columns with one prompt and one response per row."""


def jagged_column(rows: CallRows, name: str) -> Jagged[Tensor]:
    """Returns a jagged column of numbers of a call's rows with its values as a tensor, which shares memory with `rows`;
    values in a read-only array, as of a column sent in the request itself, are copied.

    Raises:
        InvalidRequest: The column is missing or not jagged, or its elements are no single numbers.
    """
    column = rows[name]
    if not isinstance(column, Jagged):
        raise InvalidRequest(f"column {name!r} is not jagged")
    if column.values.ndim != 1:
        raise InvalidRequest(
            f"column {name!r} has elements of shape {list(column.values.shape[1:])}; one number is allowed"
        )
    return to_torch(column, rows.fetched.dtypes[name])


def token_column(rows: CallRows, name: str) -> Jagged[Tensor]:
    """Returns a column with one number per response token. A column with one number per row is expanded: each number
    is repeated for every token of the row's response ("response_ids").

    Raises:
        InvalidRequest: The column or "response_ids" is missing, or its rows are neither jagged nor single numbers.
    """
    values, responses = rows[name], rows["response_ids"]
    if not isinstance(values, np.ndarray) or not isinstance(responses, Jagged):
        return jagged_column(rows, name)
    if values.ndim != 1:
        raise InvalidRequest(f"column {name!r} has rows of shape {values.shape[1:]}; one number is allowed")
    each = to_torch(values, rows.fetched.dtypes[name])
    return Jagged(each.repeat_interleave(torch.from_numpy(responses.lengths.copy())), responses.lengths)


def sequence_columns(rows: CallRows) -> Sequences:
    """Returns the columns "prompt_ids" and "response_ids", converted to int64.

    Raises:
        InvalidRequest: A column is missing or not jagged, or its elements are no single numbers.
    """
    prompts, responses = jagged_column(rows, "prompt_ids"), jagged_column(rows, "response_ids")
    return Jagged(prompts.values.long(), prompts.lengths), Jagged(responses.values.long(), responses.lengths)


def jagged_ids(rows: list[list[int]], dtype: torch.dtype = torch.int64) -> Jagged[Tensor]:
    """Converts one list of token ids per row to a jagged column of type `dtype`."""
    lengths = np.asarray([len(row) for row in rows], np.int64)
    return Jagged(torch.tensor([token for row in rows for token in row], dtype=dtype), lengths)
