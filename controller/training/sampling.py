"""Generates the rows of a step, for algorithms that compare the responses to a prompt: once, or by dynamic sampling
(DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from controller.advantage import sequence_scores
from controller.advantage.groups import differs_within
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.rewards import Reward
from controller.training.roles import Actor
from controller.training.run import Run
from controller.training.step import Step
from rlhf.errors import ConfigError, InvalidRequest
from settings.reward import CHECKS_ANSWERS, RewardTable
from settings.strict import Strict


class GroupOptions(Strict):
    """Options of algorithms that compare the responses to a prompt: table `[algorithm.options]`."""

    max_rounds: int = Field(default=0, ge=0)
    """Dynamic sampling: maximum number of rounds of generation in a step. Each round takes data.prompts_per_step new
    prompts; rounds end when that many groups have responses with different rewards. After the last round the step
    trains on the groups found so far; if there are none, the run ends with an error. 0: no dynamic sampling; a step
    trains on all its groups."""
    filter_by: str = ""
    """Name of the service whose scores must differ within a group for it to be trained on, where the reward is
    composed of several services. Empty: the first service that checks answers, which is one of kind sandbox or with
    function exact_match, gsm8k or math."""


def check_sampling(config: Config, options: GroupOptions) -> None:
    """Raises ConfigError where groups are to be filtered and have one response each, or a composed reward has no
    service to filter them by; or where `filter_by` has no effect."""
    samples = config.rollout.samples_per_prompt
    if options.max_rounds and samples < 2:
        raise ConfigError(
            "rollout.samples_per_prompt: dynamic sampling (algorithm.options.max_rounds) compares the responses to a "
            f"prompt, so there have to be at least 2 (given: {samples})"
        )
    if options.max_rounds:
        filtered_by(config, options)
    elif options.filter_by:
        raise ConfigError("algorithm.options.filter_by: needs max_rounds above 0")


def responses_of_rounds(config: Config, options: GroupOptions) -> tuple[int, int]:
    """Returns the responses that are kept beside one per row: in a step those of all rounds but one."""
    return max(options.max_rounds - 1, 0) * config.rows_per_step, 0


def sample(run: Run, step: Step, actor: Actor, reward: Reward, options: GroupOptions) -> FutureBatch:
    """Generates the rows of a step and returns them with column "group". With dynamic sampling they are those of the
    groups that are kept, and have been scored already.

    Raises:
        InvalidRequest: See `sample_groups`.
    """
    if options.max_rounds:
        return sample_groups(run, step, actor, reward, options)
    return step.prompts | step.groups | actor.generate_sequences(step.prompts)


def sample_groups(run: Run, step: Step, actor: Actor, reward: Reward, options: GroupOptions) -> FutureBatch:
    """Samples the groups of a step by dynamic sampling: generates and scores rounds of prompts until
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


def filtered_by(config: Config, options: GroupOptions) -> list[str]:
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


def _is_filter(config: Config, service: str, options: GroupOptions) -> bool:
    if options.filter_by:
        return service == options.filter_by
    table = config.services.get(service)
    return isinstance(table, RewardTable) and (
        table.kind == "sandbox" or (table.kind == "function" and table.function in CHECKS_ANSWERS)
    )


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
