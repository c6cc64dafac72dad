"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): REINFORCE with the mean of the other responses as baseline."""

from __future__ import annotations

import numpy as np

from controller.advantage import (
    Advantage,
    FloatColumn,
    KlController,
    Scores,
    kl_controller,
    penalized_rewards,
    spread,
    steer,
)
from controller.advantage.columns import advantage_metrics, row_sums
from controller.advantage.groups import group_metrics, leave_one_out
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import KL_REWARD, POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.sampling import GroupOptions, check_sampling, responses_of_rounds, sample
from controller.training.shaping import shaped
from controller.training.step import Step


@algorithm(
    services=("actor", "reference", "reward"),
    options=GroupOptions,
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD, *SHAPING, *KL_REWARD),
    check=check_sampling,
    further=responses_of_rounds,
)
def rloo(run: Run, options: GroupOptions) -> None:
    """Runs RLOO, which needs services actor, reference and reward. The KL is in the reward."""
    actor, reference, reward = run.actor(), run.reference(), run.reward()
    kl = run.keep("kl", kl_controller(run.config.algorithm))
    for step in run.steps():
        batch = sample(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch = batch if "rewards" in batch else reward.score(batch)
        batch |= compute_advantage(run, step, batch, kl)
        step.finish(batch, actor.update_actor(batch))


@future_columns("advantages", by_group=True)
def compute_advantage(run: Run, step: Step, batch: FutureBatch, kl: KlController) -> FutureBatch:
    """Computes column "advantages" of a batch from its rewards, log-probabilities and groups. Then adds metrics to
    `step`, and updates `kl` for the next step."""
    columns = shaped(run, step, run.fetch(batch, "log_probs", "ref_log_probs", "rewards", "group"))
    kind = run.config.algorithm.kl_reward_estimator
    made = step.compute(rloo_advantage, *columns.values(), beta=kl.beta, kl_kind=kind)
    steer(kl, step.metrics, batch.rows)
    return made


def rloo_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn,
    scores: Scores,
    group: np.ndarray,
    *,
    beta: float,
    kl_kind: str = "k1",
) -> Advantage:
    """Computes the advantages of RLOO, one per response [rows]: n / (n - 1) (s - mean of the group), where s is the
    score of a response minus beta times its KL, and n the size of its group. Metrics are those of `penalized_rewards`,
    `group_metrics` of s, and `advantage_metrics`.

    Raises:
        ValueError: A score is not finite, `kl_kind` is unknown, or columns have different lengths.
    """
    rewards, metrics = penalized_rewards(scores, log_probs, ref_log_probs, beta=beta, kl_kind=kl_kind)
    per_row = row_sums(rewards)
    advantages = leave_one_out(per_row, group)
    metrics |= group_metrics(per_row, group) | advantage_metrics(spread(advantages, rewards.lengths))
    return Advantage(advantages, metrics)
