"""On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649, with lambda = 1; Gu et al. 2024, arXiv 2306.08543):
the student samples responses, a teacher scores the same tokens, and the advantage of a token is its negative reverse
KL (Lu and Thinking Machines Lab 2025, "On-Policy Distillation")."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from controller.advantage import (
    Advantage,
    FloatColumn,
    Scores,
    discounted_returns,
    kl_estimate,
    sequence_scores,
    spread,
)
from controller.advantage.columns import advantage_metrics, float64, make_column, mean, row_sums
from controller.advantage.groups import centred, group_metrics
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.evaluation import Evaluation, Measured
from controller.training.roles import Actor, Reference
from controller.training.run import Run
from controller.training.shaping import shaped
from controller.training.step import Step
from rlhf.errors import ConfigError
from settings.strict import Fraction, NotNegative, Strict

KL, TOKENS = "/kl", "/tokens"
"""Names of the numbers that are measured for every held-out row: reverse KL of its response, in nats, and length. No
reward can have these names."""


class DistillOptions(Strict):
    """Options of on-policy distillation: table `[algorithm.options]`."""

    discount: Fraction = 0.0
    """Discount, per token, of the reverse KL of later tokens in the advantage of a token. 0: the advantage is that of
    the token alone; 1: of all tokens from it on."""
    reward_coefficient: NotNegative = 0.0
    """Coefficient of the reward in the advantages: that of a response minus the mean of the responses to its prompt, at
    all tokens. Needs a service reward, and rollout.samples_per_prompt above 1. 0: only the teacher is learned from, and
    a service reward, where there is one, scores the held-out responses alone."""


def check(config: Config, options: DistillOptions) -> None:
    """Raises ConfigError where the teacher has no model of its own, the reward is mixed in without a service reward or
    with one sample per prompt, or it is to be shaped and is not mixed in."""
    teacher, student = config.services.get("reference"), config.services["actor"].model_directory
    if teacher is None or teacher.model_directory == student:
        raise ConfigError(
            "services.reference.model: the reference is the teacher of distill, so it has to be a service with another "
            f"model than services.actor (given: {student if teacher else 'none'})"
        )
    if options.reward_coefficient and not config.has_reward("reward"):
        raise ConfigError(
            "algorithm.options.reward_coefficient: needs a service reward, and the config has none"
        )
    if options.reward_coefficient and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            "rollout.samples_per_prompt: reward_coefficient compares the responses to a prompt, so there have to be at "
            f"least 2 (given: {config.rollout.samples_per_prompt})"
        )
    if config.algorithm.shapes_rewards and not options.reward_coefficient:
        raise ConfigError(
            "algorithm.reward_normalization and algorithm.reward_clip: distill learns from no reward unless "
            "algorithm.options.reward_coefficient is above 0"
        )


def scored_responses(config: Config, options: DistillOptions) -> tuple[int, int]:
    """Returns the responses that are kept beside one per row: with a reward, in an evaluation those that it scores."""
    return 0, config.run.evaluation_rows if config.has_reward("reward") else 0


@algorithm(
    services=("actor", "reference", "reward"),
    options=DistillOptions,
    quickstart="distill",
    reads=(*POLICY, *REWARD, *SHAPING),
    check=check,
    optional=("reward",),
    further=scored_responses,
)
def distill(run: Run, options: DistillOptions) -> None:
    """Runs on-policy distillation, which needs services actor, the student, and reference, the teacher. A service
    reward may be there too; see `DistillOptions.reward_coefficient`."""
    actor, teacher = run.actor(), run.reference()
    reward = run.reward() if options.reward_coefficient else None
    for step in run.steps(heldout_kl(run, actor, teacher)):
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= teacher.compute_ref_log_prob(batch)
        if reward:
            batch = reward.score(batch)
        batch |= compute_advantage(run, step, batch, options)
        step.finish(batch, actor.update_actor(batch))


@future_columns("advantages", by_group=True)
def compute_advantage(run: Run, step: Step, batch: FutureBatch, options: DistillOptions) -> FutureBatch:
    """Computes column "advantages" of a batch from the log-probabilities of student and teacher, and from the rewards
    where they have a coefficient. Adds metrics to `step`."""
    scored = ("rewards", "group") if options.reward_coefficient else ()
    columns = run.fetch(batch, "log_probs", "ref_log_probs", *scored)
    columns = shaped(run, step, columns) if scored else columns
    return step.compute(distill_advantage, *columns.values(), **options.model_dump())


def distill_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn,
    scores: Scores | None = None,
    group: np.ndarray | None = None,
    *,
    discount: float = 0.0,
    reward_coefficient: float = 0.0,
) -> Advantage:
    """Computes the advantages of on-policy distillation, one per response token: the sum over k of discount^k
    (log p_teacher - log p_student) of token t + k, and reward_coefficient (s - mean of the group).

    Args:
        log_probs: Log-probabilities of the response tokens under the student that sampled them.
        ref_log_probs: The same under the teacher.
        scores: Scores s, per response [rows] or per token (jagged); None: none.
        group: Number of each response's group [rows]; None where `scores` is.
        discount, reward_coefficient: See `DistillOptions`.

    Returns:
        The advantages, and as metrics `kl/mean` and `kl/sequence_mean`, the mean reverse KL per token and per response
        in nats, with `advantage_metrics`; with scores also score/mean and `group_metrics`.

    Raises:
        ValueError: A score is not finite, or columns have different lengths.
    """
    kl = kl_estimate(log_probs, ref_log_probs, "k1")
    advantages = discounted_returns(make_column(-float64(kl), kl.lengths), discount)
    metrics = {"kl/mean": mean(float64(kl)), "kl/sequence_mean": mean(row_sums(kl))}
    if scores is not None and group is not None:
        per_row = sequence_scores(scores)
        above = spread(reward_coefficient * centred(per_row, group), kl.lengths)
        advantages = make_column(float64(advantages) + float64(above), kl.lengths)
        metrics |= {"score/mean": mean(per_row), **group_metrics(per_row, group)}
    return Advantage(advantages, metrics | advantage_metrics(advantages))


def heldout_kl(run: Run, actor: Actor, teacher: Reference) -> Evaluation:
    """Returns the `Evaluation` that samples a response to each held-out prompt and measures its reverse KL: metric
    reverse_kl, the mean per token in nats; with a service reward also the metrics of `Run.policy_evaluation`."""
    policy = run.policy_evaluation() if run.config.has_reward("reward") else None

    def measure(prompts: FutureBatch) -> Measured:
        batch = prompts | actor.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= teacher.compute_ref_log_prob(batch)
        columns = run.fetch(batch, "log_probs", "ref_log_probs")
        kl = kl_estimate(columns["log_probs"], columns["ref_log_probs"], "k1")
        scored, made = policy.measure(prompts) if policy else ({}, ())
        return {**scored, KL: row_sums(kl), TOKENS: kl.lengths}, (*made, batch)

    def summarize(values: Mapping[str, np.ndarray]) -> dict[str, float]:
        scored = {name: each for name, each in values.items() if name not in (KL, TOKENS)}
        measured = policy.summarize(scored) if policy else {}
        return {**measured, "reverse_kl": float(values[KL].sum() / max(values[TOKENS].sum(), 1))}

    return Evaluation(measure, summarize, policy.responses) if policy else Evaluation(measure, summarize)
