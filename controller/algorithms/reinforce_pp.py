"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): REINFORCE with PPO's clip and KL, whose baseline is the mean over the
whole batch; with option `baseline`, the mean of the responses to the same prompt first."""

from __future__ import annotations

from typing import Literal

import numpy as np

from controller.advantage import (
    Advantage,
    FloatColumn,
    KlController,
    Scores,
    discounted_returns,
    kl_controller,
    penalized_rewards,
    spread,
    steer,
    whiten,
)
from controller.advantage.columns import advantage_metrics, row_sums
from controller.advantage.groups import centred
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import KL_REWARD, POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.sampling import GroupOptions, check_sampling, responses_of_rounds, sample
from controller.training.shaping import shaped
from controller.training.step import Step
from rlhf.errors import ConfigError


class ReinforcePPOptions(GroupOptions):
    """Options of REINFORCE++: table `[algorithm.options]`."""

    baseline: Literal["batch", "group"] = "batch"
    """Baseline of the advantages. batch: discounted returns, whitened over the batch. group: the reward of each
    response minus the mean of the responses to its prompt, whitened over the batch (REINFORCE++-baseline); needs
    rollout.samples_per_prompt above 1."""


def check(config: Config, options: ReinforcePPOptions) -> None:
    """Raises ConfigError where baseline "group" is chosen with one sample per prompt, since a group of one has no
    other response to be compared with; and as `check_sampling`."""
    check_sampling(config, options)
    if options.baseline == "group" and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            "rollout.samples_per_prompt: baseline group compares the responses to a prompt, so there have to be at "
            f"least 2 (given: {config.rollout.samples_per_prompt})"
        )


@algorithm(
    services=("actor", "reference", "reward"),
    options=ReinforcePPOptions,
    reads=(*POLICY, *REWARD, *SHAPING, *KL_REWARD, "gamma"),
    check=check,
    further=responses_of_rounds,
)
def reinforce_pp(run: Run, options: ReinforcePPOptions) -> None:
    """Runs REINFORCE++, which needs services actor, reference and reward. The KL is in the reward."""
    actor, reference, reward = run.actor(), run.reference(), run.reward()
    kl = run.keep("kl", kl_controller(run.config.algorithm))
    for step in run.steps():
        batch = sample(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch = batch if "rewards" in batch else reward.score(batch)
        batch |= compute_advantage(run, step, batch, kl, options)
        step.finish(batch, actor.update_actor(batch))


@future_columns("advantages")
def compute_advantage(
    run: Run, step: Step, batch: FutureBatch, kl: KlController, options: ReinforcePPOptions
) -> FutureBatch:
    """Computes column "advantages" of a batch from its rewards, log-probabilities and groups. Then adds metrics to
    `step`, and updates `kl` for the next step."""
    config = run.config.algorithm
    columns = shaped(run, step, run.fetch(batch, "log_probs", "ref_log_probs", "rewards", "group"))
    made = step.compute(
        reinforce_pp_advantage,
        *columns.values(),
        baseline=options.baseline,
        beta=kl.beta,
        kl_kind=config.kl_reward_estimator,
        gamma=config.gamma,
    )
    steer(kl, step.metrics, batch.rows)
    return made


def reinforce_pp_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn,
    scores: Scores,
    group: np.ndarray,
    *,
    baseline: str,
    beta: float,
    kl_kind: str = "k1",
    gamma: float = 1.0,
) -> Advantage:
    """Computes the advantages of REINFORCE++, one per response token, whitened over all tokens of the batch: with
    baseline "batch" the discounted returns of the KL-penalised token rewards; with baseline "group" each response's
    total KL-penalised reward minus the mean of its group, at all of its tokens. Metrics are those of
    `penalized_rewards`, and `advantage_metrics` before whitening.

    Raises:
        ValueError: A score is not finite, `kl_kind` is unknown, columns have different lengths, or the batch has fewer
            than 2 tokens.
    """
    rewards, metrics = penalized_rewards(scores, log_probs, ref_log_probs, beta=beta, kl_kind=kl_kind)
    if baseline == "group":
        advantages = spread(centred(row_sums(rewards), group), rewards.lengths)
    else:
        advantages = discounted_returns(rewards, gamma)
    return Advantage(whiten(advantages), metrics | advantage_metrics(advantages))
