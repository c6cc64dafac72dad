"""The rows of a run: prompts with what belongs to them, from one file or several sources, read when they are drawn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from controller.config.config import Config
from controller.config.data import SourceTable
from controller.data.chat import Chat
from controller.data.loader import shuffled
from controller.data.readers import Row, RowReader, open_rows
from controller.role_groups.dataflow import FutureBatch
from rlhf.errors import ConfigError

Render = Callable[[Any], str]
"""From a conversation, a list of messages, to text."""

NUM_RENDERED = 1000
"""Rows whose conversations are rendered before a run starts; the others are when they are drawn."""


@dataclass(frozen=True)
class Prompt:
    """One row.

    Attributes:
        text: The prompt.
        ground_truth: The right answer; empty where there is none.
        metadata: Further fields, as JSON.
        texts: By name, the columns beside the prompt that an algorithm learns from.
        source: Name of its source, where there are several; else empty.
    """

    text: str
    ground_truth: str
    metadata: str
    texts: Mapping[str, str]
    source: str = ""


class PromptSource:
    """The rows of one file or dataset as prompts.

    Args:
        rows: Where they are read from.
        render: For prompts that are lists of messages.
        name: What column `source` says; empty: no such column.
        columns: Texts that each row has to have beside its prompt.
        renamed: What fields are called in the rows, by our name.
        chat: Whether a prompt that is a text is what a user says.
    """

    def __init__(
        self,
        rows: RowReader,
        render: Render,
        name: str = "",
        columns: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        chat: bool = False,
    ) -> None:
        self._rows = rows
        self._render = render
        self.name = name
        self._columns = tuple(columns)
        self._renamed = dict(renamed or {})
        self._chat = chat

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> Prompt:
        """Reads a row.

        Raises:
            ConfigError: It cannot be read, or the chat template refuses it; the text says where it stands.
        """
        try:
            fields = self._fields(self._rows[row])
            if isinstance(fields["prompt"], list):
                fields["prompt"] = self._rendered(fields["prompt"])
        except _BadRow as error:
            raise ConfigError(f"{self.where(row)}: {error}") from None
        rest = {n: v for n, v in fields.items() if n not in ("prompt", "ground_truth", *self._columns)}
        texts = {name: _last_text(fields[name]) for name in self._columns}
        return Prompt(fields["prompt"], _ground_truth(fields), json.dumps(rest), texts, self.name)

    def where(self, row: int) -> str:
        """Where a row stands, for messages."""
        return self._rows.where(row)

    def check(self) -> None:
        """Reads all rows once, and renders the conversations of the first `NUM_RENDERED`.

        Raises:
            ConfigError: A row is not what it should be; the text says which, and where.
        """
        for row, fields in enumerate(self._rows):
            try:
                self._fields(fields)
            except _BadRow as error:
                raise ConfigError(f"{self.where(row)}: {error}") from None
        for row in range(min(len(self), NUM_RENDERED)):
            self[row]

    def _fields(self, row: Row) -> Row:
        """A row's fields under our names, checked."""
        if self._renamed:
            ours = {theirs: name for name, theirs in self._renamed.items()}
            hidden = self._renamed.keys() - ours.keys()
            row = {ours.get(name, name): value for name, value in row.items() if name not in hidden}
        for name in ("prompt", *self._columns):
            if name not in row:
                raise _BadRow(f"not a JSON object with a {name}")
        given = row["prompt"]
        if not (given and isinstance(given, list)):
            _check_text(given, "prompt")
            if self._chat:
                row = {**row, "prompt": [{"role": "user", "content": given}]}
        for name in self._columns:
            _check_text(_last_text(row[name]), name)
        return row

    def _rendered(self, messages: Any) -> str:
        try:
            text = self._render(messages)
        except ConfigError as error:
            raise _BadRow(f"prompt: {error}") from None
        _check_text(text, "prompt")
        return text


class PromptData:
    """The rows of all sources, one source after the other.

    Args:
        sources: At least one.
    """

    def __init__(self, sources: Sequence[PromptSource]) -> None:
        self._sources = tuple(sources)
        self.sizes = tuple(len(source) for source in sources)
        self._first = list(itertools.accumulate(self.sizes, initial=0))

    @staticmethod
    def load(path: Path, key: str) -> PromptData:
        """The rows of a file or dataset of prompts, each a text.

        Args:
            key: Config key that names it, for messages.

        Raises:
            ConfigError: The file is missing, empty, or a line of it is not a row.
        """
        source = PromptSource(open_rows(path, key), _no_template)
        source.check()
        return PromptData([source])

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, row: int, /) -> Prompt:
        """Reads a row; errors as of `PromptSource`."""
        source = self._source_of(row)
        return self._sources[source][int(row) - self._first[source]]

    def where(self, row: int) -> str:
        """Where a row stands, for messages."""
        source = self._source_of(row)
        return self._sources[source].where(row - self._first[source])

    def batch(self, rows: Sequence[int] | np.ndarray) -> FutureBatch:
        """The columns of these rows, as `columns_of`."""
        return columns_of([self[int(row)] for row in rows])

    def rows_of_step(self, step: int, count: int, seed: int) -> np.ndarray:
        """Rows of a step, from 1, where there is one source and none is left out: those that a `Loader` deals out."""
        first = (step - 1) * count
        return shuffled(np.arange(first, first + count), len(self), f"data/{seed}")

    def _source_of(self, row: int) -> int:
        return int(np.searchsorted(self._first, row, side="right")) - 1


