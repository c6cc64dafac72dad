"""ReMax (Li et al. 2024, arXiv 2310.10505): REINFORCE with the reward of the greedy response as baseline, as in
Figure 6 of HybridFlow: a second generation instead of a critic."""

from __future__ import annotations

import numpy as np

from controller.advantage import (
    Advantage,
    FloatColumn,
    KlController,
    Scores,
    discounted_returns,
    kl_controller,
    penalized_rewards,
    sequence_scores,
    spread,
    steer,
)
from controller.advantage.columns import advantage_metrics, float64, make_column, mean
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import KL_REWARD, POLICY, REWARD, algorithm
from controller.training.run import Run
from controller.training.step import Step


@algorithm(services=("actor", "reference", "reward"), reads=(*POLICY, *REWARD, *KL_REWARD))
def remax(run: Run) -> None:
    """Actor, reference and reward; KL in the reward."""
    actor, reference, reward = run.actor(), run.reference(), run.reward()
    kl = run.keep("kl", kl_controller(run.config.algorithm))
    for step in run.steps():
        batch = step.prompts | actor.generate_sequences(step.prompts)
        each = step.prompts.take(np.arange(0, step.prompts.rows, run.config.rollout.samples_per_prompt))
        greedy = each | actor.generate_sequences(each, greedy=True)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch = reward.score(batch, baselines=greedy)
        batch |= compute_advantage(run, step, batch, kl)
        step.finish(batch, actor.update_actor(batch))


def compute_advantage(run: Run, step: Step, batch: FutureBatch, kl: KlController) -> FutureBatch:
    """Column advantages, from both rewards and the log-probabilities."""
    columns = run.fetch(batch, "log_probs", "ref_log_probs", "rewards", "baselines")
    kind = run.config.algorithm.kl_reward_estimator
    made = step.compute(remax_advantage, *columns.values(), beta=kl.beta, kl_kind=kind)
    steer(kl, step.metrics, batch.rows)
    return made


def remax_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn,
    scores: Scores,
    baselines: Scores,
    *,
    beta: float,
    kl_kind: str = "k1",
) -> Advantage:
    """At every token the sum of the rewards from there on, minus the score of the greedy response (algorithm 1).

    Returns:
        Advantages, and as metrics those of `penalized_rewards`, with `baseline/mean`, `advantage/mean` and
        `advantage/std`.

    Raises:
        ValueError: as `penalized_rewards`.
    """
    rewards, metrics = penalized_rewards(scores, log_probs, ref_log_probs, beta=beta, kl_kind=kl_kind)
    baseline = sequence_scores(baselines)
    above = float64(discounted_returns(rewards)) - float64(spread(baseline, rewards.lengths))
    advantages = make_column(above, rewards.lengths)
    metrics["baseline/mean"] = mean(baseline)
    return Advantage(advantages, metrics | advantage_metrics(advantages))
