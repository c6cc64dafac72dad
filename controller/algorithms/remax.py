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
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import KL_REWARD, POLICY, REWARD, SHAPING, NoOptions, algorithm
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.shaping import shaped
from controller.training.step import Step


def greedy_responses(config: Config, options: NoOptions) -> tuple[int, int]:
    """Returns the responses that are kept beside one per row: in a step one per prompt."""
    return config.data.prompts_per_step, 0


@algorithm(
    services=("actor", "reference", "reward"),
    reads=(*POLICY, *REWARD, *SHAPING, *KL_REWARD),
    further=greedy_responses,
)
def remax(run: Run) -> None:
    """Runs ReMax, which needs services actor, reference and reward. The KL penalty is subtracted from
    the rewards."""
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


@future_columns("advantages")
def compute_advantage(run: Run, step: Step, batch: FutureBatch, kl: KlController) -> FutureBatch:
    """Computes column "advantages" from columns rewards, baselines (the rewards of the greedy responses), log_probs
    and ref_log_probs. Then adds metrics to `step`, and updates `kl` for the next step."""
    names = ("log_probs", "ref_log_probs", "rewards", "baselines")
    columns = shaped(run, step, run.fetch(batch, *names))
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
    """Computes the advantages of ReMax: at every token the sum of its own and all later KL-penalised rewards, minus
    the score of the greedy response to the same prompt (algorithm 1).

    Returns:
        Advantages, one per response token, and the metrics of `penalized_rewards` with `baseline/mean`,
        `advantage/mean` and `advantage/std`.

    Raises:
        ValueError: A score is not finite, `kl_kind` is unknown, or columns have different lengths.
    """
    rewards, metrics = penalized_rewards(scores, log_probs, ref_log_probs, beta=beta, kl_kind=kl_kind)
    baseline = sequence_scores(baselines)
    above = float64(discounted_returns(rewards)) - float64(spread(baseline, rewards.lengths))
    advantages = make_column(above, rewards.lengths)
    metrics["baseline/mean"] = mean(baseline)
    return Advantage(advantages, metrics | advantage_metrics(advantages))
