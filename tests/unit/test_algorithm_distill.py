"""On-policy distillation: its advantages equal a loop written from the formula, and give the gradient of the reverse
KL, which autograd computes from the distributions of a small student and teacher."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.rows import LENGTHS, SEEDS, assert_rows, discounted, jagged, random_column, rows_of

from controller.algorithms import find_algorithm
from controller.algorithms.distill import distill_advantage
from controller.config.config import Config, load
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "distill.toml"
TOKENS = 3
"""Size of the vocabulary of the small models."""


def test_a_hand_worked_example() -> None:
    # log p_teacher - log p_student is 1, -2 | 3; half of what is later is added: 1 - 1, -2 | 3.
    found = distill_advantage(jagged([[-2, -1], [-4]]), jagged([[-1, -3], [-1]]), discount=0.5)
    assert found.advantages.values.tolist() == [0.0, -2.0, 3.0]
    assert found.metrics["kl/mean"] == pytest.approx(-2 / 3)
    assert found.metrics["kl/sequence_mean"] == -1.0


@given(LENGTHS, SEEDS, st.floats(0, 1), st.sampled_from([0.0, 0.3, 2.0]))
def test_advantages_equal_the_loop(lengths: list[int], seed: int, discount: float, weight: float) -> None:
    rng = np.random.default_rng(seed)
    student, teacher = random_column(rng, lengths), random_column(rng, lengths)
    scores, group = rng.normal(size=len(lengths)), rng.integers(0, 3, len(lengths))
    scored = (scores, group) if weight else ()
    found = distill_advantage(student, teacher, *scored, discount=discount, reward_coefficient=weight)
    expected = []
    for row, (p, q) in enumerate(zip(rows_of(student), rows_of(teacher), strict=True)):
        same = [scores[i] for i in range(len(lengths)) if group[i] == group[row]]
        above = weight * (scores[row] - (statistics.fmean(same) if len(same) > 1 else 0.0))
        later = discounted([b - a for a, b in zip(p, q, strict=True)], discount)
        expected.append([each + above for each in later])
    assert_rows(found.advantages, expected)


@pytest.mark.parametrize("discount", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_expected_policy_gradient_is_that_of_the_reverse_kl(seed: int, discount: float) -> None:
    """Over all responses of two tokens: with discount 1 of the KL of whole responses, and with 0 of the KL of each
    token, at prefixes that are taken as given."""
    draw = torch.Generator().manual_seed(seed)
    first_V = torch.randn(TOKENS, generator=draw, dtype=torch.float64, requires_grad=True)
    second_VV = torch.randn(TOKENS, TOKENS, generator=draw, dtype=torch.float64, requires_grad=True)
    parameters = first_V, second_VV
    student = [torch.log_softmax(logits, -1) for logits in parameters]
    teacher = [
        torch.log_softmax(torch.randn(logits.shape, generator=draw, dtype=torch.float64), -1)
        for logits in parameters
    ]
    responses = list(itertools.product(range(TOKENS), repeat=2))

    def log_probs_R2(model: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.stack([model[0][a], model[1][a, b]]) for a, b in responses])

    own_R2, other_R2 = log_probs_R2(student), log_probs_R2(teacher)
    lengths = np.full(len(responses), 2)
    own, other = (Jagged(each.detach().numpy().ravel(), lengths) for each in (own_R2, other_R2))
    advantages_R2 = torch.tensor(distill_advantage(own, other, discount=discount).advantages.values).view(
        -1, 2
    )
    shares_R = own_R2.sum(1).exp().detach()
    surrogate = -(shares_R[:, None] * advantages_R2 * own_R2).sum()

    kl_of_second_V = (student[1].exp() * (student[1] - teacher[1])).sum(1)
    reached_V = student[0].exp() if discount else student[0].exp().detach()
    loss = (student[0].exp() * (student[0] - teacher[0])).sum() + (reached_V * kl_of_second_V).sum()
    found, expected = (torch.autograd.grad(each, parameters, retain_graph=True) for each in (surrogate, loss))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_score_that_is_not_finite_is_refused() -> None:
    column = jagged([[0.0], [0.0]])
    with pytest.raises(ValueError, match="not finite"):
        distill_advantage(column, column, np.array([1.0, np.nan]), np.zeros(2), reward_coefficient=1.0)


def configured(*settings: str, without: tuple[str, ...] = ()) -> Config:
    config = load(QUICKSTART, settings)
    services = {name: table for name, table in config.services.items() if name not in without}
    return find_algorithm("distill").configure(config.model_copy(update={"services": services}))


MIXED = "algorithm.options.reward_coefficient=0.5"
LORA = "services.actor.lora.rank=4"


@pytest.mark.parametrize(
    ("settings", "without", "cause"),
    [
        ((), ("reference",), "services.reference: distill needs this service, of role reference"),
        ((LORA,), ("reference",), r"services\.reference\.model: .* another model .* \(given: none\)"),
        (
            ("services.reference.model='runs/arithmetic/model'",),
            (),
            r"services\.reference\.model: .* another model .* \(given: runs/arithmetic/model\)",
        ),
        (
            (MIXED,),
            (),
            r"rollout\.samples_per_prompt: reward_coefficient compares .* at least 2 \(given: 1\)",
        ),
        ((MIXED, "rollout.samples_per_prompt=2"), ("reward",), "reward_coefficient: needs a service reward"),
        (("algorithm.options.discount=1.5",), (), "discount: must be at most 1"),
        (
            ("algorithm.reward_clip=[0,1]",),
            (),
            r"algorithm\.reward_clip: distill learns from no reward unless",
        ),
        (
            ("algorithm.reward_normalization='running'",),
            (),
            "reward_normalization and .* from no reward unless",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: tuple[str, ...], without: tuple[str, ...], cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause):
        configured(*settings, without=without)


def test_a_reward_is_used_where_there_is_one() -> None:
    assert configured().services.keys() == {"actor", "reference", "reward"}
    assert configured(without=("reward",)).services.keys() == {"actor", "reference"}


def test_a_rollout_service_generates_without_a_reward() -> None:
    rollout = "services.rollout={role='rollout',address='127.0.0.1:7109',device='cpu',model='runs/arithmetic/model'}"
    config = configured(rollout, "services.actor.rollout_engine='none'", without=("reward",))
    assert config.services.keys() == {"actor", "reference", "rollout"}
