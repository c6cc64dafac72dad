"""Readers of the rows of text files: JSONL, JSON with one array, and CSV. Rows stay on the disk; a reader holds the
offset of each, 8 bytes."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import math
import mmap
import os
import re
import shutil
import tempfile
import weakref
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlhf.errors import ConfigError

Row = dict[str, Any]

FORMATS = (".jsonl", ".ndjson", ".json", ".csv", "")
"""Ends of names of text files, beside the end .gz of a gzipped one. Files without an end are JSONL."""
CHUNK_BYTES = 1 << 20
MAX_DEPTH = 32
"""Maximum nesting of lists and objects in a row. A request to a reward holds three nested messages for each level of
an object, and protobuf reads at most 100."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""A string of JSON, or a character that begins, ends or separates values."""
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")


class TextRows(ABC):
    """Reader of the rows of a text file. Rows are read from the disk one by one.

    Args:
        file: The file; a descriptor of its own is kept open.
        source: Config key and path, for messages.

    Raises:
        ConfigError: The file is not of the format.
    """

    fills_nulls = False

    def __init__(self, file: BinaryIO, source: str) -> None:
        self._source = source
        self._starts = self._index(file)
        self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    @abstractmethod
    def _index(self, file: BinaryIO) -> array[int]:
        """Returns the offsets in bytes of the rows, and of the end of the last one."""

    @abstractmethod
    def _parsed(self, text: bytes) -> Row:
        """Returns the row in the bytes from its start to that of the next one. Raises ValueError or RecursionError
        where they are not of the format."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int, /) -> Row:
        start, end = self._starts[row], self._starts[row + 1]
        try:
            return self._parsed(os.pread(self._file, end - start, start))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.where(row)}: not UTF-8: {error.reason} at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.where(row)}: {error}") from None

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))

    def fingerprint(self) -> str:
        """Returns the sha256 (hex) of the file's bytes; of a gzipped file, of the unpacked ones."""
        digest = hashlib.sha256()
        for offset in range(0, self._starts[-1], CHUNK_BYTES):
            digest.update(os.pread(self._file, min(CHUNK_BYTES, self._starts[-1] - offset), offset))
        return digest.hexdigest()

    def where(self, row: int) -> str:
        """Returns the file and the number of a row's first line, from 1, for messages."""
        before, start = 0, self._starts[row]
        for offset in range(0, start, CHUNK_BYTES):
            before += os.pread(self._file, min(CHUNK_BYTES, start - offset), offset).count(b"\n")
        return f"{self._source}:{before + 1}"


class JsonRows(TextRows):
    """Reader of a JSONL file, which has an object on each line."""

    def _index(self, file: BinaryIO) -> array[int]:
        """Returns the offsets of the lines that are not blank, and of the end of the file."""
        starts, offset = array("q"), 0
        # Only \n ends a line: JSON texts may contain other line separators.
        for line in file:
            if not line.isspace():
                starts.append(offset)
            offset += len(line)
        starts.append(offset)
        return starts

    def _parsed(self, text: bytes) -> Row:
        # Lines between two rows are blank, and a file may begin with a byte order mark.
        return _json_of(text.removeprefix(codecs.BOM_UTF8).partition(b"\n")[0])


class JsonArrayRows(TextRows):
    """Reader of a JSON file that is one array of objects."""

    def _index(self, file: BinaryIO) -> array[int]:
        """Returns the offsets of the elements, and of the end of the array."""
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        starts, depth = array("q"), 0
        for token in _TOKEN.finditer(content):
            first, end = content[token.start()], token.end()
            if first in b"[{":
                depth += 1
            elif first in b"]}":
                depth -= 1
            if depth == 0:
                break
            if depth == 1 and (first in b"," or len(starts) == 0):
                following = _NOT_SPACE.search(content, end)
                starts.append(following.start() if following else end)
        else:
            raise ConfigError(f"{self._source}: not JSON: the array has no end")
        if _NOT_SPACE.search(content, end):
            raise ConfigError(f"{self._source}: not JSON: there is more after the end of the array")
        if len(starts) == 1 and starts[0] == end - 1:
            starts.pop()
        starts.append(end)
        return starts

    def _parsed(self, text: bytes) -> Row:
        # The last character is the comma behind the element, or the end of the array.
        return _json_of(text.rstrip()[:-1])