def columns_of(prompts: Sequence[Prompt]) -> FutureBatch:
    """Columns prompt, ground_truth and metadata, those of `texts`, and source where there are several."""
    columns = {
        "prompt": [prompt.text for prompt in prompts],
        "ground_truth": [prompt.ground_truth for prompt in prompts],
        "metadata": [prompt.metadata for prompt in prompts],
        **{name: [prompt.texts[name] for prompt in prompts] for name in prompts[0].texts},
    }
    if prompts[0].source:
        columns["source"] = [prompt.source for prompt in prompts]
    return FutureBatch.of(**columns)


class TextData:
    """Texts, the field `text` of each row: what a policy goes on learning as it is."""

    def __init__(self, rows: RowReader) -> None:
        self._rows = rows

    @staticmethod
    def load(path: Path, key: str) -> TextData:
        """The texts of a file or dataset.

        Args:
            key: Config key that names it, for messages.

        Raises:
            ConfigError: The file is missing, empty, or a line of it has no text.
        """
        data = TextData(open_rows(path, key))
        for row, fields in enumerate(data._rows):
            data._text(fields, row)
        return data

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> str:
        return self._text(self._rows[row], row)

    def where(self, row: int) -> str:
        """Where a row stands, for messages."""
        return self._rows.where(row)

    def _text(self, fields: Row, row: int) -> str:
        try:
            if "text" not in fields:
                raise _BadRow("not a JSON object with a text")
            _check_text(fields["text"], "text")
        except _BadRow as error:
            raise ConfigError(f"{self.where(row)}: {error}") from None
        return fields["text"]


def load_data(
    config: Config, columns: Sequence[str] = (), started_unix_s: float | None = None
) -> tuple[PromptData, PromptData]:
    """The rows that a run trains on, and those it evaluates on.

    Args:
        columns: Texts that each row has to have beside its prompt.
        started_unix_s: When the run started: what chat templates are told of the time. Default: now.

    Raises:
        ConfigError: A source cannot be read, or has a row that is not what it should be.
    """
    render = Chat(config.tokenizer, started_unix_s).render if config.tokenizer else _no_template
    train, heldout = [], []
    for number, source in enumerate(config.data.all_sources):
        keys = (
            (f"data.sources.{number}.path", f"data.sources.{number}.heldout")
            if config.data.sources
            else ("data.train", "data.heldout")
        )
        splits = (
            (train, source.path, source.split, keys[0]),
            (heldout, source.heldout or source.path, source.heldout_split, keys[1]),
        )
        for sources, path, split, key in splits:
            rows = open_rows(path, key, split, source.subset)
            sources.append(_prompt_source(config, source, rows, render, columns))
            sources[-1].check()
    return PromptData(train), PromptData(heldout)


def _prompt_source(
    config: Config, table: SourceTable, rows: RowReader, render: Render, columns: Sequence[str]
) -> PromptSource:
    name = table.label if config.data.sources else ""
    return PromptSource(rows, render, name, columns, table.columns, config.data.chat)


class _BadRow(Exception):
    """A row is not what it should be; where it stands is said by who knows."""


def _ground_truth(row: Row) -> str:
    """The right answer: a field of its own, or where verl's data has it, reward_model.ground_truth."""
    if "ground_truth" in row:
        return _text(row["ground_truth"])
    reward_model = row.get("reward_model")
    return _text(reward_model.get("ground_truth")) if isinstance(reward_model, dict) else ""


def _last_text(given: Any) -> Any:
    """A text that an algorithm learns from; of a conversation, what was said last."""
    if isinstance(given, list) and given and isinstance(given[-1], dict):
        return given[-1].get("content")
    return given


def _no_template(messages: Any) -> str:
    raise ConfigError(
        "a list of messages needs a chat template: give data.tokenizer, or a service with a model"
    )


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str) or not text:
        raise _BadRow(f"{name} is not a text, or empty: {text!r}")


def _text(value: Any) -> str:
    """A value as text: lists and tables as JSON."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
