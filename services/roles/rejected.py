"""Keeps the rows that a rank refuses to train on in files of the run."""

from __future__ import annotations

import numpy as np

from rlhf.errors import InvalidRequest, UpdateRejected
from services.engines.base import RejectedGradient
from services.roles.columns import in_host_memory
from services.runtime.worker import CallContext, CallRows, Worker
from services.storage.rejected_rows import write_rejected_rows


class RowKeeper:
    """Writes the rows that this rank refuses to the directory that the session has named.

    Args:
        worker: Worker of this rank.

    Attributes:
        directory: `rejected_directory` of the session (BeginSessionRequest); empty: rows are not kept.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.directory = ""

    def rejected(
        self, error: RejectedGradient, rows: CallRows, indices: np.ndarray, call: CallContext
    ) -> UpdateRejected:
        """Keeps the rows of a mini-batch whose gradient is refused; returns the error of the update.

        Args:
            error: Error of the optimizer step.
            rows: Rows of the call.
            indices: Indices of this rank's rows of the mini-batch, [n].
            call: The call.
        """
        version, is_owner = self._worker.policy_version, self._worker.ranks.is_row_owner
        kept = self.keep(rows, indices, call, str(error), writes=is_owner)
        return UpdateRejected(f"{error}; every rank is back on policy version {version}{kept}")

    def keep(
        self, rows: CallRows, indices: np.ndarray, call: CallContext, why: str, *, writes: bool = True
    ) -> str:
        """Keeps rows, and returns a clause for an error message that says where they are, or why they could not be
        kept; empty where the session has named no directory. Raises nothing.

        Args:
            rows: Rows of the call.
            indices: Indices of the rows to keep, [n].
            call: The call.
            why: Why they are refused.
            writes: Whether this rank writes. Of ranks with the same rows, one does; all return the same clause.
        """
        if not self.directory:
            return ""
        worker = self._worker
        try:
            directory = worker.output_path(self.directory) / f"step-{call.call.step}"
            facts = {
                "service": worker.service,
                "rank": worker.ranks.rank,
                "step": call.call.step,
                "call_id": call.call.call_id,
                "policy_version": worker.policy_version,
                "why": why,
            }
            if writes:
                path = directory / f"{worker.service}-rank-{worker.ranks.rank}.json"
                columns = in_host_memory(rows.fetched.values)
                write_rejected_rows(path, columns, indices, rows.numbers, facts)
        except (InvalidRequest, OSError) as error:
            return f"; its rows could not be kept: {error}"
        return f"; its rows are in {directory}"
