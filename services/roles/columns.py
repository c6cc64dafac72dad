"""Converts columns of a call's rows to torch tensors.

A column that the fetch has left on this rank's device (`Worker.on_device`) is a tensor there; any other is an array in
host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.rows import Values
from nccl_transfer.store.device_arrays import DeviceArray
from nccl_transfer.store.tensors import to_numpy_carrier, to_torch
from rlhf.errors import InvalidRequest
from services.compute.copies import copy_together
from services.compute.jagged_rows import counts
from services.runtime.worker import CallRows


class Sequences(NamedTuple):
    """Prompts and responses of rows, in host memory.

    Attributes:
        prompts, responses: Token ids, int64, one prompt and one response per row.
        mask: Whether the policy sampled each response token, bool. None: it sampled all of them.
    """

    prompts: Jagged[Tensor]
    responses: Jagged[Tensor]
    mask: Jagged[Tensor] | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Number of values per row of a column with one value per response token, [rows] int64: of sampled tokens."""
        return self.responses.lengths if self.mask is None else counts(self.mask)


def response_ends(rows: CallRows) -> list[str]:
    """Returns the text that ends the responses of each row, column "response_end"; empty texts without the column.
    Raises InvalidRequest if the column is not text."""
    return rows.texts("response_end") if "response_end" in rows else [""] * rows.count


def jagged_column(rows: CallRows, name: str) -> Jagged[Tensor]:
    """Returns a jagged column of numbers of a call's rows with its values as a tensor where they are, which shares
    memory with `rows`; values in a read-only array, as of a column sent in the request itself, are copied.

    Raises:
        InvalidRequest: The column is missing or not jagged, or its elements are no single numbers.
    """
    column = rows[name]
    if not isinstance(column, Jagged):
        raise InvalidRequest(f"column {name!r} is not jagged")
    if len(column.values.shape) != 1:
        raise InvalidRequest(
            f"column {name!r} has elements of shape {list(column.values.shape[1:])}; one number is allowed"
        )
    return Jagged(_tensor(column.values, rows.fetched.dtypes[name]), column.lengths)


def token_column(rows: CallRows, name: str) -> Jagged[Tensor]:
    """Returns a column with one number per sampled response token. A column with one number per row is expanded: each
    number is repeated for every such token of the row's response ("response_ids", "response_mask").

    Raises:
        InvalidRequest: The column or "response_ids" is missing, or its rows are neither jagged nor single numbers.
    """
    values, responses = rows[name], rows["response_ids"]
    if isinstance(values, Jagged | list) or not isinstance(responses, Jagged):
        return jagged_column(rows, name)
    if len(values.shape) != 1:
        raise InvalidRequest(
            f"column {name!r} has rows of shape {tuple(values.shape[1:])}; one number is allowed"
        )
    mask = response_mask(rows)
    lengths = responses.lengths if mask is None else counts(mask)
    each = _tensor(values, rows.fetched.dtypes[name])
    repeats = torch.from_numpy(lengths.copy()).to(each.device)
    return Jagged(each.repeat_interleave(repeats, output_size=int(lengths.sum())), lengths)


def sequence_columns(rows: CallRows) -> Sequences:
    """Returns the columns "prompt_ids" and "response_ids", converted to int64, and "response_mask" if it is given, in
    host memory, where micro-batches are cut.

    Raises:
        InvalidRequest: A column is missing or not jagged, its elements are no single numbers, or the mask does not have
            one for each response token.
    """
    prompts, responses = jagged_column(rows, "prompt_ids"), jagged_column(rows, "response_ids")
    return Sequences(
        Jagged(prompts.values.to("cpu", torch.int64), prompts.lengths),
        Jagged(responses.values.to("cpu", torch.int64), responses.lengths),
        response_mask(rows),
    )


def response_mask(rows: CallRows) -> Jagged[Tensor] | None:
    """Returns column "response_mask" as bool, in host memory; None if the rows do not have it. Raises InvalidRequest as
    `sequence_columns`."""
    if "response_mask" not in rows:
        return None
    mask, responses = jagged_column(rows, "response_mask"), jagged_column(rows, "response_ids")
    if not np.array_equal(mask.lengths, responses.lengths):
        raise InvalidRequest("column 'response_mask' does not have one value per token of 'response_ids'")
    return Jagged(mask.values.cpu() != 0, mask.lengths)


def on_device(columns: Sequence[Jagged[Tensor]], device: torch.device) -> list[Jagged[Tensor]]:
    """Returns columns with their values on a device, to which those in host memory go in one copy."""
    values = copy_together([column.values for column in columns], device)
    return [Jagged(x, column.lengths) for x, column in zip(values, columns, strict=True)]


def in_host_memory(columns: Mapping[str, Values]) -> dict[str, Values]:
    """Returns columns by name, those on a device as arrays: copies in host memory, in the carriers of their types."""
    return {name: _in_host_memory(values) for name, values in columns.items()}


def _in_host_memory(values: Any) -> Any:
    if isinstance(values, Jagged):
        return Jagged(_in_host_memory(values.values), values.lengths)
    return to_numpy_carrier(values.tensor())[0] if isinstance(values, DeviceArray) else values


def _tensor(values: Any, dtype: str) -> Tensor:
    """Returns an array as a tensor where it is; one in host memory has the element type `dtype`."""
    return values.tensor() if isinstance(values, DeviceArray) else to_torch(values, dtype)


def jagged_ids(rows: list[list[int]], dtype: torch.dtype = torch.int64) -> Jagged[Tensor]:
    """Converts one list of token ids per row to a jagged column of type `dtype`."""
    lengths = np.asarray([len(row) for row in rows], np.int64)
    return Jagged(torch.tensor([token for row in rows for token in row], dtype=dtype), lengths)
