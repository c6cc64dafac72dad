"""Rows of requests: made up from a seed, or from a JSONL file."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, struct_pb2

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError
from rlhf.v1 import reward_pb2

Row = Mapping[str, Any]

MADE_UP = 64
"""Number of made-up requests, which calls cycle through."""
MOST_FROM_FILE = 1024
"""Maximum number of different requests that are made from a file."""
IDS = ("prompt_ids", "response_ids")
TOKENS = "response_tokens"
TEXTS = ("prompt", "response", "ground_truth", "metadata", TOKENS)
"""Columns of a text row."""
_ALPHABET = string.ascii_letters + string.digits + " "


@dataclass(frozen=True)
class Lengths:
    """Range of lengths, drawn uniformly from `least` to `most` inclusive: tokens for token ids, characters for
    text."""

    least: int
    most: int

    @staticmethod
    def parse(text: str) -> Lengths:
        """Parses a length "16" or a range "8-32".

        Raises:
            ConfigError: The text is neither, or the range begins above its end.
        """
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ConfigError(f"a length is a number or a range such as 8-32, not {text!r}")
        lengths = Lengths(int(low), int(high or low))
        if lengths.least > lengths.most:
            raise ConfigError(f"length {text!r} begins above its end")
        return lengths

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.least, self.most)


@dataclass(frozen=True)
class Shape:
    """Sizes of generated rows.

    Attributes:
        rows: Rows per call.
        prompt, response: Lengths of prompts and of responses.
        vocabulary: Token ids are drawn from 0 to vocabulary - 1.
        seed: Seed of the rows.
    """

    rows: int
    prompt: Lengths
    response: Lengths
    vocabulary: int
    seed: int


def make_batches(columns: Iterable[str], shape: Shape, data: Path | None) -> list[list[dict[str, Any]]]:
    """Makes the rows of the requests that calls cycle through: a list of rows per request. A row has a value for each
    column, by name. If a call has no rows, there is one request, with an empty list.

    Args:
        columns: Names of the columns.
        shape: Number, lengths and seed of the rows.
        data: JSONL file with rows; fields that it lacks are generated. None: all rows are generated.

    Raises:
        ConfigError: The file cannot be read, or has no rows or values of a wrong type.
    """
    generator, columns = random.Random(shape.seed), list(columns)
    given: list[Row] = [{}] * (MADE_UP * shape.rows) if data is None else read_rows(data)
    if data is not None:
        needed = -(-len(given) // shape.rows) if shape.rows else 1
        total = min(max(needed, 1), MOST_FROM_FILE) * shape.rows
        given = [given[number % len(given)] for number in range(total)]
    rows = [{name: _value(name, row, shape, generator) for name in columns} for row in given]
    if not shape.rows:
        return [[]]
    return [rows[start : start + shape.rows] for start in range(0, len(rows), shape.rows)]


def read_rows(path: Path) -> list[Row]:
    """Reads the objects of a JSONL file.

    Raises:
        ConfigError: The file is missing, empty, or a line of it is not an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data: {path}: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--data: {path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"--data: {path}:{number}: not a JSON object")
        rows.append(row)
    if not rows:
        raise ConfigError(f"--data: {path} has no rows")
    return rows


def to_batch(rows: list[dict[str, Any]], columns: Iterable[str]) -> Batch:
    """Makes a batch whose columns are sent by value: token ids as jagged int64, all others as text."""
    values = {name: _column(name, [row[name] for row in rows]) for name in columns}
    return Batch.of(**values) if values else Batch(len(rows), {})


def to_text_rows(rows: list[dict[str, Any]]) -> list[reward_pb2.TextRow]:
    """Converts rows to the TextRow messages that a reward of texts takes. A response counts as one token per character
    where `response_tokens` is None."""
    return [
        reward_pb2.TextRow(
            prompt=row["prompt"],
            response=row["response"],
            ground_truth=row["ground_truth"],
            metadata=json_format.ParseDict(row["metadata"], struct_pb2.Struct()),
            response_tokens=len(row["response"]) if row[TOKENS] is None else row[TOKENS],
        )
        for row in rows
    ]


def _column(name: str, values: list[Any]) -> Jagged[np.ndarray] | list[str]:
    if name not in IDS:
        return values
    lengths = np.asarray([len(row) for row in values], np.int64)
    return Jagged(np.asarray([token for row in values for token in row], np.int64), lengths)


def _value(name: str, row: Row, shape: Shape, generator: random.Random) -> Any:
    if name == "metadata":
        known = ("prompt", "response", "ground_truth", TOKENS, *IDS)
        return {key: value for key, value in row.items() if key not in known}
    if name == "ground_truth" and name in row:
        given = row[name]
        # As a run sends it: lists and objects as JSON.
        if isinstance(given, list | dict):
            return json.dumps(given, ensure_ascii=False)
        return "" if given is None else str(given)
    if name == "text":
        return "".join(_value(part, row, shape, generator) for part in ("prompt", "response"))
    if row.get(name) is not None:
        return _checked(name, row[name])
    if name == TOKENS:
        return None
    length = (shape.prompt if name.startswith("prompt") else shape.response).draw(generator)
    if name in IDS:
        return [generator.randrange(shape.vocabulary) for _ in range(length)]
    return "".join(generator.choices(_ALPHABET, k=length))


def _checked(name: str, value: Any) -> Any:
    if name in IDS:
        expected, fits = "a list of integers", isinstance(value, list) and all(type(t) is int for t in value)
    elif name == TOKENS:
        expected, fits = "a number of tokens", type(value) is int and 0 <= value < 2**32
    else:
        expected, fits = "text", isinstance(value, str)
    if not fits:
        raise ConfigError(f"--data: {name} is not {expected}: {value!r:.80}")
    return value
