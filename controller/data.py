"""The rows of a run: prompts with what belongs to them, from one file or from several sources."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from controller.chat import Chat
from controller.config import Config, SourceTable
from controller.dataflow import FutureBatch
from controller.loader import shuffled
from controller.readers import Placed, read_rows
from rlhf.errors import ConfigError

Render = Callable[[Any], str]
"""From a conversation, a list of messages, to text."""


@dataclass(frozen=True)
class PromptData:
    """Rows with a `prompt`, an optional `ground_truth`, and any further fields as metadata.

    Attributes:
        prompts, ground_truths: Text per row.
        metadata: Further fields per row, as JSON.
        texts: By name, the columns beside the prompt that an algorithm learns from.
        sources: Name of the source per row, where there are several; else empty.
        sizes: Rows of each source, which follow each other; empty where there is one.
        num_long: Rows left out because their prompt is too long.
    """

    prompts: list[str]
    ground_truths: list[str]
    metadata: list[str]
    texts: Mapping[str, list[str]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    num_long: int = 0

    @staticmethod
    def load(path: Path, key: str) -> PromptData:
        """Reads a file or dataset of prompts, each a text.

        Args:
            key: Config key that names it, for messages.

        Raises:
            ConfigError: The file is missing, empty, or a line of it is not a row.
        """
        return _prompt_data(read_rows(path, key), (), _no_template)

    @staticmethod
    def concat(parts: Mapping[str, PromptData]) -> PromptData:
        """The rows of several sources by name, one source after the other."""
        datas = list(parts.values())
        return PromptData(
            _joined(data.prompts for data in datas),
            _joined(data.ground_truths for data in datas),
            _joined(data.metadata for data in datas),
            {name: _joined(data.texts[name] for data in datas) for name in datas[0].texts},
            _joined([name] * len(data) for name, data in parts.items()),
            tuple(len(data) for data in datas),
            sum(data.num_long for data in datas),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, rows: np.ndarray) -> FutureBatch:
        """Columns prompt, ground_truth and metadata of these rows, those of `texts`, and source where there are
        several."""
        columns = {
            "prompt": self.prompts,
            "ground_truth": self.ground_truths,
            "metadata": self.metadata,
            **self.texts,
            **({"source": self.sources} if self.sources else {}),
        }
        return FutureBatch.of(**{name: [column[row] for row in rows] for name, column in columns.items()})

    def rows_of_step(self, step: int, count: int, seed: int) -> np.ndarray:
        """Rows of a step, from 1, where there is one source: what a `Loader` deals out step by step."""
        return _rows_of_step(len(self), step, count, f"data/{seed}")

    def shorter_than(self, most: int, chat: Chat) -> PromptData:
        """The rows whose prompt has at most this many tokens."""
        kept = [row for row, tokens in enumerate(chat.count(self.prompts)) if tokens <= most]
        return replace(
            self,
            prompts=[self.prompts[row] for row in kept],
            ground_truths=[self.ground_truths[row] for row in kept],
            metadata=[self.metadata[row] for row in kept],
            texts={name: [column[row] for row in kept] for name, column in self.texts.items()},
            num_long=len(self) - len(kept),
        )


@dataclass(frozen=True)
class TextData:
    """Texts, the field `text` of each row: what a policy goes on learning as it is."""

    texts: list[str]

    @staticmethod
    def load(path: Path, key: str) -> TextData:
        """Reads a file or dataset.

        Args:
            key: Config key that names it, for messages.

        Raises:
            ConfigError: The file is missing, empty, or a line of it has no text.
        """
        return TextData([_text_field(row, "text", where) for row, where in read_rows(path, key)])

    def texts_of_step(self, step: int, count: int, seed: int) -> list[str]:
        """Texts of a step, from 1, in the manner of `PromptData.rows_of_step`."""
        return [self.texts[row] for row in _rows_of_step(len(self.texts), step, count, f"pretrain/{seed}")]


def load_data(config: Config, columns: Sequence[str] = ()) -> tuple[PromptData, PromptData]:
    """The rows that a run trains on, and those it evaluates on.

    Args:
        columns: Texts that each row has to have beside its prompt.

    Raises:
        ConfigError: A source cannot be read, or has no row that is short enough.
    """
    chat = Chat(config.tokenizer) if config.tokenizer else None
    train, heldout = {}, {}
    for number, source in enumerate(config.data.all_sources):
        keys = (
            (f"data.sources.{number}.path", f"data.sources.{number}.heldout")
            if config.data.sources
            else ("data.train", "data.heldout")
        )
        train[source.label] = _load_split(config, source, source.path, source.split, keys[0], columns, chat)
        heldout[source.label] = _load_split(
            config, source, source.heldout or source.path, source.heldout_split, keys[1], columns, chat
        )
    if not config.data.sources:
        return next(iter(train.values())), next(iter(heldout.values()))
    return PromptData.concat(train), PromptData.concat(heldout)


def _load_split(
    config: Config,
    source: SourceTable,
    path: Path,
    split: str,
    key: str,
    columns: Sequence[str],
    chat: Chat | None,
) -> PromptData:
    rows = [
        (_renamed(row, source.columns), where) for row, where in read_rows(path, key, split, source.subset)
    ]
    if config.data.chat:
        rows = [(_as_conversation(row), where) for row, where in rows]
    data = _prompt_data(rows, columns, chat.render if chat else _no_template)
    most = config.data.max_prompt_tokens
    if not most:
        return data
    if chat is None:
        raise ConfigError("data.max_prompt_tokens: needs data.tokenizer, or a service with a model")
    short = data.shorter_than(most, chat)
    if not len(short):
        raise ConfigError(f"{key}: {path} has no prompt of at most {most} tokens (data.max_prompt_tokens)")
    return short


def _prompt_data(rows: Sequence[Placed], columns: Sequence[str], render: Render) -> PromptData:
    made = [_prompt_row(row, where, columns, render) for row, where in rows]
    prompts, ground_truths, metadata, texts = (list(column) for column in zip(*made, strict=True))
    by_name = {name: [row[i] for row in texts] for i, name in enumerate(columns)}
    return PromptData(prompts, ground_truths, metadata, by_name)


def _prompt_row(
    row: dict[str, Any], where: str, columns: Sequence[str], render: Render
) -> tuple[str, str, str, tuple[str, ...]]:
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt:
        try:
            row = {**row, "prompt": render(prompt)}
        except ConfigError as error:
            raise ConfigError(f"{where}: prompt: {error}") from None
    taken = ("prompt", "ground_truth", *columns)
    rest = {name: value for name, value in row.items() if name not in taken}
    texts = tuple(_answer(row, name, where) for name in columns)
    return _text_field(row, "prompt", where), _ground_truth(row), json.dumps(rest), texts


def _ground_truth(row: dict[str, Any]) -> str:
    """The right answer: a field of its own, or where verl's data has it, reward_model.ground_truth."""
    if "ground_truth" in row:
        return _text(row["ground_truth"])
    reward_model = row.get("reward_model")
    return _text(reward_model.get("ground_truth")) if isinstance(reward_model, dict) else ""


