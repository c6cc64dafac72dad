"""Rewards that are normalized and clipped before advantages are computed of them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.rows import jagged
from unit.simulated_run import QUICKSTARTS, Simulation, Weather, simulate

from controller.advantage.groups import group_advantage
from controller.advantage.shaping import ScoreMoments, shape_scores
from controller.algorithms import find_algorithm
from controller.config.config import load
from rlhf.errors import ConfigError

SCORES = st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=1, max_size=9)
NO_KL = "algorithm.kl_reward_coefficient=0"
LEARNING_FROM_REWARDS = {
    "ppo": (NO_KL,),
    "remax": (NO_KL,),
    "rloo": (NO_KL,),
    "reinforce_pp": (NO_KL,),
    "safe_rlhf": (NO_KL,),
    "grpo": (),
    "dr_grpo": (),
    "gspo": (),
    "cispo": (),
    "dapo": (),
}
"""Algorithms, with settings under which their metric reward/mean is the mean of what advantages are computed of."""


def normalized(score: float, all_scores: list[float]) -> float:
    variance = statistics.variance(all_scores) if len(all_scores) > 1 else 0.0
    return (score - statistics.fmean(all_scores)) / math.sqrt(variance + 1e-8)


def rewards_of(run: Simulation, step: int) -> list[float]:
    """The rewards of a step as its services gave them."""
    return [row["reward"] for row in run.notes.rollouts_of[step]]


@given(batches=st.lists(SCORES, min_size=1, max_size=6))
def test_moments_are_those_of_all_scores_so_far(batches: list[list[float]]) -> None:
    moments, so_far = ScoreMoments(), []
    for batch in batches:
        moments.add(np.asarray(batch))
        so_far += batch
        expected = [normalized(score, so_far) for score in batch]
        np.testing.assert_allclose(shape_scores(np.asarray(batch), moments), expected, rtol=1e-9, atol=1e-6)
    assert moments.count == len(so_far)
    assert moments.mean == pytest.approx(statistics.fmean(so_far), abs=1e-9)


def test_scores_far_from_0_lose_no_precision() -> None:
    moments = ScoreMoments()
    for _ in range(1000):
        moments.add(np.array([1e9, 1e9 + 1]))
    assert moments.variance == pytest.approx(2000 * 0.25 / 1999, rel=1e-6)


def test_equal_scores_and_a_single_one_are_0() -> None:
    for scores in (np.full(4, 0.5), np.array([3.0])):
        moments = ScoreMoments()
        moments.add(scores)
        assert shape_scores(scores, moments).tolist() == [0.0] * len(scores)


def test_scores_are_clipped_after_they_are_normalized() -> None:
    moments = ScoreMoments(count=3, mean=1.0, squares=8.0)
    found = shape_scores(np.array([-9.0, 1.0, 2.0]), moments, (-1.0, 1.0))
    np.testing.assert_allclose(found, [-1.0, 0.0, 0.5], rtol=1e-8)


def test_scores_per_token_are_clipped_one_by_one_and_not_normalized() -> None:
    scores = jagged([[3.0, -3.0], [], [0.5]])
    found = shape_scores(scores, clip=(-1.0, 1.0))
    assert found.values.tolist() == [1.0, -1.0, 0.5]
    assert found.lengths.tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="rewards per token cannot be normalized"):
        ScoreMoments().add(scores)


def test_a_score_that_is_not_finite_is_refused_and_spoils_no_moments() -> None:
    moments = ScoreMoments()
    with pytest.raises(ValueError, match="not finite"):
        moments.add(np.array([1.0, np.nan]))
    assert moments == ScoreMoments()


def test_dr_grpo_of_rewards_normalized_by_batch_divides_by_the_deviation_of_the_batch() -> None:
    """Which is `scale_rewards = "batch"` of TRL."""
    scores, group = np.array([0.0, 1.0, 1.0, 4.0, 2.0, 2.0]), np.array([0, 0, 1, 1, 2, 2])
    moments = ScoreMoments()
    moments.add(scores)
    lengths = np.ones(6, np.int64)
    found = group_advantage(shape_scores(scores, moments), lengths, group, normalize_std=False)
    deviation = statistics.stdev(scores.tolist())
    expected = [(-0.5) / deviation, 0.5 / deviation, -1.5 / deviation, 1.5 / deviation, 0.0, 0.0]
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", LEARNING_FROM_REWARDS)
def test_every_algorithm_that_learns_from_rewards_shapes_them(name: str, tmp_path: Path) -> None:
    settings = (*LEARNING_FROM_REWARDS[name], "run.steps=3", "run.rollouts_every=1")
    shaping = ("algorithm.reward_normalization='running'", "algorithm.reward_clip=[-0.5,0.75]")
    run, so_far = simulate(tmp_path, name, *settings, *shaping), []
    for step in (1, 2, 3):
        given = rewards_of(run, step)
        so_far += given
        values = [normalized(reward, so_far) for reward in given]
        expected = [min(max(value, -0.5), 0.75) for value in values]
        metrics = run.notes.metrics[step]
        assert metrics["reward/mean"] == pytest.approx(statistics.fmean(expected), abs=1e-7)
        assert metrics["score/mean"] == pytest.approx(statistics.fmean(given)), "as they were given"
        outside = [value for value in values if not -0.5 <= value <= 0.75]
        assert metrics["score/clipped"] == pytest.approx(len(outside) / len(values))
        assert outside


def test_the_reward_of_the_greedy_response_is_shaped_as_the_others(tmp_path: Path) -> None:
    settings = (NO_KL, "run.steps=2")
    plain = simulate(tmp_path, "remax", *settings)
    clipped = simulate(tmp_path, "remax", *settings, "algorithm.reward_clip=[2,3]")
    assert plain.notes.metrics[1]["baseline/mean"] < 2
    assert clipped.notes.metrics[1]["baseline/mean"] == 2.0
    assert clipped.notes.metrics[1]["advantage/mean"] == 0.0


def test_distillation_shapes_the_reward_that_it_mixes_in(tmp_path: Path) -> None:
    options = ("algorithm.options={reward_coefficient=0.5}", "run.steps=1")
    metrics = [
        simulate(tmp_path, "distill", *options, *shaping).notes.metrics[1]
        for shaping in ((), ("algorithm.reward_clip=[2,3]",))
    ]
    assert metrics[0]["score/mean"] == metrics[1]["score/mean"]
    assert (metrics[0]["group/same_score"] < 1, metrics[1]["group/same_score"]) == (True, 1.0)


def test_costs_are_not_shaped(tmp_path: Path) -> None:
    settings = (NO_KL, "run.steps=1")
    costs = [
        simulate(tmp_path, "safe_rlhf", *settings, *shaping).notes.metrics[1]["cost/mean"]
        for shaping in ((), ("algorithm.reward_normalization='batch'", "algorithm.reward_clip=[2,3]"))
    ]
    assert costs[0] == costs[1] != 0


def test_dynamic_sampling_looks_at_the_rewards_as_they_were_given(tmp_path: Path) -> None:
    settings = ("run.steps=2", "run.rollouts_every=1")
    plain = simulate(tmp_path, "dapo", *settings)
    clipped = simulate(tmp_path, "dapo", *settings, "algorithm.reward_clip=[2,3]")
    for name in ("groups/rounds", "groups/trained"):
        assert plain.notes.metrics[1][name] == clipped.notes.metrics[1][name]
    assert clipped.notes.metrics[1]["group/same_score"] == 1.0


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_running_moments_are_part_of_a_checkpoint_and_come_in_the_order_of_the_steps(
    name: str, tmp_path: Path
) -> None:
    settings = ("run.ahead=1", "run.steps=6", "algorithm.reward_normalization='running'")
    whole = simulate(tmp_path, name, *settings, every=2, weather=Weather(seed=3, longest_s=0.002))
    assert whole.saver.saved[4][0]["kept"]["reward_moments"]["count"] == 4 * 8
    rest = simulate(tmp_path, name, *settings, every=2, resumed=whole.saver.saved[4])
    assert rest.states() == whole.states()
    assert rest.notes.metrics == {step: found for step, found in whole.notes.metrics.items() if step > 4}
    fresh = simulate(tmp_path, name, *settings, every=2)
    assert fresh.notes.metrics == whole.notes.metrics


@pytest.mark.parametrize("shaping", ["reward_normalization='batch'", "reward_normalization='running'"])
def test_rows_in_chunks_wait_for_all_rewards_that_they_are_normalized_by(
    shaping: str, tmp_path: Path
) -> None:
    settings = ("run.steps=3", f"algorithm.{shaping}")
    whole = simulate(tmp_path, "grpo", *settings)
    found = simulate(tmp_path, "grpo", *settings, "rollout.chunks=4")
    assert found.states() == whole.states()
    assert not [entry for entry in found.log if entry.method == "prepare_update"]


def test_rows_in_chunks_are_clipped_early(tmp_path: Path) -> None:
    settings = ("run.steps=3", "algorithm.reward_clip=[0.3,0.8]")
    whole = simulate(tmp_path, "grpo", *settings)
    found = simulate(tmp_path, "grpo", *settings, "rollout.chunks=4")
    assert found.states() == whole.states()
    assert [entry for entry in found.log if entry.method == "prepare_update"]


def test_without_shaping_nothing_is_kept_and_no_metric_is_added(tmp_path: Path) -> None:
    run = simulate(tmp_path, "grpo", "run.steps=2", every=1)
    assert run.saver.saved[2][0]["kept"] == {}
    assert "score/clipped" not in run.notes.metrics[1]


def test_a_clip_needs_a_low_end_below_the_high_one() -> None:
    with pytest.raises(ConfigError, match="reward_clip: the first number has to be below the second"):
        load(QUICKSTARTS / "quickstart.toml", ("algorithm.reward_clip=[1,1]",))


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_algorithms_that_learn_from_no_reward_refuse_to_shape_one(name: str) -> None:
    algorithm = find_algorithm(name)
    config = load(QUICKSTARTS / f"{algorithm.quickstart}.toml", ("algorithm.reward_clip=[0,1]",))
    with pytest.raises(ConfigError, match=f"algorithm.reward_clip: {name} has no use for this"):
        algorithm.configure(config)
