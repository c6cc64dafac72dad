"""Settings of the rows that a run trains and evaluates on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from settings.strict import Positive, Strict

NOWHERE = Path()
"""Value of a path that is not given."""


class SourceTable(Strict):
    """One of several sources of the rows of a run; see docs/data.md."""

    path: Path
    """Rows to train on: a JSONL or parquet file, a directory with a dataset, or the name of one on the Hugging Face
    hub."""
    heldout: Path | None = None
    """Rows to evaluate on. Not given: the split `heldout_split` of `path`, which must then be a dataset."""
    name: str = ""
    """Name of the source in the rows' column `source`. Empty: the path."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the source: its share of the rows of every step, relative to the weights of the other sources."""
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

    @property
    def label(self) -> str:
        """Name of the source, or its path where `name` is empty."""
        return self.name or str(self.path)

    @model_validator(mode="after")
    def _check(self) -> SourceTable:
        if self.heldout is None and self.path.suffix:
            raise ValueError(f"heldout: {self.path} is a file, which has no splits; give the held-out rows")
        return self


class DataTable(Strict):
    """Sources of rows, which have fields `prompt`, `ground_truth` and any further ones; see docs/data.md."""

    train: Path = NOWHERE
    """Rows to train on: a JSONL or parquet file, a directory with a dataset, or the name of one on the Hugging Face
    hub. Required unless `sources` is given."""
    heldout: Path = NOWHERE
    """Rows to evaluate on, in the same forms as `train`. Required unless `sources` is given."""
    sources: tuple[SourceTable, ...] = ()
    """Several weighted sources, each with its own reward, in place of `train` and `heldout`."""
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
    pretrain: Path | None = None
    """Pretraining texts, JSONL rows with a field `text`, whose loss algorithms with `pretrain_coefficient` add to the
    actor's. Not given: none."""

    @property
    def all_sources(self) -> tuple[SourceTable, ...]:
        """All sources: `sources`, or one that is made of `train` and `heldout`."""
        return self.sources or (SourceTable(path=self.train, heldout=self.heldout),)

    @model_validator(mode="after")
    def _check(self) -> DataTable:
        if self.sources:
            if self.train != NOWHERE or self.heldout != NOWHERE:
                raise ValueError("give train and heldout, or sources, not both")
            labels = [source.label for source in self.sources]
            twice = sorted({label for label in labels if labels.count(label) > 1})
            if twice:
                raise ValueError(f"sources: {twice[0]!r} is there twice; give each a name of its own")
        elif NOWHERE in (self.train, self.heldout):
            missing = "train" if self.train == NOWHERE else "heldout"
            raise ValueError(f"{missing}: required, and not given")
        return self
