"""One file or dataset of prompts: checks its rows, renames their fields and renders conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.data.readers import Row, RowReader
from rlhf.errors import ConfigError

Render = Callable[[Any], str]
"""Function that renders a conversation, a list of messages, as text."""

NUM_RENDERED = 1000
"""Number of rows whose conversations are rendered as a check before a run starts."""


@dataclass(frozen=True)
class Prompt:
    """A row of the data with its prompt.

    Attributes:
        text: The prompt, as text.
        ground_truth: The right answer; empty where the row has none.
        metadata: All further fields of the row, as a JSON object.
        texts: Texts beside the prompt that the algorithm reads, such as response, by name.
        source: Name of the row's source where the run has several; else empty.
    """

    text: str
    ground_truth: str
    metadata: str
    texts: Mapping[str, str]
    source: str = ""


class PromptSource:
    """A sequence of prompts that are read from the rows of one file or dataset.

    Args:
        rows: Reads the rows.
        render: Function that renders prompts that are lists of messages.
        name: Value of column `source`; empty: no such column.
        columns: Names of the texts that each row needs beside its prompt.
        renamed: Names of fields in the file, by the name that this package uses. Default: the same names.
        chat: Whether a prompt that is a text is rendered as one message of the user.
        graded_by: Name of a service that compares responses with the ground truth of their row, which every row must
            have then; empty: there is no such service.
    """

    def __init__(
        self,
        rows: RowReader,
        render: Render,
        name: str = "",
        columns: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        chat: bool = False,
        graded_by: str = "",
    ) -> None:
        self._rows = rows
        self._render = render
        self.name = name
        self._columns = tuple(columns)
        self._renamed = dict(renamed or {})
        self._chat = chat
        self._graded_by = graded_by

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> Prompt:
        """Reads a row and renders its prompt.

        Raises:
            ConfigError: The row is malformed, or the chat template cannot render it; the text has its place.
        """
        try:
            fields = self._fields(self._rows[row])
            if isinstance(fields["prompt"], list):
                fields["prompt"] = self._rendered(fields["prompt"])
        except MalformedRow as error:
            raise ConfigError(f"{self.where(row)}: {error}") from None
        rest = {n: v for n, v in fields.items() if n not in ("prompt", "ground_truth", *self._columns)}
        texts = {name: _last_text(fields[name]) for name in self._columns}
        return Prompt(fields["prompt"], _ground_truth(fields), json.dumps(rest), texts, self.name)

    def where(self, row: int) -> str:
        """Returns the place of a row for messages: file and line, or data set and row number."""
        return self._rows.where(row)

    def fingerprint(self) -> str:
        """Returns a sha256 (hex) that identifies the data: over all bytes of a JSONL file, unpacked, or over the number
        of rows of a data set or parquet file and at most `controller.data.readers.FINGERPRINTED` of its rows."""
        return self._rows.fingerprint()

    def check(self) -> None:
        """Checks all rows by reading them once, and renders the prompts of the first `NUM_RENDERED`.

        Raises:
            ConfigError: A row is malformed; the text has its place.
        """
        for row, fields in enumerate(self._rows):
            try:
                self._fields(fields)
            except MalformedRow as error:
                raise ConfigError(f"{self.where(row)}: {error}") from None
        for row in range(min(len(self), NUM_RENDERED)):
            self[row]

    def _fields(self, row: Row) -> Row:
        """Returns the fields of a row under the names that this package uses; with `chat`, a prompt that is a text
        becomes a list of one message. Raises MalformedRow where prompt or a needed text is missing or no text, or a
        needed ground truth is missing."""
        if self._renamed:
            ours = {theirs: name for name, theirs in self._renamed.items()}
            hidden = self._renamed.keys() - ours.keys()
            row = {ours.get(name, name): value for name, value in row.items() if name not in hidden}
        for name in ("prompt", *self._columns):
            if name not in row:
                raise MalformedRow(f"not a JSON object with a {name}")
        given = row["prompt"]
        if not (given and isinstance(given, list)):
            check_text(given, "prompt")
            if self._chat:
                row = {**row, "prompt": [{"role": "user", "content": given}]}
        for name in self._columns:
            check_text(_last_text(row[name]), name)
        if self._graded_by and not _ground_truth(row).strip():
            raise MalformedRow(
                f"no ground_truth, with which the service {self._graded_by} compares responses"
            )
        return row

    def _rendered(self, messages: Any) -> str:
        try:
            text = self._render(messages)
        except ConfigError as error:
            raise MalformedRow(f"prompt: {error}") from None
        check_text(text, "prompt")
        return text


def no_template(messages: Any) -> str:
    """Raises ConfigError; stands for the render function where no chat template is configured."""
    raise ConfigError(
        "a list of messages needs a chat template: give data.tokenizer, or a service with a model"
    )


class MalformedRow(Exception):
    """Raised where a row is malformed; its caller turns it into a ConfigError with its place."""


def _ground_truth(row: Row) -> str:
    """Returns the right answer in a row: field ground_truth, or reward_model.ground_truth as in the data of verl;
    empty where there is neither."""
    if "ground_truth" in row:
        return _text(row["ground_truth"])
    reward_model = row.get("reward_model")
    return _text(reward_model.get("ground_truth")) if isinstance(reward_model, dict) else ""


def _last_text(given: Any) -> Any:
    """Returns the content of the last message where `given` is a conversation; else `given` itself."""
    if isinstance(given, list) and given and isinstance(given[-1], dict):
        return given[-1].get("content")
    return given


def check_text(text: Any, name: str) -> None:
    """Raises MalformedRow where the value of field `name` is not a text, or is empty."""
    if not isinstance(text, str) or not text:
        raise MalformedRow(f"{name} is not a text, or empty: {text!r}")


def _text(value: Any) -> str:
    """Converts a JSON value to text: lists and objects to JSON, null to an empty text."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
