"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO with a higher upper clip, only groups whose responses differ in reward,
a loss over tokens, and a soft punishment of overlong responses; without KL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from controller.advantage import Advantage, Scores, sequence_scores
from controller.advantage.columns import mean
from controller.advantage.groups import differs_within, group_advantage
from controller.advantage.lengths import overlong_penalty
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import POLICY, REWARD, algorithm
from controller.training.rewards import Reward
from controller.training.roles import Actor
from controller.training.run import Run
from controller.training.step import Step
from rlhf.errors import ConfigError, InvalidRequest
from settings.reward import RewardTable
from settings.strict import Positive, Strict


class DAPOOptions(Strict):
    """Options of DAPO."""

    max_rounds: Positive = 10
    """Rounds of generation in a step, each of data.prompts_per_step prompts, until as many groups have different
    rewards. After the last, the step trains on those there are; without any the run ends with an error."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """The last tokens before rollout.max_response_tokens, over which the punishment of length grows; 0: no
    punishment."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Largest punishment."""
    filter_by: str = ""
    """Of a reward made of several services: the one whose scores have to differ within a group that is trained on.
    Empty: the first that checks answers, which is one of kind sandbox or with function exact_match, gsm8k or math."""


CHECKS_ANSWERS = frozenset({"exact_match", "gsm8k", "math"})
"""Functions whose scores say whether an answer is right."""


def check(config: Config, options: DAPOOptions) -> None:
    """Refuses a buffer longer than the longest response, and a composed reward without a service to filter by."""
    filtered_by(config, options)
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
    reads=(*POLICY, *REWARD),
    check=check,
)
def dapo(run: Run, options: DAPOOptions) -> None:
    """Actor and reward."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = sample_groups(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch |= compute_advantage(run, step, batch, options)
        step.finish(batch, actor.update_actor(batch))


def filtered_by(config: Config, options: DAPOOptions) -> list[str]:
    """Services whose scores have to differ within a group: of a row the first one that scores it. Empty where no reward
    is composed.

    Raises:
        ConfigError: A source's reward has no such service.
    """
    recipes, wanted = config.recipes("reward"), options.filter_by
    if wanted and not any(wanted in recipe for recipe in recipes.values()):
        known = ", ".join(sorted({name for recipe in recipes.values() for name in recipe}))
        raise ConfigError(f"algorithm.options.filter_by: no reward is made of {wanted!r}, only of: {known}")
    if all(len(recipe) == 1 for recipe in recipes.values()):
        return []
    found: dict[str, None] = {}
    for source, recipe in recipes.items():
        names = [name for name in recipe if len(recipe) == 1 or _is_filter(config, name, options)]
        if not names:
            raise ConfigError(
                f"algorithm.options.filter_by: the reward of {source} is made of {', '.join(recipe)}; name the one "
                "that says whether an answer is right"
            )
        found[names[0]] = None
    return list(found)


def _is_filter(config: Config, service: str, options: DAPOOptions) -> bool:
    if options.filter_by:
        return service == options.filter_by
    table = config.services.get(service)
    return isinstance(table, RewardTable) and (
        table.kind == "sandbox" or (table.kind == "function" and table.function in CHECKS_ANSWERS)
    )


def sample_groups(run: Run, step: Step, actor: Actor, reward: Reward, options: DAPOOptions) -> FutureBatch:
    """Dynamic sampling (section 3.2): generates and scores rounds of prompts until one group for each prompt of a step
    has responses with different scores, and returns these groups."""
    wanted, found, rounds = run.config.data.prompts_per_step, 0, []
    services = filtered_by(run.config, options)
    for prompts in step.rounds(options.max_rounds):
        batch = prompts | actor.generate_sequences(prompts)
        batch = reward.score(batch)
        names = [f"rewards/{service}" for service in services] or ["rewards"]
        *columns, group = run.fetch(batch, *names, "group").values()
        scores = sequence_scores(first_score(columns) if services else columns[0])
        rows = rows_to_learn_from(scores, group, wanted - found)
        found += len(np.unique(group[rows]))
        rounds.append(batch.take(rows))
        if found == wanted:
            break
    step.metrics |= {"groups/rounds": float(len(rounds)), "groups/trained": float(found)}
    if not found:
        raise InvalidRequest(
            f"step {step.number}: in {len(rounds)} rounds no prompt had responses with different "
            f"{' and '.join(services) or 'rewards'}: the task is solved, or out of reach"
        )
    return FutureBatch.concat(rounds)


def first_score(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The score of each response [rows] by the first service that scores it; other services give not a number."""
    scores = columns[0]
    for column in columns[1:]:
        scores = np.where(np.isnan(scores), column, scores)
    return scores


def rows_to_learn_from(scores: np.ndarray, group: np.ndarray, most: int) -> np.ndarray:
    """Rows of the first groups, at most `most`, whose scores differ; groups are numbered in their order."""
    rows = np.flatnonzero(differs_within(scores, group))
    return rows[np.isin(group[rows], np.unique(group[rows])[:most])]


def compute_advantage(run: Run, step: Step, batch: FutureBatch, options: DAPOOptions) -> FutureBatch:
    """Column advantages, from one reward per response and its length."""
    rewards, group = run.fetch(batch, "rewards", "group").values()
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
    """GRPO's advantage of the scores with the soft punishment of length added (section 3.4).

    Args:
        max_length: longest response in tokens.
        buffer: see `overlong_penalty`; 0: no punishment.
        penalty: largest punishment.

    Returns:
        Advantages, and as metrics those of `group_advantage` of the punished scores, with `score/mean` before the
        punishment, and `overlong/mean`, the punishment per response.

    Raises:
        ValueError: as `group_advantage` and `overlong_penalty`.
    """
    given = sequence_scores(scores)
    punishment = penalty * overlong_penalty(lengths, max_length, buffer) if buffer else np.zeros(len(lengths))
    result = group_advantage(given + punishment, lengths, group)
    metrics = {**result.metrics, "score/mean": mean(given), "overlong/mean": mean(punishment)}
    return Advantage(result.advantages, metrics)
