"""Learning rates of all steps, by their closed forms."""

import math
from typing import Any

import pytest

from rlhf.errors import ConfigError
from services.engines.base import OptimizerOptions
from settings.model import OptimizerTable
from settings.strict import validate

LR, WARMUP, TOTAL = 3e-4, 4, 20


def rates(schedule: Any, min_ratio: float = 0.0) -> list[float]:
    """As shares of the highest, of five steps more than there are."""
    total = 0 if schedule == "constant" else TOTAL
    options = OptimizerOptions(
        lr=LR, warmup_steps=WARMUP, schedule=schedule, total_steps=total, min_ratio=min_ratio
    )
    return [options.lr_at(step) / LR for step in range(TOTAL + 5)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_warm_up_rises_to_the_highest_whatever_follows(schedule: str):
    assert rates(schedule, 0.0)[: WARMUP + 1] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_a_constant_rate_stays():
    assert rates("constant")[WARMUP:] == [1.0] * (TOTAL + 5 - WARMUP)


def test_a_linear_rate_falls_by_equal_parts_to_its_lowest_and_stays():
    falling = [1 - 0.9 * step / 16 for step in range(16)]
    assert rates("linear", 0.1)[WARMUP:] == pytest.approx([*falling, *[0.1] * 5])


def test_a_cosine_rate_falls_along_half_a_cosine_to_its_lowest_and_stays():
    falling = [0.2 + 0.8 * math.cos(math.pi * step / 32) ** 2 for step in range(16)]
    assert rates("cosine", 0.2)[WARMUP:] == pytest.approx([*falling, *[0.2] * 5])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "given are 5 and 5"),
        ({"schedule": "linear", "total_steps": 5, "warmup_ratio": 0.95}, "given are 5 and 5"),
        ({"warmup_ratio": 0.5, "warmup_steps": 5}, "give warmup_steps or warmup_ratio, not both"),
        ({"total_steps": 5}, "total_steps for these and for warmup_ratio"),
        ({"min_ratio": 0.1}, "min_ratio is for schedule cosine and linear"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(table: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        validate(OptimizerTable, table, "test")
