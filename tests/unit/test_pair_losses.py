"""Losses of reward models and of supervised fine-tuning against loops in plain floats, and worked by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from controller.algorithms.reward_model import wilson_interval
from services.actor.losses import supervised_loss
from services.reward.losses import bradley_terry_loss, cost_loss, pair_loss


def minus_log_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)) - x


def test_bradley_terry_by_hand() -> None:
    # sigmoid(log 3) = 3/4: of four choices, three go to the response that is ahead by log 3.
    loss_B = bradley_terry_loss(torch.tensor([math.log(3), 0.0]), torch.zeros(2))
    assert loss_B.tolist() == pytest.approx([-math.log(3 / 4), math.log(2)])


def test_cost_by_hand() -> None:
    # An unsafe response of cost log 3 over a safe one of cost -log 3: 9/10, 3/4 and 3/4.
    high, low = torch.tensor([math.log(3)]), torch.tensor([-math.log(3)])
    loss_B = cost_loss(high, low, torch.tensor([1.0]), torch.tensor([-1.0]))
    assert loss_B.item() == pytest.approx(-math.log(9 / 10) - 2 * math.log(3 / 4))


@pytest.mark.parametrize("loss", ["bradley_terry", "cost"])
@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_add_up_to_the_mean_over_pairs(loss: str, seed: int) -> None:
    draw = random.Random(seed)
    num_pairs, expected, correct, margins = 7, 0.0, 0, 0.0
    scores = [draw.gauss(0, 3) for _ in range(2 * num_pairs)]
    signs = [draw.choice([-1.0, 1.0]) for _ in scores]
    for pair in range(num_pairs):
        chosen, rejected = scores[2 * pair], scores[2 * pair + 1]
        margin = chosen - rejected if loss == "bradley_terry" else rejected - chosen
        expected += minus_log_sigmoid(margin) / num_pairs
        if loss == "cost":
            expected += minus_log_sigmoid(signs[2 * pair] * chosen) / num_pairs
            expected += minus_log_sigmoid(signs[2 * pair + 1] * rejected) / num_pairs
        correct, margins = correct + (margin > 0), margins + margin
    scores_S, signs_S = torch.tensor(scores, dtype=torch.float64), torch.tensor(signs, dtype=torch.float64)
    parts = [
        pair_loss(scores_S[part], signs_S[part] if loss == "cost" else None, num_pairs=num_pairs)
        for part in (slice(0, 6), slice(6, 14))
    ]
    assert sum(total.item() for total, _ in parts) == pytest.approx(expected, rel=1e-12)
    assert sum(stats["accuracy"].item() for _, stats in parts) == correct
    assert sum(stats["margin"].item() for _, stats in parts) == pytest.approx(margins)


def test_scores_far_apart_lose_no_gradient() -> None:
    chosen = torch.tensor([-500.0], requires_grad=True)
    bradley_terry_loss(chosen, torch.tensor([500.0])).sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1)


@pytest.mark.parametrize("seed", range(5))
def test_supervised_loss_is_the_mean_over_response_tokens(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randrange(5) for _ in range(6)]
    log_probs = [[-draw.expovariate(1) for _ in range(length)] for length in lengths]
    num_tokens = sum(lengths)
    expected = -sum(sum(row) for row in log_probs) / max(num_tokens, 1)
    log_probs_BT = torch.full((6, 5), math.inf, dtype=torch.float64)
    for row, values in enumerate(log_probs):
        log_probs_BT[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    mask_BT = torch.arange(5) < torch.tensor(lengths)[:, None]
    shares = [
        supervised_loss(log_probs_BT[part], mask_BT[part], num_tokens=num_tokens)
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert sum(share.item() for share in shares) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # The first from Newcombe 1998, table I (method 3: 81/263); the ends by the formula's limits.
    [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0)],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)
