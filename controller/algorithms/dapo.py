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
from controller.training.algorithm import POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.rewards import Reward
from controller.training.roles import Actor
from controller.training.run import Run
from controller.training.shaping import shaped
from controller.training.step import Step
from rlhf.errors import ConfigError, InvalidRequest
from settings.reward import CHECKS_ANSWERS, RewardTable
from settings.strict import Positive, Strict


class DAPOOptions(Strict):
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
    filter_by: str = ""
    """Name of the service whose scores must differ within a group for it to be trained on, where the reward is
    composed of several services. Empty: the first service that checks answers, which is one of kind sandbox or with
    function exact_match, gsm8k or math."""


def check(config: Config, options: DAPOOptions) -> None:
    """Raises ConfigError where `overlong_buffer_tokens` is above the maximum length of a response, or where a
    composed reward has no service to filter groups by."""
    filtered_by(config, options)
    longest = config.rollout.max_response_tokens
    if options.overlong_buffer_tokens > longest:
        raise ConfigError(
            f"algorithm.options.overlong_buffer_tokens: must not be above rollout.max_response_tokens, {longest} "
            f"(given: {options.overlong_buffer_tokens})"
        )


def responses_of_rounds(config: Config, options: DAPOOptions) -> tuple[int, int]:
    """Returns the responses that are kept beside one per row: in a step those of all rounds but one."""
    return (options.max_rounds - 1) * config.rows_per_step, 0


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
        batch = sample_groups(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch |= compute_advantage(run, step, batch, options)
        step.finish(batch, actor.update_actor(batch))


def filtered_by(config: Config, options: DAPOOptions) -> list[str]:
    """Returns the names of the services whose scores must differ within a group; each row is judged by the first of
    them that scores it. Returns an empty list where the reward of every source that is trained on is a single service,
    whose scores then decide.

    Raises:
        ConfigError: The reward of such a source has no service to filter by, or none has the service that `filter_by`
            names.
    """
    trained, wanted = {source.label for source in config.data.trained_sources}, options.filter_by
    recipes = {source: recipe for source, recipe in config.recipes("reward").items() if source in trained}
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
    """Samples the groups of a step by dynamic sampling (section 3.2): generates and scores rounds of prompts until
    data.prompts_per_step groups have responses with different scores, and returns the rows of these groups.

    Raises:
        InvalidRequest: After `max_rounds` rounds there is no such group.
    """
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
    """Returns the score of each response [rows] from the first of `columns` in which it is not NaN: one column [rows]
    per service, with NaN where a service does not score a row."""
    scores = columns[0]
    for column in columns[1:]:
        scores = np.where(np.isnan(scores), column, scores)
    return scores


def rows_to_learn_from(scores: np.ndarray, group: np.ndarray, most: int) -> np.ndarray:
    """Returns the indices [n] int64, ascending, of all rows of the groups whose scores differ; of more than `most` such
    groups, only of the `most` with the lowest numbers."""
    rows = np.flatnonzero(differs_within(scores, group))
    return rows[np.isin(group[rows], np.unique(group[rows])[:most])]


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
