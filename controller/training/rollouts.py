"""Rows of a step as files hold them: prompt, response and scores of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from controller.role_groups.dataflow import FutureBatch
from controller.training.columns import sampled_lengths
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged

GIVEN = ("prompt_number", "source", "prompt", "response", "ground_truth")
"""Columns that rows have under the same name, if the batch has them."""
SCORES = {"rewards": "reward", "costs": "cost"}
"""Columns of scores, and the key that each has in a row. Those of the services that a score is composed of, such as
"rewards/SERVICE", have the key with the same end."""


def rollout_rows(batch: FutureBatch) -> list[dict[str, Any]]:
    """Returns the rows of a batch whose responses were generated as JSON values by name: those of `GIVEN`, tokens, the
    number of tokens that the policy sampled, and the scores, those per token summed. Returns no rows where nothing was
    generated, as for algorithms that read the responses of the data. Fetches no column from the ranks."""
    if "rollout_log_probs" not in batch or "response" not in batch:
        return []
    names = [*(name for name in GIVEN if name in batch), *filter(_key, batch.columns)]
    found = batch.result(names).columns
    columns: dict[str, list[Any]] = {}
    for name in names:
        column = found[name]
        if isinstance(column, LocalColumn):
            columns[_key(name) or name] = _numbers_or_texts(column)
    columns["tokens"] = sampled_lengths(batch).tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _key(name: str) -> str:
    """Returns the key of a column of scores; empty for another column."""
    score, slash, service = name.partition("/")
    return SCORES[score] + slash + service if score in SCORES else ""


def _numbers_or_texts(column: LocalColumn) -> list[Any]:
    """Returns one number or text per row; numbers per token are summed."""
    values = column.values
    if isinstance(values, Jagged):
        return [float(values.row(row).sum()) for row in range(values.rows)]
    return np.asarray(values).tolist() if isinstance(values, np.ndarray) else list(values)
