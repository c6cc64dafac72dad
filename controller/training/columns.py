"""Columns on the controller: the floats that `compute_advantage` reads, and the lengths of responses."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from client.session import Session
from controller.role_groups.dataflow import FutureBatch
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from rlhf.errors import InvalidRequest


class ColumnReader:
    """Reads columns of the ranks.

    Args:
        fetcher: Reads rows from the ranks' memory.
        session: Session of the run, whose steps count the bytes.
        timeout_s: Longest time of a fetch, in seconds.
    """

    def __init__(self, fetcher: Fetcher, session: Session, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._session = session
        self._timeout_s = timeout_s

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Values of float columns of the ranks, and of columns that the controller holds. Waits for them.

        Raises:
            InvalidRequest: A column of the ranks has another type, such as token ids, which stay on the ranks.
        """
        resolved = batch.result(names)
        for name, column in resolved.columns.items():
            if isinstance(column, RemoteColumn) and not column.dtype.startswith(("float", "bfloat")):
                raise InvalidRequest(
                    f"run.fetch: column {name!r} holds {column.dtype} on the ranks; only float columns come to the "
                    "controller"
                )
        rows = self._fetcher.fetch(resolved, time.monotonic() + self._timeout_s)
        remote = [c.nbytes for c in resolved.columns.values() if not isinstance(c, LocalColumn)]
        values = {name: _owned(rows.values[name]) for name in names}
        rows.verify()
        self._session.step_of(batch.step).count_bytes(sum(remote))
        return values

    def close(self) -> None:
        """Closes the connections to the ranks' memory."""
        self._fetcher.close()


def lengths_of(column: Column) -> np.ndarray:
    """Entries per row [rows] int64 of a jagged column, which a reference has without the values.

    Raises:
        InvalidRequest: The rows have a fixed shape.
    """
    values = column.values if isinstance(column, LocalColumn) else column
    lengths = getattr(values, "lengths", None)
    if lengths is None:
        raise InvalidRequest("the column has rows of a fixed shape, which have no lengths")
    return lengths


def count_tokens(batch: Batch, name: str) -> int:
    """Tokens in a column; 0 where the batch does not have it."""
    return int(lengths_of(batch[name]).sum()) if name in batch.columns else 0


def texts_of(batch: FutureBatch, name: str) -> list[str]:
    """Texts of a column that the controller holds. Waits for them."""
    column = batch.result([name])[name]
    assert isinstance(column, LocalColumn)
    return column.texts


def _owned(values: Any) -> Any:
    """A copy: rows that are read in place are valid until their step is released."""
    if isinstance(values, Jagged):
        return Jagged(values.values.copy(), values.lengths)
    return values.copy() if isinstance(values, np.ndarray) else values
