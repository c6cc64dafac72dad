"""The rows of a run: prompts of all sources, and texts of data.pretrain. Rows are read when they are drawn."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from controller.config.config import Config
from controller.config.data import SourceTable
from controller.data.chat import TOKENIZER_CONFIG, Chat
from controller.data.malformed import MalformedRow, check_field, check_text
from controller.data.prompt_form import NoRenderer, NoTokenizer, PromptForm, Renderer
from controller.data.prompt_source import Prompt, PromptSource
from controller.data.readers import RowReader, open_rows
from controller.data.response_end import TemplateEnds
from controller.data.splits import some_of, split_off
from controller.data.text_files import Row
from controller.data.turn_rows import TurnRows
from controller.role_groups.dataflow import FutureBatch
from rlhf.errors import ConfigError
from settings.reward import RewardTable


class PromptData:
    """A sequence of the prompts of all sources, one source after the other.

    Args:
        sources: The sources, at least one.

    Attributes:
        sizes: Number of rows of each source.
    """

    def __init__(self, sources: Sequence[PromptSource]) -> None:
        self._sources = tuple(sources)
        self.sizes = tuple(len(source) for source in sources)
        self._first = list(itertools.accumulate(self.sizes, initial=0))

    @staticmethod
    def load(path: Path, key: str) -> PromptData:
        """Opens a file or dataset whose prompts are texts, as the only source, and checks all of its rows.

        Args:
            path: The file or dataset; see `open_rows`.
            key: Config key that names it, for messages.

        Raises:
            ConfigError: The file is missing or empty, or a line of it is malformed.
        """
        source = PromptSource(open_rows(path, key), PromptForm())
        source.check()
        return PromptData([source])

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, row: int, /) -> Prompt:
        """Reads the row of this number, counted over all sources, and returns its prompt. Raises ConfigError where the
        row is malformed or the chat template cannot render it."""
        source = self._source_of(row)
        return self._sources[source][int(row) - self._first[source]]

    @property
    def has_conversations(self) -> bool:
        """Whether a row has a prompt that is a conversation; known once the sources are checked."""
        return any(source.has_conversations for source in self._sources)

    def where(self, row: int) -> str:
        """Returns the place of a row for messages: file and line, or data set and row number."""
        source = self._source_of(row)
        return self._sources[source].where(row - self._first[source])

    def fingerprints(self) -> list[str]:
        """Returns the fingerprint of each source; see `PromptSource.fingerprint`. Reads all JSONL files."""
        return [source.fingerprint() for source in self._sources]

    def batch(self, rows: Sequence[int] | np.ndarray) -> FutureBatch:
        """Reads the rows of these numbers and returns them as a batch with the columns of `columns_of`. Raises
        ConfigError where a row is malformed."""
        return columns_of([self[int(row)] for row in rows])

    def _source_of(self, row: int) -> int:
        return int(np.searchsorted(self._first, row, side="right")) - 1


def columns_of(prompts: Sequence[Prompt]) -> FutureBatch:
    """Makes a batch of prompts, at least one: columns prompt, ground_truth and metadata, one for each name in their
    `texts`, empty for a prompt without it, and source unless it is empty in the first prompt."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.texts)
    columns = {
        "prompt": [prompt.text for prompt in prompts],
        "ground_truth": [prompt.ground_truth for prompt in prompts],
        "metadata": [prompt.metadata for prompt in prompts],
        **{name: [prompt.texts.get(name, "") for prompt in prompts] for name in names},
    }
    if prompts[0].source:
        columns["source"] = [prompt.source for prompt in prompts]
    return FutureBatch.of(**columns)


