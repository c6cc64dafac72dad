"""Reads columns on the controller: floats that advantages are computed from, lengths of responses, and texts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from client.session import Session
from controller.role_groups.dataflow import FutureBatch
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch, LocalColumn, lengths_of
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from rlhf.errors import InvalidRequest


class ColumnReader:
    """Fetches columns from the memory of the ranks.

    Args:
        fetcher: Fetches rows from the ranks' memory.
        session: Session of the run; the step of a batch counts the bytes that are fetched of it.
        timeout_s: Timeout of a fetch, in seconds.
    """

    def __init__(self, fetcher: Fetcher, session: Session, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._session = session
        self._timeout_s = timeout_s

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Waits for columns and returns their values by name: float columns of the ranks, and any column that the
        controller holds.

        Args:
            batch: The batch.
            names: Names of the columns.

        Returns:
            An array, a jagged array or a list of texts per column; copies that stay valid after the step.

        Raises:
            InvalidRequest: A column on the ranks is not of a float type, such as token ids, which stay on the ranks.
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


def count_tokens(batch: Batch, name: str) -> int:
    """Returns the number of tokens in column `name`; 0 where the batch does not have it."""
    return int(lengths_of(batch[name]).sum()) if name in batch.columns else 0


def sampled_lengths(batch: FutureBatch) -> np.ndarray:
    """Waits for column response_ids, or rollout_log_probs where an environment has added tokens to responses, and
    returns the number of tokens of each response that the policy sampled [rows] int64."""
    name = "rollout_log_probs" if "response_mask" in batch else "response_ids"
    return lengths_of(batch.result([name])[name])


def texts_of(batch: FutureBatch, name: str) -> list[str]:
    """Waits for a column of texts that the controller holds, and returns one text per row. Raises the error of the call
    that makes the column."""
    column = batch.result([name])[name]
    assert isinstance(column, LocalColumn)
    return column.texts


def _owned(values: Any) -> Any:
    """Returns a copy of fetched values, since rows that are read in place are valid only until their step is
    released."""
    if isinstance(values, Jagged):
        return Jagged(values.values.copy(), values.lengths)
    return values.copy() if isinstance(values, np.ndarray) else values
