"""How far rollout and training are apart: the figures, and the threshold that ends a run."""

from __future__ import annotations

import math

import pytest
import torch

from controller.role_groups.dataflow import CallRecord
from controller.training.parity import DriftCheck, parity_metrics
from rlhf.errors import RlhfError
from rlhf.v1 import actor_pb2
from services.actor.parity import rollout_parity


def record(*parities: actor_pb2.RolloutParity | None) -> CallRecord:
    """A call of compute_log_prob whose ranks found these; None: a rank that compared nothing."""
    answers = tuple(actor_pb2.ComputeLogProbResponse(parity=parity) for parity in parities)
    return CallRecord("actor", "compute_log_prob", 0.0, 1.0, {}, 1, answers)


def found(max_abs: float) -> actor_pb2.RolloutParity:
    return actor_pb2.RolloutParity(tokens=3, max_abs=max_abs, sum_abs=max_abs, sum_kl=max_abs)


def test_differences_are_those_of_each_token_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(50, generator=generator)
    training = rollout + 0.1 * torch.randn(50, generator=generator)
    differences = [float(b) - float(a) for a, b in zip(rollout, training, strict=True)]
    parity = rollout_parity(rollout, training)
    assert parity.tokens == 50
    assert parity.max_abs == max(abs(x) for x in differences)
    assert parity.sum_abs == pytest.approx(math.fsum(abs(x) for x in differences), rel=1e-12)
    assert parity.sum_kl == pytest.approx(math.fsum(math.exp(x) - 1 - x for x in differences), rel=1e-9)


def test_a_rank_without_tokens_has_found_nothing() -> None:
    assert rollout_parity(torch.empty(0), torch.empty(0)) == actor_pb2.RolloutParity()


def test_a_value_for_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout_log_probs has 1 values for 3 response tokens"):
        rollout_parity(torch.zeros(1), torch.zeros(3))


def test_metrics_take_the_largest_and_the_mean_over_tokens_of_all_ranks_and_calls() -> None:
    one = actor_pb2.RolloutParity(tokens=3, max_abs=0.25, sum_abs=0.5, sum_kl=0.75)
    other = actor_pb2.RolloutParity(tokens=1, max_abs=0.5, sum_abs=0.5, sum_kl=0.25)
    update = CallRecord("actor", "update_actor", 0.0, 1.0, {}, 1, (actor_pb2.UpdateActorResponse(),))
    expected = {"rollout/parity_max_abs": 0.5, "rollout/parity_mean_abs": 0.25, "rollout/kl": 0.25}
    assert parity_metrics([record(one, None, other), update]) == expected
    assert parity_metrics([record(one), record(other)]) == expected


def test_where_nothing_was_compared_there_are_no_metrics() -> None:
    assert parity_metrics([record(None, None)]) == {}


def test_a_drift_up_to_the_limit_passes() -> None:
    passed = record(found(0.1), found(0.5))
    assert DriftCheck(step=3, limit=0.5)(passed) is passed


@pytest.mark.parametrize(
    ("parities", "reason"),
    [
        (
            [0.1, 0.25],
            "step 3: .* of actor's rollout and training are up to 0.25 apart, .*max_log_prob_drift, 0.2",
        ),
        ([math.nan, 0.1], "step 3: .* up to nan apart"),
        ([0.1, math.nan], "step 3: .* up to nan apart"),
        ([], "step 3: actor does not say"),
    ],
)
def test_a_drift_that_is_too_large_or_unknown_is_an_error(parities: list[float], reason: str) -> None:
    with pytest.raises(RlhfError, match=reason):
        DriftCheck(step=3, limit=0.2)(record(None, *map(found, parities)))