class TextData:
    """A sequence of the texts of data.pretrain: field `text` of each row. Reading a row without one raises
    ConfigError."""

    def __init__(self, rows: RowReader) -> None:
        self._rows = rows

    @staticmethod
    def load(path: Path, key: str) -> TextData:
        """Opens a file or dataset of texts, and checks all of its rows.

        Args:
            path: The file or dataset; see `open_rows`.
            key: Config key that names it, for messages.

        Raises:
            ConfigError: The file is missing or empty, or a line of it has no text.
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
        """Returns the place of a row for messages: file and line, or data set and row number."""
        return self._rows.where(row)

    def fingerprint(self) -> str:
        """Returns a sha256 (hex) that identifies the data; see `PromptSource.fingerprint`."""
        return self._rows.fingerprint()

    def _text(self, fields: Row, row: int) -> str:
        try:
            check_field(fields, "text")
            check_text(fields["text"], "text")
        except MalformedRow as error:
            raise ConfigError(f"{self.where(row)}: {error}") from None
        return fields["text"]


def load_data(
    config: Config,
    columns: Sequence[str] = (),
    started_unix_s: float | None = None,
    rewards: Collection[str] = (),
) -> tuple[PromptData, PromptData]:
    """Opens and checks the data of a run. Returns the training prompts and the held-out prompts.

    Args:
        config: Configuration of the run.
        columns: Names of the texts that each row needs beside its prompt.
        started_unix_s: Start of the run, Unix time in seconds, which chat templates may use. Default: now.
        rewards: Names of the rewards and costs that score training prompts beside the reward of their source. Held-out
            prompts are scored by all of the config.

    Raises:
        ConfigError: A source cannot be read, or has a malformed row.
    """
    table = config.data
    options = table.chat_options
    chat = _renderer(config, started_unix_s), TemplateEnds(config)
    others = config.other_rewards(_reward_tables(config))
    of_training = [name for name in others if name in rewards]
    train, heldout, of_turns = [], [], []
    for number, source in enumerate(table.all_sources):
        prefix = f"data.sources.{number}." if table.sources else "data."
        rows, held_out = _open_source(source, prefix, f"{prefix}{'path' if table.sources else 'train'}")
        evaluated = some_of(held_out, source.evaluated_rows)
        for sources, part, scored_by in ((train, rows, of_training), (heldout, evaluated, others)):
            if part is not None:
                if table.turns == "all" and "response" in columns:
                    # After rows are held out, so that no turn of a held-out transcript is trained.
                    part = TurnRows(part, source.columns)
                    of_turns.append(part)
                names = (source.reward, *scored_by)
                sources.append(_prompt_source(config, source, part, chat, columns, names))
                sources[-1].check()
    if of_turns and not any(each.has_transcripts for each in of_turns):
        raise ConfigError(
            'data.turns: no row of the data is a transcript, so "all" has no meaning: a row with a prompt of its own '
            "has one turn to train"
        )
    if options and not any(each.has_conversations for each in (*train, *heldout)):
        raise ConfigError(
            "data.chat_options: no prompt of the data is a conversation that the chat template renders; data.chat = "
            "true makes texts ones"
        )
    return PromptData(train), PromptData(heldout)


def _open_source(source: SourceTable, prefix: str, key: str) -> tuple[RowReader | None, RowReader]:
    """Returns readers of the rows of a source to train on, None where there are none, and to evaluate on.

    Args:
        source: The source.
        prefix: Beginning of its config keys, for messages.
        key: Config key of its path, for messages.
    """
    rows = open_rows(source.path, key, source.split, source.subset) if source.is_trained_on else None
    if rows is not None and source.heldout_rows:
        return split_off(rows, source.heldout_rows, f"{prefix}heldout_rows")
    path, of_same = source.heldout or source.path, source.heldout is None
    heldout_key = f"{prefix}heldout"
    return rows, open_rows(path, heldout_key, source.heldout_split, source.subset, has_splits=of_same)


def _renderer(config: Config, started_unix_s: float | None) -> Renderer:
    """Returns the chat template, which renders conversations; it raises NoTokenizer where the configured directory does
    not exist, or describes no tokenizer."""
    directory = config.tokenizer
    if directory is None:
        return NoRenderer()
    if (directory / TOKENIZER_CONFIG).is_file():
        return Chat(directory, started_unix_s, config.data.chat_options)

    def no_tokenizer() -> ConfigError:
        exists = directory.is_dir()
        lack = (
            f"directory {directory} has no {TOKENIZER_CONFIG}"
            if exists
            else f"there is no directory {directory}"
        )
        where = "" if directory.is_absolute() else f" (relative to the working directory {Path.cwd()})"
        return NoTokenizer(
            f"{config.tokenizer_key}: {lack}{where}, and prompts are rendered by its chat template"
        )

    return NoRenderer(no_tokenizer)


def _reward_tables(config: Config) -> dict[str, RewardTable]:
    return {name: each for name, each in config.services.items() if isinstance(each, RewardTable)}


def _prompt_source(
    config: Config,
    table: SourceTable,
    rows: RowReader,
    chat: tuple[Renderer, TemplateEnds],
    columns: Sequence[str],
    rewards: Sequence[str],
) -> PromptSource:
    name, tables = table.label if config.data.sources else "", _reward_tables(config)
    scored_by = [part for name in rewards for part in config.weights_of(name) if part in tables]
    graded_by = next((service for service in scored_by if tables[service].needs_ground_truth), "")
    tested_by = next((service for service in scored_by if tables[service].needs_tests), "")
    form = PromptForm(
        *chat,
        config.data.chat,
        config.data.system if table.system is None else table.system,
        config.data.template if table.template is None else table.template,
    )
    return PromptSource(rows, form, name, columns, table.columns, graded_by, tested_by)
