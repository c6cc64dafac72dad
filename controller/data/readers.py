"""Readers of the rows of JSONL files, parquet files and Hugging Face datasets.

Rows stay on the disk and are read one by one. A JSONL reader holds the offsets of the lines, 8 bytes a row; the others
use memory-mapped Arrow. A row is a dictionary of JSON values. The libraries for parquet and datasets are those of the
extra `data`, imported where they are needed.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import math
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rlhf.errors import ConfigError

Row = dict[str, Any]

SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Names of files that mark a directory as a dataset that the library `datasets` has saved."""
SHARDS = ("*.parquet", "*.arrow", "*.jsonl", "*.jsonl.gz", "*.csv")
"""Patterns of files that the library `datasets` can load from a directory."""
BATCH = 1000
"""Number of rows that an iteration over a dataset reads in one batch."""
FINGERPRINTED = 1000
"""Maximum number of rows of a dataset that enter its fingerprint."""
CHUNK_BYTES = 1 << 20
MAX_DEPTH = 32
"""Maximum nesting of lists and objects in a row. A request to a reward holds three nested messages for each level of
an object, and protobuf reads at most 100."""


class RowReader(Protocol):
    """Protocol of readers of a file or dataset with at least one row. Reading a malformed row raises ConfigError."""

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


def open_rows(path: Path, key: str, split: str = "train", subset: str = "") -> RowReader:
    """Opens a file or dataset and returns a reader of its rows.

    Args:
        path: A parquet file; a directory with a dataset; the name of a dataset on the Hugging Face hub, for example
            openai/gsm8k; or any other file, which is read as JSONL, gzipped where its name ends with .gz.
        key: Config key that names the path, for messages.
        split, subset: For a dataset: name of the split, and of the configuration; empty: the default configuration.

    Raises:
        ConfigError: The file or dataset does not exist or has no rows, or a library is missing.
    """
    rows: RowReader
    if (path.is_dir() and is_dataset(path)) or _may_be_on_hub(path):
        rows = DatasetRows(_load_dataset(path, key, split, subset), f"{key}: {path}, split {split}")
    elif path.suffix == ".parquet":
        rows = DatasetRows(_load_parquet(path, key), f"{key}: {path}")
    else:
        rows = JsonRows(path, key)
    if not len(rows):
        raise ConfigError(f"{key}: {path} has no rows")
    return rows


class JsonRows:
    """Reader of the rows of the JSONL file `path`; `key` is the config key that names it, for messages. A gzipped file
    is unpacked to a temporary file.

    Raises:
        ConfigError: The file cannot be opened or unpacked.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._source = f"{key}: {path}"
        try:
            with _unpacked(path) as file:
                self._starts = _line_starts(file)
                self._file = os.dup(file.fileno())
        except (OSError, EOFError, zlib.error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"{self._source}: {reason}") from None
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int, /) -> Row:
        start, end = self._starts[row], self._starts[row + 1]
        # Lines between two rows are blank.
        line = os.pread(self._file, end - start, start).partition(b"\n")[0]
        try:
            return _parse(line)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.where(row)}: not UTF-8: {error.reason} at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.where(row)}: not JSON: {error}") from None

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))

    def fingerprint(self) -> str:
        """Returns the sha256 (hex) of the file's bytes; of a gzipped file, of the unpacked ones."""
        digest = hashlib.sha256()
        for offset in range(0, self._starts[-1], CHUNK_BYTES):
            digest.update(os.pread(self._file, min(CHUNK_BYTES, self._starts[-1] - offset), offset))
        return digest.hexdigest()

    def where(self, row: int) -> str:
        """Returns the file and the number of a row's line, from 1, for messages."""
        before, start = 0, self._starts[row]
        for offset in range(0, start, CHUNK_BYTES):
            before += os.pread(self._file, min(CHUNK_BYTES, start - offset), offset).count(b"\n")
        return f"{self._source}:{before + 1}"


class DatasetRows:
    """Reader of the rows of a `datasets.Dataset`; `source` names it in messages. Values without a JSON type, such as
    dates, become text."""

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
            return _parse(json.dumps(values, default=str, allow_nan=False).encode())
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


def _unpacked(path: Path) -> BinaryIO:
    if path.suffix != ".gz":
        return path.open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the caller
    try:
        with gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, file, CHUNK_BYTES)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file  # type: ignore[return-value]


def _line_starts(file: BinaryIO) -> array[int]:
    """Returns the offsets in bytes of the lines that are not blank, and of the end of the file."""
    starts, offset = array("q"), 0
    # Only \n ends a line: JSON texts may contain other line separators.
    for line in file:
        if not line.isspace():
            starts.append(offset)
        offset += len(line)
    starts.append(offset)
    return starts


def _parse(line: bytes) -> Row:
    """Parses a line of JSON. Returns its object, or an empty one where the line is a JSON value of another type.

    Raises:
        ValueError: The line is not JSON or not UTF-8, or has a value that a request to a reward cannot hold.
    """
    row = json.loads(line.decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_integer)
    _check_depth(row)
    if b"\\u" in line:
        # JSON accepts half a surrogate pair, protobuf does not.
        json.dumps(row, ensure_ascii=False).encode()
    return row if isinstance(row, dict) else {}


def _check_depth(value: Any, depth: int = 0) -> None:
    """Raises ValueError where lists and objects are nested more than `MAX_DEPTH` deep."""
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, depth + 1)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text if len(text) < 20 else f'a number of {len(text)} digits'} is too large")
    return number


def _integer(text: str) -> int:
    _finite(text)
    return int(text)


def _load_parquet(path: Path, key: str) -> Any:
    """Loads a parquet file as a `datasets.Dataset`, which unpacks it into the library's cache."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path}: no such file")
    return _loaded(f"{key}: {path}", lambda datasets: datasets.Dataset.from_parquet(str(path)))


def _load_dataset(path: Path, key: str, split: str, subset: str) -> Any:
    def load(datasets: Any) -> Any:
        if not any((path / name).is_file() for name in SAVED):
            return datasets.load_dataset(str(path), subset or None, split=split)
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, datasets.DatasetDict):
            return saved
        if split not in saved:
            raise ConfigError(f"{key}: {path} has no split {split!r}; it has: {', '.join(saved)}")
        return saved[split]

    return _loaded(f"{key}: dataset {path}", load)


def _loaded(what: str, load: Callable[[Any], Any]) -> Any:
    datasets = required("datasets", what)
    datasets.disable_progress_bars()
    try:
        return load(datasets)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(f"{what} cannot be loaded: {reason}") from error
