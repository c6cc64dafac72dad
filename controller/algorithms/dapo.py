"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO with a higher upper clip, only groups whose responses differ in reward,
a loss over tokens, and a soft punishment of overlong responses; without KL."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from controller.advantage import Advantage, Scores, sequence_scores
from controller.advantage.columns import mean
from controller.advantage.groups import group_advantage
from controller.advantage.lengths import overlong_penalty
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.sampling import GroupOptions, check_sampling, responses_of_rounds, sample
from controller.training.shaping import shaped
from controller.training.step import Step
from rlhf.errors import ConfigError
from settings.strict import Positive


class DAPOOptions(GroupOptions):
    """Options of DAPO: table `[algorithm.options]`."""

    max_rounds: Positive = 10
    """Maximum number of rounds of generation in a step. Each round takes data.prompts_per_step new prompts; rounds
    end when that many groups have responses with different rewards. After the last round the step trains on the
    groups found so far; if there are none, the run ends with an error."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Number of tokens before rollout.max_response_tokens over which the punishment of overlong responses grows. 0:
    no punishment."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Factor of the punishment of overlong responses, which is its largest value, in units of reward."""


def check(config: Config, options: DAPOOptions) -> None:
    """Raises ConfigError where `overlong_buffer_tokens` is above the maximum length of a response, or where a
    composed reward has no service to filter groups by."""
    check_sampling(config, options)
    longest = config.rollout.max_response_tokens
    if options.overlong_buffer_tokens > longest:
        raise ConfigError(
            f"algorithm.options.overlong_buffer_tokens: must not be above rollout.max_response_tokens, {longest} "
            f"(given: {options.overlong_buffer_tokens})"
        )


@algorithm(
    services=("actor", "reward"),
    options=DAPOOptions,
    defaults={"clip_high": 0.28},
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD, *SHAPING),
    check=check,
    further=responses_of_rounds,
)
def dapo(run: Run, options: DAPOOptions) -> None:
    """Runs DAPO, which needs services actor and reward."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = sample(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch |= compute_advantage(run, step, batch, options)
        step.finish(batch, actor.update_actor(batch))


@future_columns("advantages")
def compute_advantage(run: Run, step: Step, batch: FutureBatch, options: DAPOOptions) -> FutureBatch:
    """Computes column "advantages" of a batch from its rewards, the lengths of its responses and their groups; see
    `dapo_advantage`. Adds metrics to `step`."""
    rewards, group = shaped(run, step, run.fetch(batch, "rewards", "group")).values()
    return step.compute(
        dapo_advantage,
        rewards,
        run.lengths(batch),
        group,
        max_length=run.config.rollout.max_response_tokens,
        buffer=options.overlong_buffer_tokens,
        penalty=options.overlong_penalty,
    )


def dapo_advantage(
    scores: Scores, lengths: np.ndarray, group: np.ndarray, *, max_length: int, buffer: int, penalty: float
) -> Advantage:
    """Computes GRPO's advantages of scores to which the soft punishment of overlong responses was added (section
    3.4).

    Args:
        scores: One score per response [rows], or one per token (jagged), which are summed.
        lengths: Tokens per response [rows] int64.
        group: Number of each response's group [rows] int64.
        max_length: Maximum length of a response, in tokens.
        buffer: Number of tokens over which the punishment grows; 0: no punishment.
        penalty: Factor of the punishment, which is its largest value.

    Returns:
        Advantages [rows], and the metrics of `group_advantage` for the punished scores, except that `score/mean` is
        taken before the punishment; and `overlong/mean`, the mean punishment of a response, at most 0.

    Raises:
        ValueError: A score is not finite, there is not one score and one group for each response, or `buffer` is below
            0 or above `max_length`.
    """
    given = sequence_scores(scores)
    punishment = penalty * overlong_penalty(lengths, max_length, buffer) if buffer else np.zeros(len(lengths))
    result = group_advantage(given + punishment, lengths, group)
    metrics = {**result.metrics, "score/mean": mean(given), "overlong/mean": mean(punishment)}
    return Advantage(result.advantages, metrics)
