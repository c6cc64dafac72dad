"""The staleness of the rows of a step: how many updates of the policy lie between the weights that generated a row and
those that it is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import all_of, then
from controller.role_groups.group import GENERATES
from nccl_transfer.refs.batch import LocalColumn

VERSION = "policy_version"
"""Name of the column [rows] int64 with the policy version that generated the first token of each row."""


def with_version(generated: FutureBatch) -> FutureBatch:
    """Returns generated rows with column `VERSION`, the policy version of their oldest tokens. The rows are those of
    one call, or of several that continued each other's responses. Does not wait."""
    rows = generated.rows
    version = then(
        all_of(generated.calls),
        lambda records: LocalColumn(np.full(rows, records[0].policy_version, np.int64)),
    )
    return FutureBatch(rows, {**generated.columns, VERSION: version}, generated.calls, generated.step)


def staleness_metrics(
    batch: FutureBatch, records: Iterable[CallRecord], policies: Mapping[str, str]
) -> dict[str, float]:
    """Returns the metrics `staleness/mean` and `staleness/max` of the rows of a step, in updates; empty where the rows
    have no versions, or the service that generated them was not updated.

    Args:
        batch: The rows that the step trained on.
        records: Records of the calls of the step.
        policies: Actor whose weights a rollout service generates with, by service.
    """
    if VERSION not in batch or not batch.rows:
        return {}
    generators = {
        policies.get(record.service, record.service) for record in records if record.method == GENERATES
    }
    trained = [
        record.policy_version - 1
        for record in records
        if record.method.startswith("update_") and record.service in generators
    ]
    if not trained:
        return {}
    column = batch.result([VERSION])[VERSION]
    assert isinstance(column, LocalColumn), "the controller makes the column"
    stale = min(trained) - np.asarray(column.values)
    return {"staleness/mean": float(stale.mean()), "staleness/max": float(stale.max())}
