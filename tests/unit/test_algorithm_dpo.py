"""DPO: its advantages give the gradient of its loss, which autograd computes from the formulas of the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from controller.algorithms import find_algorithm
from controller.algorithms.dpo import DPOOptions, dpo_advantage, pair_loss
from controller.config.config import Config
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError

PAIRS = 5
LENGTHS = np.array([3, 1, 4, 2, 5, 2, 6, 1, 1, 3])
"""Tokens of the chosen responses, then of the rejected ones."""
CASES = [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)]


def losses_of(h_P: torch.Tensor, beta: float, loss: str, label_smoothing: float) -> torch.Tensor:
    """The losses of pairs, from the formulas: [pairs]."""
    if loss == "ipo":
        return (h_P - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        return torch.relu(1 - beta * h_P)
    return -(1 - label_smoothing) * logsigmoid(beta * h_P) - label_smoothing * logsigmoid(-beta * h_P)


def drawn(seed: int) -> tuple[Jagged[np.ndarray], Jagged[np.ndarray]]:
    """Log-probabilities of the responses under policy and reference."""
    draw = np.random.default_rng(seed)
    values = -draw.exponential(3.0, (2, LENGTHS.sum()))
    return Jagged(values[0], LENGTHS), Jagged(values[1], LENGTHS)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("loss", "label_smoothing"), CASES)
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_a_policy_gradient_with_the_advantages_is_the_gradient_of_the_loss(
    beta: float, loss: str, label_smoothing: float, seed: int
) -> None:
    policy, reference = drawn(seed)
    found = dpo_advantage(policy, reference, beta=beta, loss=loss, label_smoothing=label_smoothing)

    tokens_T = torch.tensor(policy.values, requires_grad=True)
    of_token_T = torch.tensor(np.repeat(np.arange(2 * PAIRS), LENGTHS))
    ratios_R = torch.zeros(2 * PAIRS, dtype=torch.float64).index_add(
        0, of_token_T, tokens_T - torch.tensor(reference.values)
    )
    mean_loss = losses_of(ratios_R[:PAIRS] - ratios_R[PAIRS:], beta, loss, label_smoothing).mean()
    (gradient_T,) = torch.autograd.grad(mean_loss, tokens_T)
    # The update's loss is the mean over responses of the sums of -A rho over their tokens, and d rho = d log p.
    update_T = -np.repeat(found.advantages, LENGTHS) / (2 * PAIRS)
    np.testing.assert_allclose(update_T, gradient_T.numpy(), rtol=1e-12, atol=1e-15)

    ratios = ratios_R.detach().numpy()
    assert found.metrics["dpo/loss"] == pytest.approx(mean_loss.item(), rel=1e-12)
    assert found.metrics["dpo/accuracy"] == np.mean(ratios[:PAIRS] > ratios[PAIRS:])
    assert found.metrics["dpo/chosen_reward"] == pytest.approx(beta * ratios[:PAIRS].mean())
    assert found.metrics["dpo/rejected_reward"] == pytest.approx(beta * ratios[PAIRS:].mean())
    margin = found.metrics["dpo/chosen_reward"] - found.metrics["dpo/rejected_reward"]
    assert found.metrics["dpo/margin"] == pytest.approx(margin)
    assert found.metrics["dpo/chosen_log_prob"] == pytest.approx(
        policy.values[: LENGTHS[:PAIRS].sum()].sum() / PAIRS
    )


def test_by_hand() -> None:
    """At the reference, the loss of a pair is log 2 and its slope -beta / 2; where sigmoid(beta h) is 3/4, a quarter
    of beta is left."""
    losses, slopes = pair_loss(np.array([0.0, math.log(3) / 0.5]), 0.5, "sigmoid", 0.0)
    assert losses.tolist() == pytest.approx([math.log(2), -math.log(3 / 4)])
    assert slopes.tolist() == pytest.approx([-0.25, -0.125])


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_log_ratios_far_apart_lose_nothing(label_smoothing: float) -> None:
    losses, slopes = pair_loss(np.array([-1e5, 1e5]), 1.0, "sigmoid", label_smoothing)
    assert losses.tolist() == pytest.approx([1e5 * (1 - label_smoothing), 1e5 * label_smoothing])
    assert slopes.tolist() == pytest.approx([label_smoothing - 1, label_smoothing])


def configured(rollout: dict[str, float] | None = None, **options: object) -> Config:
    model = {
        "role": "actor",
        "address": "127.0.0.1:1",
        "model": "model",
        "optimizer": {"learning_rate": 1e-4},
    }
    config = Config.model_validate(
        {
            "data": {"train": "pairs.jsonl", "heldout": "pairs.jsonl", "prompts_per_step": 128},
            "rollout": rollout or {},
            "algorithm": {"options": options},
            "services": {
                "actor": model,
                "reference": {"role": "reference", "address": "127.0.0.1:2", "model": "model"},
            },
        }
    )
    return find_algorithm("dpo").configure(config)


@pytest.mark.parametrize(
    ("rollout", "options", "cause"),
    [
        ({"temperature": 0.7}, {}, r"rollout\.temperature: .* has to be 1 \(given: 0\.7\)"),
        ({"samples_per_prompt": 2}, {}, r"rollout\.samples_per_prompt: .* has to be 1 \(given: 2\)"),
        ({}, {"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing: only loss sigmoid reads it"),
        ({}, {"beta": 0}, "beta: must be above 0"),
        ({}, {"label_smoothing": 0.5}, r"label_smoothing: must be below 0\.5"),
        ({}, {"loss": "kto"}, "loss: must be 'sigmoid', 'ipo' or 'hinge'"),
    ],
)
def test_what_does_not_fit_is_refused(
    rollout: dict[str, float], options: dict[str, object], cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause):
        configured(rollout, **options)


def test_its_loss_is_the_sum_over_a_response() -> None:
    config = configured()
    with pytest.raises(ConfigError, match=r"algorithm\.aggregation: has to be seq-mean-token-sum"):
        find_algorithm("dpo").configure(
            config.model_copy(
                update={"algorithm": config.algorithm.model_copy(update={"aggregation": "token-mean"})}
            )
        )
    assert config.algorithm.aggregation == "seq-mean-token-sum"
    assert DPOOptions.model_validate(config.algorithm.options) == DPOOptions()
