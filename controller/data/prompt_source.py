"""One file or dataset of prompts: checks its rows, renames their fields and gives their prompts a form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.data.conversations import with_turns
from controller.data.malformed import MalformedRow, fields_of
from controller.data.prompt_form import PromptForm
from controller.data.readers import RowReader
from controller.data.response_end import RESPONSE_END
from controller.data.text_files import Row
from controller.data.tool_calls import TOOLS, tools_of, without_filled_keys
from rlhf.errors import ConfigError
from rlhf.plugins import nearest

NUM_RENDERED = 1000
"""Number of rows whose conversations are rendered as a check before a run starts."""


@dataclass(frozen=True)
class Prompt:
    """A row of the data with its prompt.

    Attributes:
        text: The prompt, as text.
        ground_truth: The right answer; empty where the row has none.
        metadata: All further fields of the row, as a JSON object.
        texts: Texts beside the prompt that the algorithm reads, such as response, by name; with any, also
            `RESPONSE_END` where the EOS token of the tokenizer does not end responses to conversations, empty for a
            row whose prompt is none.
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
        form: Form that the prompts get.
        name: Value of column `source`; empty: no such column.
        columns: Names of the texts that each row needs beside its prompt.
        renamed: Names of fields in the file, by the name that this package uses. Default: the same names.
        graded_by: Name of a service that compares responses with the ground truth of their row, which every row must
            have then; empty: there is no such service.
        tested_by: Name of a service that runs the program in a response with the tests of its row, which every row must
            have then; empty: there is no such service.

    Attributes:
        name: Value of column `source`.
        has_conversations: Whether a row has a prompt that is a conversation; `check` sets it.
    """

    def __init__(
        self,
        rows: RowReader,
        form: PromptForm,
        name: str = "",
        columns: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        graded_by: str = "",
        tested_by: str = "",
    ) -> None:
        self._rows = rows
        self._form = form
        self.has_conversations = False
        self._renders_responses = False
        self.name = name
        self._columns = tuple(columns)
        self._renamed = dict(renamed or {})
        self._graded_by, self._tested_by = graded_by, tested_by

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> Prompt:
        """Reads a row and renders its prompt.

        Raises:
            ConfigError: The row is malformed, or the chat template cannot render it; the text has its place.
        """
        try:
            fields = self._fields(self._rows[row])
            prepared, tools = self._prepared(fields)
            text = self._form.text(prepared, fields["prompt"], tools)
            texts = self._texts(fields, prepared, tools)
        except MalformedRow as error:
            raise ConfigError(f"{self.where(row)}: {error}") from None
        rest = {n: v for n, v in fields.items() if n not in ("prompt", "ground_truth", *self._columns)}
        return Prompt(text, _ground_truth(fields), json.dumps(rest), texts, self.name)

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
            ConfigError: A row is malformed, or no row has a field that the source renames; the text has the place.
        """
        unseen = {theirs: name for name, theirs in self._renamed.items() if theirs}
        for row, fields in enumerate(self._rows):
            unseen = {theirs: name for theirs, name in unseen.items() if theirs not in fields}
            try:
                fields = self._fields(fields)
                prompt, _ = self._prepared(fields)
            except MalformedRow as error:
                given = "".join(f"; columns.{name} is {theirs!r}" for theirs, name in unseen.items())
                raise ConfigError(f"{self.where(row)}: {error}{given}") from None
            self.has_conversations |= isinstance(prompt, list)
            self._renders_responses |= any(isinstance(fields[name], dict) for name in self._columns)
        for theirs, name in unseen.items():
            fields = self._rows[0]
            raise ConfigError(
                f"{self.where(0)}, and all rows after it: no field {theirs!r}, which is columns.{name}; the fields are "
                f"{fields_of(fields)}{nearest(theirs, fields)}"
            )
        for row in range(min(len(self), NUM_RENDERED)):
            self[row]

    def _prepared(self, fields: Row) -> tuple[str | list[Any], list[Any] | None]:
        """Returns the prompt of a row in its form, and the tools of a conversation; None where it has none. Raises
        MalformedRow as `PromptForm.prepare` and `tools_of`."""
        prepared = self._form.prepare(fields["prompt"])
        # A text may be rendered already, and field tools of its row be anything.
        return prepared, tools_of(fields) if isinstance(prepared, list) else None

    def _texts(self, fields: Row, prepared: str | list[Any], tools: list[Any] | None) -> dict[str, str]:
        """Returns the texts of `columns`, and what ends them where the EOS token of the tokenizer does not end all that
        the source has. Raises MalformedRow as `PromptForm.response`, or where the texts end differently."""
        if not self._columns:
            return {}
        usual = self._form.ends.usual()
        texts, ends = {}, {}
        for name in self._columns:
            texts[name], ends[name] = fields[name], usual if isinstance(prepared, list) else ""
            if isinstance(fields[name], dict):
                texts[name], ends[name] = self._form.response(prepared, fields[name], name, tools)
        if len(set(ends.values())) > 1:
            said = " and ".join(f"{name} with {end or 'the EOS token'!r}" for name, end in ends.items())
            raise MalformedRow(f"the chat template ends {said}; the responses of a row need the same end")
        # Of every row, since batches that are concatenated lose a column that one of them does not have.
        if usual or self._renders_responses:
            texts[RESPONSE_END] = ends[self._columns[0]]
        return texts

    def _fields(self, row: Row) -> Row:
        """Returns the fields of a row under the names that this package uses, with those of `columns` as texts or
        messages. Raises MalformedRow where the prompt, a needed text, a needed ground truth or needed tests are
        missing; see `with_turns`."""
        if self._renamed:
            ours = {theirs: name for name, theirs in self._renamed.items()}
            hidden = self._renamed.keys() - ours.keys()
            row = {ours.get(name, name): value for name, value in row.items() if name not in hidden}
        fills_nulls = self._rows.fills_nulls
        row = with_turns(row, self._columns, fills_nulls=fills_nulls)
        if fills_nulls and isinstance(row.get(TOOLS), list):
            row = {**row, TOOLS: without_filled_keys(row[TOOLS])}
        if self._graded_by and not _ground_truth(row).strip():
            raise MalformedRow(
                f"no ground_truth, with which the service {self._graded_by} compares responses"
            )
        if self._tested_by and not _has_tests(row):
            raise MalformedRow(
                f"no tests for the service {self._tested_by}: neither a field tests, nor a ground_truth with inputs "
                "and outputs (docs/sandbox.md)"
            )
        return row


def _ground_truth(row: Row) -> str:
    """Returns the right answer in a row: field ground_truth, or reward_model.ground_truth as in the data of verl;
    empty where there is neither."""
    if "ground_truth" in row:
        return _text(row["ground_truth"])
    reward_model = row.get("reward_model")
    return _text(reward_model.get("ground_truth")) if isinstance(reward_model, dict) else ""


def _has_tests(row: Row) -> bool:
    """Whether a row has tests of a program: field tests, or a ground truth with inputs and outputs as in the data of
    verl, and any in them. The grader checks what they are."""
    if "tests" in row:
        return bool(row["tests"]) and row["tests"] != "[]"
    try:
        table = json.loads(_ground_truth(row))
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict) and bool(table.get("inputs") and table.get("outputs"))


def _text(value: Any) -> str:
    """Converts a JSON value to text: lists and objects to JSON, null to an empty text."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
