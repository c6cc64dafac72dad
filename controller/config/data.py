"""Settings of the rows that a run trains and evaluates on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, field_serializer, field_validator, model_validator

from settings.strict import Positive, Strict

NOWHERE = Path()
"""Value of a path that is not given."""
QUESTION = "{prompt}"
"""Place of the prompt of a row in a template."""
SET_BY_RENDERING = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of `apply_chat_template` of transformers that are no variables of a template, or that rendering sets."""


def _check_template(template: str) -> str:
    if template and template.count(QUESTION) != 1:
        raise ValueError(f"{QUESTION} must occur in it exactly once (given: {template!r})")
    return template


def _written(path: Path) -> str:
    """Returns a path as config.toml has it; an empty text where it is not given."""
    return "" if path == NOWHERE else str(path)


def _check_heldout(path: Path, heldout: Path | None, heldout_rows: int, required: str = "") -> None:
    """Raises ValueError where held-out rows are given twice, or not at all; `required` begins the latter message."""
    if heldout is not None and heldout_rows:
        raise ValueError("give heldout, or heldout_rows, not both")
    if heldout is None and not heldout_rows and path.suffix:
        raise ValueError(
            f"heldout: {required}{path} is a file, which has no splits; give the held-out rows, or heldout_rows, the "
            "number of its rows to hold out"
        )


Template = Annotated[str, AfterValidator(_check_template)]


class SourceTable(Strict):
    """One of several sources of the rows of a run; see docs/data.md."""

    path: Path = NOWHERE
    """Rows to train on: a JSONL, JSON, CSV or parquet file, a directory with a dataset, or the name of one on the
    Hugging Face hub. Not given: none; the source is only evaluated on, by its rows of `heldout`."""
    heldout: Path | None = None
    """Rows to evaluate on. Not given: `heldout_rows` of `path`, or its split `heldout_split`, where it is a dataset."""
    heldout_rows: int = Field(default=0, ge=0)
    """Number of rows of `path` that are held out: not trained on, but evaluated on; a fixed random choice. 0: none."""
    evaluated_rows: int = Field(default=0, ge=0)
    """Maximum number of held-out rows that are evaluated; a fixed random choice of them. 0: all."""
    evaluation: dict[str, JsonValue] = {}
    """Keys of `[rollout.evaluation]` with another value for the held-out rows of this source, for example
    `evaluation = { samples = 32, temperature = 0.6 }`."""
    name: str = ""
    """Name of the source in the rows' column `source`, and of its metrics. Empty: the path, or else `heldout`."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the source: its share of the rows of every step, relative to the weights of the other sources. Has no
    meaning for a source without `path`."""
    reward: str = "reward"
    """Reward of the source's rows: the name of a service, or of a table in `[rewards]`."""
    columns: dict[str, str] = {}
    """Names of the source's fields where they differ from this package's, for example
    `columns.prompt = "question"`."""
    split: str = "train"
    """For a dataset: name of the split to train on."""
    heldout_split: str = "test"
    """For a dataset: name of the split to evaluate on."""
    subset: str = ""
    """For a dataset: name of its configuration (subset), such as main. Empty: the default one."""
    system: str | None = None
    """System message of the source's conversations. Not given: `data.system`."""
    template: Template | None = None
    """Template of the source's prompts. Not given: `data.template`."""

    @property
    def label(self) -> str:
        """Name of the source; where `name` is empty, its path, or else that of its held-out rows."""
        return self.name or str(self.path if self.is_trained_on else self.heldout)

    @property
    def is_trained_on(self) -> bool:
        """Whether the source has rows to train on; all sources have rows to evaluate on."""
        return self.path != NOWHERE

    @field_serializer("path", when_used="json")
    def _written(self, path: Path) -> str:
        return _written(path)

    @model_validator(mode="after")
    def _check(self) -> SourceTable:
        if not self.is_trained_on and (self.heldout is None or self.heldout_rows):
            raise ValueError(
                "path: required, and not given; a source without path needs heldout, and can have no heldout_rows"
            )
        _check_heldout(self.path, self.heldout, self.heldout_rows)
        return self


