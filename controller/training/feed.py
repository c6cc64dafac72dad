"""Draws the rows of the training data, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from controller.config.config import Config
from controller.data.draws import Limit, draw
from controller.data.loader import Loader, Position, State
from controller.data.prompts import PromptData, TextData, columns_of
from controller.role_groups.dataflow import FutureBatch
from rlhf.errors import ConfigError


class Feed:
    """Draws the prompts and the pretraining texts of each step.

    Args:
        config: Configuration of the run.
        prompts: Prompts to train on.
        texts: Texts of data.pretrain; None where it is not set.
        limits: Limits on the length of prompts and of texts; None: any length.

    Attributes:
        loader: Loader that draws the prompts.
        text_loader: Loader that draws the texts; None without texts.
        batches_drawn: Number of batches of prompts drawn so far.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptData,
        texts: TextData | None,
        limits: tuple[Limit | None, Limit | None],
    ) -> None:
        seed, weights = config.run.seed, [source.weight for source in config.data.trained_sources]
        self.loader = Loader(prompts.sizes, weights, seed, shuffles=config.data.shuffle)
        self.text_loader = Loader([len(texts)], [1.0], seed, "pretrain") if texts else None
        self.batches_drawn = 0
        self._config = config
        self._prompts = prompts
        self._texts = texts
        self._limit, self._text_limit = limits

    def next_prompts(self) -> tuple[FutureBatch, FutureBatch]:
        """Draws the prompts of the next batch. Returns two batches of the same rows: the prompts, each repeated
        rollout.samples_per_prompt times, and column "group", the number of each row's prompt, unique in the run. The
        prompts have the same numbers as column "prompt_number", so that every batch made from them does."""
        config, count = self._config, self._config.data.prompts_per_step
        numbers = self.batches_drawn * count + np.arange(count)
        self.batches_drawn += 1
        drawn = draw(self._prompts, self.loader, count, self._limit, lambda prompt: prompt.text)
        samples = config.rollout.samples_per_prompt
        prompts = columns_of(drawn) | FutureBatch.of(prompt_number=numbers)
        return prompts.repeat(samples), FutureBatch.of(group=numbers).repeat(samples)

    def next_texts(self) -> FutureBatch:
        """Draws as many pretraining texts as a step has rows, and returns them as column "pretrain_text"; no column
        where there are no texts."""
        rows = self._config.rows_per_step
        if self._texts is None or self.text_loader is None:
            return FutureBatch(rows, {})
        return FutureBatch.of(pretrain_text=draw(self._texts, self.text_loader, rows, self._text_limit, str))

    def state(self) -> dict[str, Any]:
        """Returns the position in prompts and texts as JSON values."""
        texts = self.text_loader
        return {
            "prompts": asdict(self.loader.state),
            "texts": asdict(texts.state) if texts else None,
            "batches_drawn": self.batches_drawn,
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Sets the position to one that `state` returned. Raises ConfigError if the position belongs to other data."""
        if (stored["texts"] is None) != (self.text_loader is None):
            raise ConfigError("data.pretrain: a resumed run can neither add nor remove pretraining texts")
        self.loader.restore(_loader_state(stored["prompts"]))
        if self.text_loader is not None:
            self.text_loader.restore(_loader_state(stored["texts"]))
        self.batches_drawn = stored["batches_drawn"]

    @property
    def left_out(self) -> dict[str, int]:
        """Metrics with the number of rows that were left out so far because they are too long, by name."""
        loaders = {"data/prompts_left_out": self.loader, "data/texts_left_out": self.text_loader}
        return {
            name: sum(position.left_out for position in loader.state.positions)
            for name, loader in loaders.items()
            if loader is not None
        }


def _loader_state(stored: Mapping[str, Any]) -> State:
    positions = tuple(Position(**position) for position in stored["positions"])
    return State(stored["seed"], tuple(stored["sizes"]), positions)
