"""Rows from where people keep them: JSONL, parquet, and datasets of Hugging Face, each by path.

A row is a dictionary of plain values, as JSON has them. The libraries for parquet and datasets come with the extra
`data` and are imported where they are needed.
"""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

Row = dict[str, Any]
Placed = tuple[Row, str]
"""A row, and where it stands, for messages."""

SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files that mark a directory that `datasets` has saved or prepared."""
SHARDS = ("*.parquet", "*.arrow", "*.jsonl", "*.jsonl.gz", "*.csv")
"""What a directory with the files of a dataset has in it."""


def read_rows(path: Path, key: str, split: str = "train", subset: str = "") -> list[Placed]:
    """All rows of a file or a dataset.

    Args:
        path: A parquet file; any other file is JSONL, gzipped where it ends with .gz; a directory with a dataset; or
            the name of one on the Hugging Face hub, such as openai/gsm8k.
        key: Config key that names it, for messages.
        split, subset: Of a dataset.

    Raises:
        ConfigError: There is no such file or dataset, it has no rows, a row cannot be read, or a library is missing.
    """
    if (path.is_dir() and is_dataset(path)) or _may_be_on_hub(path):
        found = _dataset_rows(path, key, split, subset)
    elif path.suffix == ".parquet":
        found = _parquet_rows(path, key)
    else:
        found = _json_rows(path, key)
    rows = list(found)
    if not rows:
        raise ConfigError(f"{key}: {path} has no rows")
    return rows


def is_dataset(directory: Path) -> bool:
    """Whether `datasets` can make something of a directory."""
    if any((directory / name).is_file() for name in SAVED):
        return True
    return any(next(directory.rglob(pattern), None) is not None for pattern in SHARDS)


def required(module: str, what: str) -> Any:
    """A module of the extra `data`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what}: {error}; install it: pip install 'rlhf-cluster[data]'") from error


def _may_be_on_hub(path: Path) -> bool:
    """owner/name, and no file or directory here."""
    return not path.exists() and not path.is_absolute() and not path.suffix and len(path.parts) == 2


def _json_rows(path: Path, key: str) -> Iterator[Placed]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # Only \n ends a line: text in JSON may have other line separators in it.
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path}: not UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{key}: {path}: {reason}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{key}: {path}:{number}"
            yield _parse(line, where), where


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
        # Half a surrogate pair and NaN pass for JSON here, but not on the wire.
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    return row if isinstance(row, dict) else {}


def _parquet_rows(path: Path, key: str) -> Iterator[Placed]:
    parquet = required("pyarrow.parquet", key)
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{key}: {path}: {reason}") from None
    return _plain(rows, f"{key}: {path}")


def _dataset_rows(path: Path, key: str, split: str, subset: str) -> Iterator[Placed]:
    datasets = required("datasets", key)
    try:
        if any((path / name).is_file() for name in SAVED):
            loaded = datasets.load_from_disk(str(path))
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(str(path), subset or None, split=split)
    except KeyError:
        raise ConfigError(f"{key}: {path} has no split {split!r}; it has: {', '.join(loaded)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{key}: dataset {path} cannot be loaded: {reason}") from error
    return _plain(loaded, f"{key}: {path}, split {split}")


def _plain(rows: Iterable[Row], source: str) -> Iterator[Placed]:
    """The rows as JSON would have them: dates and the like become text."""
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        yield _parse(json.dumps(row, default=str), where), where