class CsvRows(TextRows):
    """Reader of a CSV file, whose first record has the names of the fields. All values are texts."""

    def _index(self, file: BinaryIO) -> array[int]:
        """Returns the offsets of the records behind the header, without blank lines, and of the end of the file."""
        offset, starts = 0, array("q")

        def counted() -> Iterator[bytes]:
            nonlocal offset
            for line in file:
                # Spreadsheets begin a file with a byte order mark.
                text = line if offset else line.removeprefix(codecs.BOM_UTF8)
                offset += len(line)
                yield text

        records = _CsvRecords(counted())
        try:
            self._names = next((each for each in records if each), [])
            self._check_names()
            start = offset
            for record in records:
                if record:
                    starts.append(start)
                start = offset
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._source}:{records.line}: not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise ConfigError(f"{self._source}:{records.line}: not CSV: {error}") from None
        starts.append(offset)
        return starts

    def _check_names(self) -> None:
        """Raises ConfigError where two fields have the same name, or one has none."""
        wrong = [name for name in self._names if not name or self._names.count(name) > 1]
        if wrong:
            raise ConfigError(f"{self._source}: the first line must name the fields, each once: {wrong[0]!r}")

    def _parsed(self, text: bytes) -> Row:
        values = next(iter(_CsvRecords(io.BytesIO(text))))
        if len(values) != len(self._names):
            found = f"{len(values)} field{'s' * (len(values) != 1)}"
            raise ValueError(
                f"{found}, and the first line names {len(self._names)}: {', '.join(self._names)}"
            )
        return dict(zip(self._names, values, strict=True))


class _CsvRecords:
    """Iterator over the records in lines of CSV. `line` is the number of the line that was read last."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        # A prompt may be longer than the module's own limit of 131,072 characters.
        csv.field_size_limit(1 << 30)
        self._records = csv.reader(self._decoded(lines), strict=True)
        self.line = 0

    def _decoded(self, lines: Iterable[bytes]) -> Iterator[str]:
        for self.line, line in enumerate(lines, 1):
            yield line.decode()

    def __iter__(self) -> Iterator[list[str]]:
        return self._records


def open_text(path: Path, key: str) -> TextRows:
    """Opens a text file and returns a reader of its rows. A gzipped file is unpacked to a temporary file.

    Args:
        path: The file, whose name says its format; a file .json that does not begin with an array is read as JSONL.
        key: Config key that names the path, for messages.

    Raises:
        ConfigError: The file cannot be opened or unpacked, or its format is none of `FORMATS`.
    """
    source, suffix = f"{key}: {path}", _format(path)
    if suffix not in FORMATS and path.is_file():
        known = ", ".join(each for each in FORMATS if each)
        raise ConfigError(
            f"{source}: no reader for files that end with {suffix!r}; there are {known}, each also gzipped (.gz), and "
            ".parquet"
        )
    try:
        with _unpacked(path) as file:
            if suffix == ".csv":
                return CsvRows(file, source)
            is_array = suffix == ".json" and _first_character(file) == b"["
            return (JsonArrayRows if is_array else JsonRows)(file, source)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{source}: {reason}") from None


def _format(path: Path) -> str:
    """Returns the end of a file's name that says its format: that before .gz, where there is one."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def _unpacked(path: Path) -> BinaryIO:
    if path.suffix.lower() != ".gz":
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


def _first_character(file: BinaryIO) -> bytes:
    """Returns the first byte of a file that is not a space; nothing where there is none."""
    found = b""
    for line in file:
        if found := line.removeprefix(codecs.BOM_UTF8).strip()[:1]:
            break
    file.seek(0)
    return found


def _json_of(text: bytes) -> Row:
    """Parses JSON as `parse_row`, with the word JSON in the error."""
    try:
        return parse_row(text)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def parse_row(text: bytes) -> Row:
    """Parses JSON. Returns its object, or an empty one where it is a JSON value of another type.

    Raises:
        ValueError: The text is not JSON or not UTF-8, or has a value that a request to a reward cannot hold.
        RecursionError: It is nested too deeply to be parsed.
    """
    row = json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_integer)
    _check_depth(row)
    if b"\\u" in text:
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
