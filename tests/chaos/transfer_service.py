"""Services that do nothing but move rows. Without a model, and on one rank without torch, one starts in a second.

Started as `transfer_service.py ROLE --config CONFIG --name NAME`, by torchrun or by itself; ROLE is Maker or Reader.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from nccl_transfer.refs.columns import Jagged
from rlhf.roles import find_role
from services.runtime.main import command
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register


def made(start: int, count: int) -> np.ndarray:
    """The row that a Maker makes of `start` and `count`: consecutive whole numbers, [count] float64."""
    return np.arange(start, start + count, dtype=np.float64)


def numbers(rows: CallRows, name: str) -> np.ndarray:
    """All entries of a column of lists, end to end."""
    column = rows[name]
    assert isinstance(column, Jagged)
    return column.values


class Maker(Worker):
    """Stores long rows: of each row given, `made` of its first prompt id and its first response id."""

    role = "reference"

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        starts, counts = numbers(rows, "prompt_ids"), numbers(rows, "response_ids")
        values = [made(int(start), int(count)) for start, count in zip(starts, counts, strict=True)]
        return CallResult({"ref_log_probs": Jagged(np.concatenate(values), counts)})


class Reader(Worker):
    """Reads every number of its rows and tells their sum."""

    role = "reference"

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult(metrics={"sum": (float(numbers(rows, "response_ids").sum()), rows.count)})


if __name__ == "__main__":
    command(replace(find_role("reference"), worker=f"__main__:{sys.argv.pop(1)}"))()
