"""Readers of the rows of text files, parquet files and Hugging Face datasets.

Rows stay on the disk and are read one by one. A reader of a text file holds the offsets of the rows, 8 bytes each; the
others use memory-mapped Arrow. A row is a dictionary of JSON values. The libraries for parquet and datasets are those
of the extra `data`, imported where they are needed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from controller.data.text_files import Row, open_text, parse_row
from rlhf.errors import ConfigError

SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Names of files that mark a directory as a dataset that the library `datasets` has saved."""
SHARDS = ("*.parquet", "*.arrow", "*.jsonl", "*.jsonl.gz", "*.csv")
"""Patterns of files that the library `datasets` can load from a directory."""
BATCH = 1000
"""Number of rows that an iteration over a dataset reads in one batch."""
FINGERPRINTED = 1000
"""Maximum number of rows of a dataset that enter its fingerprint."""


class RowReader(Protocol):
    """Protocol of readers of a file or dataset with at least one row. Reading a malformed row raises ConfigError.

    Attributes:
        fills_nulls: Whether an object of a row has all keys that those of other rows have, with null for those that it
            lacks, as in Arrow.
    """

    @property
    def fills_nulls(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        """Yields all rows in order, faster than reading them one by one."""
        ...

    def fingerprint(self) -> str:
        """Returns a sha256 (hex) that identifies the data; of which bytes or rows, the reader says."""
        ...

    def where(self, row: int) -> str:
        """Returns the place of a row, such as file and line, for messages."""
        ...


def open_rows(
    path: Path, key: str, split: str = "train", subset: str = "", *, has_splits: bool = False
) -> RowReader:
    """Opens a file or dataset and returns a reader of its rows.

    Args:
        path: A parquet file; a directory with a dataset; the name of a dataset on the Hugging Face hub, for example
            openai/gsm8k; or a text file; see `open_text`.
        key: Config key that names the path, for messages.
        split, subset: For a dataset: name of the split, and of the configuration; empty: the default configuration.
        has_splits: Whether a file, or a saved dataset without splits, is an error. False: it is taken for the split.

    Raises:
        ConfigError: The file or dataset does not exist or has no rows, or a library is missing.
    """
    rows: RowReader
    if has_splits and path.is_file():
        raise ConfigError(_without_splits(path, key))
    if (path.is_dir() and is_dataset(path)) or _may_be_on_hub(path):
        rows = DatasetRows(
            _load_dataset(path, key, split, subset, has_splits=has_splits), f"{key}: {path}, split {split}"
        )
    elif path.suffix == ".parquet":
        rows = DatasetRows(_load_parquet(path, key), f"{key}: {path}")
    else:
        rows = open_text(path, key)
    if not len(rows):
        raise ConfigError(f"{key}: {path} has no rows")
    return rows


class DatasetRows:
    """Reader of the rows of a `datasets.Dataset`; `source` names it in messages. Values without a JSON type, such as
    dates, become text."""

    fills_nulls = True

    def __init__(self, dataset: Any, source: str) -> None:
        self._dataset = dataset
        self._source = source

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int, /) -> Row:
        return self._plain(self._dataset[row], row)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for batch in self._dataset.iter(BATCH):
            for values in zip(*batch.values(), strict=True):
                yield self._plain(dict(zip(batch, values, strict=True)), number)
                number += 1

    def fingerprint(self) -> str:
        """Returns a sha256 (hex) over the number of rows and at most `FINGERPRINTED` evenly spaced ones."""
        digest, count = hashlib.sha256(str(len(self)).encode()), min(len(self), FINGERPRINTED)
        for number in range(count):
            row = self[number * len(self) // count]
            digest.update(json.dumps(row, sort_keys=True).encode())
        return digest.hexdigest()

    def where(self, row: int) -> str:
        """Returns the dataset and the number of a row, from 1, for messages."""
        return f"{self._source}, row {row + 1}"

    def _plain(self, values: Row, row: int) -> Row:
        try:
            return parse_row(json.dumps(values, default=str, allow_nan=False).encode())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.where(row)}: not JSON: {error}") from None


def is_dataset(directory: Path) -> bool:
    """Whether the library `datasets` can load a directory, judged by the names of its files."""
    if any((directory / name).is_file() for name in SAVED):
        return True
    return any(next(directory.rglob(pattern), None) is not None for pattern in SHARDS)


def required(module: str, what: str) -> Any:
    """Imports a module that the extra `data` installs, and returns it.

    Args:
        module: Name of the module.
        what: What needs it, for the message.

    Raises:
        ConfigError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what}: {error}; install it: pip install 'rlhf-cluster[data]'") from error


def _may_be_on_hub(path: Path) -> bool:
    """Whether a path may be a dataset on the Hugging Face hub: it has the form owner/name, and no such file or
    directory exists."""
    return not path.exists() and not path.is_absolute() and not path.suffix and len(path.parts) == 2


def _load_parquet(path: Path, key: str) -> Any:
    """Loads a parquet file as a `datasets.Dataset`, which unpacks it into the library's cache."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path}: no such file")
    return _loaded(f"{key}: {path}", lambda datasets: datasets.Dataset.from_parquet(str(path)))


def _load_dataset(path: Path, key: str, split: str, subset: str, *, has_splits: bool) -> Any:
    def load(datasets: Any) -> Any:
        if not any((path / name).is_file() for name in SAVED):
            return datasets.load_dataset(str(path), subset or None, split=split)
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, datasets.DatasetDict):
            if has_splits:
                raise ConfigError(_without_splits(path, key))
            return saved
        if split not in saved:
            raise ConfigError(f"{key}: {path} has no split {split!r}; it has: {', '.join(saved)}")
        return saved[split]

    return _loaded(f"{key}: dataset {path}", load)


def _without_splits(path: Path, key: str) -> str:
    return f"{key}: {path} has no splits; give the held-out rows, or heldout_rows, the number of its rows to hold out"


def _loaded(what: str, load: Callable[[Any], Any]) -> Any:
    datasets = required("datasets", what)
    datasets.disable_progress_bars()
    try:
        return load(datasets)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(f"{what} cannot be loaded: {reason}") from error
