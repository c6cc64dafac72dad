"""Files of rows that a rank has refused to train on: numbers as safetensors, texts and facts as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.rows import Values
from services.storage.publish import sync

_LENGTHS = ".lengths"
"""Ends the name of the tensor with the lengths of a jagged column."""


@dataclass(frozen=True)
class RejectedRows:
    """Rows that a rank has refused.

    Attributes:
        facts: What was refused and where: service, rank, step, method, policy_version, why, rows (the number of each
            row in the batch of the call), and not_finite (of these, the rows with a number that is not finite).
        columns: Values of each column: a numpy array [rows, ...], a jagged array, or a list of texts.
    """

    facts: Mapping[str, Any]
    columns: Mapping[str, Values]


def write_rejected_rows(
    path: Path, columns: Mapping[str, Values], rows: np.ndarray, numbers: np.ndarray, facts: Mapping[str, Any]
) -> None:
    """Writes rows to `path`, which ends in .json, and their numbers to a file of the same name that ends in
    .safetensors; makes the directory, and replaces files of the same names. Each file appears whole or not at all.

    Args:
        path: Path of the JSON file.
        columns: Values of all rows by column.
        rows: Indices of the rows to write, [n].
        numbers: Number of each of all rows in the batch of the call.
        facts: Further facts, JSON values by name.

    Raises:
        OSError: A file could not be written.
    """
    taken = {name: _take(values, rows) for name, values in columns.items()}
    tensors: dict[str, np.ndarray] = {}
    for name, values in taken.items():
        if isinstance(values, Jagged):
            tensors |= {name: np.ascontiguousarray(values.values), f"{name}{_LENGTHS}": values.lengths}
        elif isinstance(values, np.ndarray):
            tensors[name] = np.ascontiguousarray(values)
    content = {
        **facts,
        "rows": numbers[rows].tolist(),
        "not_finite": numbers[rows][_not_finite(taken.values(), len(rows))].tolist(),
        "texts": {name: values for name, values in taken.items() if isinstance(values, list)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial)
    except SafetensorError as error:
        raise OSError(f"{partial} could not be written: {error}") from error
    _publish(partial, path.with_suffix(".safetensors"))
    partial.write_text(json.dumps(content, indent=1) + "\n")
    _publish(partial, path)


def read_rejected_rows(path: Path) -> RejectedRows:
    """Reads the rows of one rank.

    Args:
        path: Path of the JSON file, with the safetensors file beside it.

    Raises:
        FileNotFoundError: One of the files is missing.
    """
    facts = json.loads(path.read_text())
    tensors = load_file(path.with_suffix(".safetensors"))
    columns: dict[str, Values] = dict(facts.pop("texts"))
    for name, values in tensors.items():
        if name.endswith(_LENGTHS) and name.removesuffix(_LENGTHS) in tensors:
            continue
        lengths = tensors.get(f"{name}{_LENGTHS}")
        columns[name] = values if lengths is None else Jagged(values, lengths)
    return RejectedRows(facts, columns)


def _take(values: Values, rows: np.ndarray) -> Values:
    """Returns the given rows of a column."""
    if isinstance(values, Jagged):
        parts = [values.row(row) for row in rows.tolist()]
        return Jagged(np.concatenate([values.values[:0], *parts]), values.lengths[rows])
    return [values[row] for row in rows.tolist()] if isinstance(values, list) else values[rows]


def _not_finite(columns: Sequence[Values] | Any, count: int) -> np.ndarray:
    """Returns whether each row has a number in a float column that is not finite, [rows] bool."""
    bad = np.zeros(count, bool)
    for values in columns:
        if isinstance(values, list):
            continue
        numbers = values.values if isinstance(values, Jagged) else values
        if not np.issubdtype(numbers.dtype, np.floating):
            continue
        if isinstance(values, Jagged):
            bad |= [not np.isfinite(values.row(row)).all() for row in range(count)]
        else:
            bad |= ~np.isfinite(numbers).reshape(count, math.prod(numbers.shape[1:])).all(axis=1)
    return bad


def _publish(partial: Path, path: Path) -> None:
    sync(partial)
    os.replace(partial, path)
