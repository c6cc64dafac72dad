"""The rollout engine of an actor whose responses a rollout service generates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor

from rlhf.errors import Refused
from services.rollout.base import Generation, Meter, RolloutEngine, RolloutSetup, SamplingOptions
from settings.generation import GeneratingTable


class NoRollout(RolloutEngine):
    """Generates nothing, and takes neither weights nor memory."""

    limits = ("it generates no responses, since rollout_engine is none: a rollout service does",)

    @classmethod
    def create(cls, table: GeneratingTable, options: Any, setup: RolloutSetup) -> Self:
        return cls()

    def check_awake(self) -> None:
        """Raises Refused: the engine cannot generate, asleep or not."""
        raise Refused(
            "rollout_engine is none, so this service generates no responses: a rollout service does"
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.check_awake()

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, row_seeds: np.ndarray, meter: Meter
    ) -> Generation:
        raise AssertionError("generate checks first")

    def _free_memory(self) -> int:
        return 0

    def _take_memory(self) -> int:
        return 0
