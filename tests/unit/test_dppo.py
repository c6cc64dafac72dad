"""DPPO, the example of a loss outside the package, equals loops over tokens written from the paper, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.plugins import load_object
from settings.losses import LossSpec, find_policy_loss

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "plugins"
ROWS, TOKENS = 40, 6
SEEDS = range(5)


@pytest.fixture
def dppo(monkeypatch: pytest.MonkeyPatch) -> LossSpec:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return find_policy_loss("rlhf_example.losses:dppo")


def columns(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, old ones, advantages of both signs and 0, and a mask; the first rows have ratios that are
    beyond the clamp, and tokens whose probability did not change."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64)

    new, old = torch.log(1 - uniform() ** 2), torch.log(1 - uniform() ** 2)
    old[0], new[1], new[2] = -30.0, -30.0, old[2]
    advantages = torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    advantages[:, 3] = 0.0
    lengths = torch.randint(0, TOKENS + 1, (ROWS,), generator=generator)
    lengths[:3] = TOKENS
    return new, old, advantages, torch.arange(TOKENS) < lengths[:, None]


def oracle(new: float, old: float, advantage: float, delta: float) -> tuple[float, float, dict[str, float]]:
    """Loss of a token, its derivative by the token's log-probability, and the statistics."""
    difference = new - old
    ratio = math.exp(min(max(difference, -20.0), 20.0))
    tv = abs(math.exp(new) - math.exp(old))
    leaves = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
    masked = tv > delta and leaves
    statistics = {"ratio": ratio, "tv": tv, "masked": float(masked)}
    if masked:
        return 0.0, 0.0, statistics
    return -advantage * ratio, -advantage * ratio if abs(difference) <= 20 else 0.0, statistics


@pytest.mark.parametrize("delta", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_gradient_and_statistics_equal_the_loop(dppo: LossSpec, seed: int, delta: float) -> None:
    new, old, advantages, mask = columns(seed)
    new.requires_grad_()
    function: Any = load_object(dppo.function, object)
    loss, stats = function(new, old, advantages, mask, dppo.options.model_validate({"delta": delta}))
    loss[mask].sum().backward()
    assert new.grad is not None
    sums = dict.fromkeys(stats, 0.0)
    for row in range(ROWS):
        for t in range(TOKENS):
            if mask[row, t]:
                n, o, a = (column[row, t].item() for column in (new, old, advantages))
                value, slope, statistics = oracle(n, o, a, delta)
                assert loss[row, t].item() == pytest.approx(value, rel=1e-8, abs=1e-8)
                assert new.grad[row, t].item() == pytest.approx(slope, rel=1e-8, abs=1e-8)
                sums = {name: sums[name] + x for name, x in statistics.items()}
            else:
                assert new.grad[row, t].item() == 0
    assert {name: x.item() for name, x in stats.items()} == pytest.approx(sums, rel=1e-8)
    assert 0 < stats["masked"].item() < int(mask.sum())


@pytest.mark.parametrize("name", ["losses.py", "dppo.py"])
def test_the_page_shows_the_example_as_it_is(name: str) -> None:
    code = (EXAMPLE / "rlhf_example" / name).read_text()
    assert f"```python\n{code}```\n" in (EXAMPLE.parent.parent / "docs" / "losses.md").read_text()


def test_the_example_has_at_most_40_lines() -> None:
    files = [EXAMPLE / "rlhf_example" / name for name in ("losses.py", "dppo.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 40
