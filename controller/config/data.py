"""Settings of the rows that a run trains and evaluates on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from settings.strict import Positive, Strict

NOWHERE = Path()
"""Stands for a path that is not given."""


class SourceTable(Strict):
    """One of several sources of a run's rows; see docs/data.md."""

    path: Path
    """Rows to train on: a JSONL or parquet file, a directory with a dataset, or the name of one on the Hugging Face
    hub."""
    heldout: Path | None = None
    """Rows to evaluate on. None: the split `heldout_split` of `path`, which has to be a dataset."""
    name: str = ""
    """Its name in the rows' column `source`; empty: the path."""
    weight: float = Field(default=1.0, gt=0)
    """Share of its rows in every step, relative to the other sources'."""
    reward: str = "reward"
    """The reward of its rows: a service, or one of `[rewards]`."""
    columns: dict[str, str] = {}
    """Names of its fields, where they differ: `columns.prompt = "question"`."""
    split: str = "train"
    """Of a dataset: the split to train on."""
    heldout_split: str = "test"
    """Of a dataset: the split to evaluate on."""
    subset: str = ""
    """Of a dataset: its configuration, such as main."""

    @property
    def label(self) -> str:
        """The source's name, or else its path."""
        return self.name or str(self.path)

    @model_validator(mode="after")
    def _check(self) -> SourceTable:
        if self.heldout is None and self.path.suffix:
            raise ValueError(f"heldout: {self.path} is a file, which has no splits; give the held-out rows")
        return self


class DataTable(Strict):
    """Where rows come from: `prompt`, `ground_truth` and any further fields; see docs/data.md."""

    train: Path = NOWHERE
    """Rows to train on: a JSONL or parquet file, a directory with a dataset, or the name of one on the Hugging Face
    hub. Required, or else `sources`."""
    heldout: Path = NOWHERE
    """Rows to evaluate on, never trained on."""
    sources: tuple[SourceTable, ...] = ()
    """Several sources with weights, each with a reward of its own, in place of train and heldout."""
    prompts_per_step: Positive = 128
    """Prompts in the batch of one step."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Most tokens of a prompt; 0: the services' limits less `rollout.max_response_tokens`."""
    overlong: Literal["skip", "error"] = "skip"
    """Treatment of a row whose prompt, or whose text in `pretrain`, is longer: skip leaves it out and counts it,
    error ends the run."""
    tokenizer: Path | None = None
    """Model directory whose chat template renders prompts that are lists of messages, and whose tokenizer counts
    tokens. None: that of the actor, or of the first service with a model."""
    chat: bool = False
    """Renders plain-text prompts as a user's message in the chat template too."""
    pretrain: Path | None = None
    """Texts to keep training on beside the rewards: JSONL rows with `text`. For algorithms that read them."""

    @property
    def all_sources(self) -> tuple[SourceTable, ...]:
        """The sources; train and heldout count as one source."""
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
