"""A row for each turn of the assistant in a transcript, in place of one for its last turn."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from controller.data.conversations import TRANSCRIPT, is_trained, keys_beside_content
from controller.data.malformed import MalformedRow
from controller.data.readers import RowReader
from controller.data.text_files import Row
from rlhf.errors import ConfigError


class TurnRows:
    """Reader that yields a row for each turn of the assistant in a transcript: the row of the file, whose transcript
    ends with that turn. A transcript is a list of messages, in field `messages` of a row without field `response`, or
    in field `response` of a row without a prompt. Other rows are yielded as they are. Turns of weight 0 are left out.

    All rows are read once to count their turns; the offset of each row, 8 bytes, stays in memory.

    Args:
        rows: Reader of the rows of the file.
        renamed: Names of fields in the file, by the name that this package uses.

    Attributes:
        has_transcripts: Whether a row has a transcript.

    Raises:
        ConfigError: A row cannot be read; or a transcript has no message of the assistant to train, or begins with one.
    """

    def __init__(self, rows: RowReader, renamed: Mapping[str, str]) -> None:
        self._rows = rows
        self.fills_nulls = rows.fills_nulls
        names = {name: renamed.get(name, name) for name in ("prompt", "response", TRANSCRIPT)}
        ours = {theirs: name for name, theirs in renamed.items()}
        # With columns.ground_truth = "response", say, that field of the file is no response.
        self._names = {name: theirs for name, theirs in names.items() if ours.get(theirs, name) == name}
        self.has_transcripts = False
        first = array("q", [0])
        for number, row in enumerate(rows):
            try:
                turns = self._turns(row)
            except MalformedRow as error:
                raise ConfigError(f"{rows.where(number)}: {error}") from None
            self.has_transcripts |= turns[0] is not row
            first.append(first[-1] + len(turns))
        self._first = np.asarray(first)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, row: int, /) -> Row:
        number, turn = self._place(row)
        return self._turns(self._rows[number])[turn]

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            yield from self._turns(row)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the rows of the file."""
        return self._rows.fingerprint()

    def where(self, row: int) -> str:
        """Returns the place of a row of the file, and in a transcript the number of the assistant's turn, from 1, for
        messages."""
        number, turn = self._place(row)
        place = self._rows.where(number)
        read = self._turns(self._rows[number])[turn]
        field = self._field(read)
        return f"{place}, turn {len(_turns_in(read[field]))} of the assistant" if field else place

    def _place(self, row: int) -> tuple[int, int]:
        """Returns the number of a row in the file, and that of the turn in it, from 0."""
        number = int(np.searchsorted(self._first, row, side="right")) - 1
        return number, int(row - self._first[number])

    def _field(self, row: Row) -> str | None:
        """Returns the name of the field with the transcript of a row; None where there is none."""
        given = {name: row.get(field) for name, field in self._names.items()}
        name = TRANSCRIPT if given.get("response") is None else "response"
        if name == "response" and given.get("prompt") is not None:
            return None
        return self._names[name] if given.get(name) and isinstance(given[name], list) else None

    def _turns(self, row: Row) -> list[Row]:
        """Returns the rows that a row of the file becomes. Raises MalformedRow where its transcript has no message of
        the assistant to train, or begins with one."""
        field = self._field(row)
        if field is None:
            return [row]
        messages = row[field]
        said = _turns_in(messages)
        if not said:
            raise MalformedRow(f"{field} has no message whose role is 'assistant'")
        ends = [number for number in said if is_trained(messages[number - 1], f"{field}: message {number}")]
        if not ends:
            raise MalformedRow(f"{field} has no message of the assistant to train: each has weight 0")
        if ends[0] == 1:
            raise MalformedRow(
                f"{field} begins with a message of the assistant, which cannot be trained without a prompt "
                "(data.turns); weight 0 in it leaves it out"
            )
        return [{**row, field: messages[:end]} for end in ends]


def _turns_in(messages: Sequence[Any]) -> list[int]:
    """Returns the numbers of the messages of the assistant in a transcript, from 1."""
    said = [
        number
        for number, message in enumerate(messages, 1)
        if isinstance(message, dict) and message.get("role") == "assistant"
    ]
    return [*said, len(messages)] if _has_no_role(messages[-1]) else said


def _has_no_role(last: Any) -> bool:
    """Whether the last message of a transcript is of the assistant without saying so, as elsewhere."""
    if not isinstance(last, dict) or last.get("role") is not None:
        return False
    return "content" in last or bool(keys_beside_content(last))