class DataTable(Strict):
    """Sources of rows, which have fields `prompt`, `ground_truth` and any further ones; see docs/data.md."""

    train: Path = NOWHERE
    """Rows to train on: a JSONL, JSON, CSV or parquet file, a directory with a dataset, or the name of one on the
    Hugging Face hub. Required unless `sources` is given."""
    heldout: Path = NOWHERE
    """Rows to evaluate on, in the same forms as `train`. Not given: `heldout_rows` of `train`, or its split
    `heldout_split`, where it is a dataset."""
    heldout_rows: int = Field(default=0, ge=0)
    """Number of rows of `train` that are held out: not trained on, but evaluated on; a fixed random choice. 0: none."""
    evaluated_rows: int = Field(default=0, ge=0)
    """Maximum number of held-out rows that are evaluated; a fixed random choice of them. 0: all."""
    columns: dict[str, str] = {}
    """Names of the fields of `train` and `heldout` where they differ from this package's, for example
    `columns.prompt = "question"`."""
    split: str = "train"
    """For a dataset: name of the split to train on."""
    heldout_split: str = "test"
    """For a dataset: name of the split to evaluate on."""
    subset: str = ""
    """For a dataset: name of its configuration (subset), such as main. Empty: the default one."""
    sources: tuple[SourceTable, ...] = ()
    """Several weighted sources, each with its own reward and held-out rows, in place of the keys above."""
    shuffle: bool = True
    """Draws the rows of each pass in a random order. false: in the order of the file or dataset, pass after pass, for
    rows that are sorted as a curriculum."""
    turns: Literal["last", "all"] = "last"
    """Turns of the assistant that are trained of a transcript, a row with a whole conversation: the last one, or all,
    where each becomes a row of its own, with the messages before it as prompt. For algorithms that learn responses of
    the data, such as sft; see docs/data.md."""
    prompts_per_step: Positive = 128
    """Number of prompts in the batch of one step."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Maximum length of a prompt, in tokens. 0: the smallest limit of the services on a row, minus
    `rollout.max_response_tokens`."""
    overlong: Literal["skip", "error"] = "skip"
    """Handling of a row whose prompt, or whose text in `pretrain`, is too long: skip leaves it out and counts it,
    error ends the run."""
    tokenizer: Path | None = None
    """Model directory whose chat template renders prompts that are lists of messages, and whose tokenizer counts
    tokens. Not given: the model of the actor, or of the first service with one."""
    chat: bool = False
    """Renders prompts that are plain text with the chat template too, as one message of the user."""
    chat_options: dict[str, JsonValue] = {}
    """Variables for the chat template, as arguments of the tokenizer's apply_chat_template, for example
    `chat_options.enable_thinking = false`."""
    system: str = ""
    """System message that begins conversations without one. Empty: none."""
    template: Template = ""
    """Text around the prompt of a row, whose place is {prompt}; in a conversation, around the last message of the user.
    For example `"{prompt}\\nPut the final answer after ####."`. Empty: the prompt alone."""
    pretrain: Path | None = None
    """Pretraining texts, JSONL rows with a field `text`, whose loss algorithms with `pretrain_coefficient` add to the
    actor's. Not given: none."""

    @property
    def all_sources(self) -> tuple[SourceTable, ...]:
        """All sources: `sources`, or one that is made of the keys of a single source."""
        if self.sources:
            return self.sources
        heldout = None if self.heldout == NOWHERE else self.heldout
        return (
            SourceTable(path=self.train, heldout=heldout, **{key: getattr(self, key) for key in _OF_ROWS}),
        )

    @property
    def trained_sources(self) -> tuple[SourceTable, ...]:
        """Sources with rows to train on, at least one."""
        return tuple(source for source in self.all_sources if source.is_trained_on)

    @field_serializer("train", "heldout", when_used="json")
    def _written(self, path: Path) -> str:
        return _written(path)

    @field_validator("chat_options")
    @classmethod
    def _check_chat_options(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        wrong = sorted(SET_BY_RENDERING.intersection(options))
        if wrong:
            raise ValueError(f"{wrong[0]} is no variable of a template, or one that the data sets itself")
        return options

    @model_validator(mode="after")
    def _check(self) -> DataTable:
        if not self.sources:
            if self.train == NOWHERE:
                raise ValueError("train: required, and not given")
            heldout = None if self.heldout == NOWHERE else self.heldout
            _check_heldout(self.train, heldout, self.heldout_rows, "required, and not given: ")
            return self
        if self.train != NOWHERE or self.heldout != NOWHERE:
            raise ValueError("give train and heldout, or sources, not both")
        for key in _OF_ROWS:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key}: is a key of each table [[data.sources]] where there are several sources"
                )
        if not self.trained_sources:
            raise ValueError("sources: none has a path, so that there are no rows to train on")
        labels = [source.label for source in self.sources]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"sources: {twice[0]!r} is there twice; give each a name of its own")
        return self


_OF_ROWS = ("heldout_rows", "evaluated_rows", "columns", "split", "heldout_split", "subset")
"""Keys of `DataTable` that describe its single source as those of `SourceTable` describe one of several."""
