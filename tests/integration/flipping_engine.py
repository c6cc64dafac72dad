"""A training engine of the tests, engine 3d in which a bit of a weight flips on the last rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from services.engines.base import StepResult
from services.engines.three_d.engine import ThreeDParallelEngine
from settings.engines import TRAINING_ENGINES, EngineSpec

FLIPS_AFTER = 2
"""Optimizer steps."""

spec = EngineSpec(
    implementation="integration.flipping_engine:FlippingEngine", keys=TRAINING_ENGINES["3d"].keys
)


class FlippingEngine(ThreeDParallelEngine):
    """Engine 3d, in which the lowest bit of a number flips after an optimizer step."""

    def step(self, *arguments: Any, **options: Any) -> StepResult:
        result = super().step(*arguments, **options)
        if self._num_steps == FLIPS_AFTER and dist.get_rank() == dist.get_world_size() - 1:
            flat = self._kept["model.norm.weight"].detach().view(-1)
            flat.view(torch.int32)[0] ^= 1
        return result