def _answer(row: dict[str, Any], name: str, where: str) -> str:
    """A text that an algorithm learns from; of a conversation, what was said last."""
    given = row.get(name)
    if isinstance(given, list) and given and isinstance(given[-1], dict):
        row = {**row, name: given[-1].get("content")}
    return _text_field(row, name, where)


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with the fields that have other names in the data under ours."""
    theirs = {other: name for name, other in columns.items()}
    return {
        theirs.get(name, name): value
        for name, value in row.items()
        if theirs.get(name) or name not in columns
    }


def _as_conversation(row: dict[str, Any]) -> dict[str, Any]:
    prompt = row.get("prompt")
    return {**row, "prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else row


def _no_template(messages: Any) -> str:
    raise ConfigError(
        "a list of messages needs a chat template: give data.tokenizer, or a service with a model"
    )


def _rows_of_step(size: int, step: int, count: int, key: str) -> np.ndarray:
    """Rows of a step: pass after pass over `size` rows, each in an order drawn from (key, pass)."""
    first = (step - 1) * count
    return shuffled(np.arange(first, first + count), size, key)


def _joined(parts: Any) -> list[str]:
    return [text for part in parts for text in part]


def _text_field(row: dict[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise ConfigError(f"{where}: not a JSON object with a {name}")
    text = row[name]
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where}: {name} is not a text, or empty: {text!r}")
    return text


def _text(value: Any) -> str:
    """A value as text: lists and tables as JSON."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
