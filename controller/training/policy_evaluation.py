"""Evaluation of a policy by the rewards of its responses to the held-out prompts: their mean, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.config.config import Config
from controller.config.rollout import EvaluationTable
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.group import RoleGroup
from controller.role_groups.roles import RewardGroup
from controller.tracking.metrics import Sample
from controller.training.columns import texts_of
from controller.training.evaluation import (
    SHOWN,
    Evaluation,
    Measured,
    mean_of_scored,
    row_scores,
    table_of,
)
from controller.training.rewards import Reward
from controller.training.roles import Actor
from nccl_transfer.refs.batch import LocalColumn
from rlhf.v1 import worker_pb2

SCORES, SOURCES = "/scores", "/sources"
"""Names of what is measured of every response: its score and the source of its prompt. No reward can have these
names."""


@dataclass(frozen=True)
class PolicyEvaluation:
    """Measures the reward of responses, the mean over prompts.

    It is called accuracy where the services declare that the reward lies between 0 and 1, else reward. With several
    responses to each prompt, equally many for all sources, pass_at_K is the share of prompts that K responses solve.
    Where `algorithm.on_failed_reward` is drop_group, rows_dropped is the number of responses that a reward or cost did
    not score.

    Attributes:
        config: Configuration of the run.
        groups: Role groups of the services, by name.
        actor: The policy.
        reward: Function that returns the reward or cost of a name.
        add_samples: Function that takes sample responses of the evaluation under way.
    """

    config: Config
    groups: Mapping[str, RoleGroup]
    actor: Actor
    reward: Callable[[str], Reward]
    add_samples: Callable[[Sequence[Sample]], None]

    def evaluation(self) -> Evaluation:
        """Returns the `Evaluation` that generates and scores responses, and summarizes their rewards. Calls no service
        itself."""
        return Evaluation(self._measure, self._summarize, lambda table: table.samples)

    def _measure(self, prompts: FutureBatch) -> Measured:
        samples = table_of(self.config, prompts).samples
        rows = prompts.repeat(samples)
        shown = samples * _shown(prompts)
        responses = self.actor.generate_for_eval(rows, return_text=True if len(shown) else None)
        scored = self.reward("reward").score_for_eval(rows | responses)
        others = {name: self.reward(name).score_for_eval(rows | responses) for name in self._other_rewards()}
        values = {name: row_scores(other) for name, other in others.items()} | {SCORES: row_scores(scored)}
        if "source" in rows:
            values[SOURCES] = np.asarray(texts_of(rows, "source"))
        if len(shown):
            self.add_samples(_samples((rows | responses).take(shown), values[SCORES][shown]))
        return values, (responses | scored, *others.values())

    def _summarize(self, values: Mapping[str, np.ndarray]) -> dict[str, float]:
        services = {name: group.description for name, group in self.groups.items()}
        recipes, evaluations = self.config.recipes("reward"), self.config.evaluations
        sources = values[SOURCES].tolist() if SOURCES in values else []
        labels = dict.fromkeys(sources or recipes)
        samples = {source: evaluations[source].samples for source in labels}
        # Each prompt counts once, however many responses its source has to one.
        is_mixed = len(set(samples.values())) > 1
        weights = np.asarray([1 / samples[source] for source in sources]) if is_mixed else None
        is_accuracy = all(is_share(recipes[source], services) for source in labels)
        measured = {"accuracy" if is_accuracy else "reward": mean_of_scored(values[SCORES], weights)}
        if len({(evaluations[source].samples, evaluations[source].solved_at) for source in labels}) == 1:
            measured |= _pass_at_k(values[SCORES], evaluations[next(iter(labels))])
        others = {name: each for name, each in values.items() if name not in (SCORES, SOURCES)}
        measured |= {name: mean_of_scored(each, weights) for name, each in others.items()}
        if self.config.algorithm.on_failed_reward == "drop_group":
            measured["rows_dropped"] = float(np.sum(np.isnan([values[SCORES], *others.values()]).any(axis=0)))
        return measured

    def _other_rewards(self) -> list[str]:
        """Returns the names of the rewards and costs that are measured too; see `Config.other_rewards`."""
        rewards = [name for name, group in self.groups.items() if isinstance(group, RewardGroup)]
        return self.config.other_rewards(rewards)


def _shown(prompts: FutureBatch) -> np.ndarray:
    """Returns the indices of the rows of a batch of which a response is shown [shown] int64."""
    column = prompts.result([SHOWN])[SHOWN]
    assert isinstance(column, LocalColumn)
    return np.flatnonzero(np.asarray(column.values))


def _samples(shown: FutureBatch, scores: np.ndarray) -> list[Sample]:
    """Returns samples of rows with columns prompt, response, ground_truth and perhaps source, and their scores
    [rows]."""
    columns = [texts_of(shown, name) for name in ("prompt", "response", "ground_truth")]
    sources = texts_of(shown, "source") if "source" in shown else [""] * shown.rows
    return [Sample(*row) for row in zip(*columns, scores.tolist(), sources, strict=True)]


def _pass_at_k(scores: np.ndarray, table: EvaluationTable) -> dict[str, float]:
    """Returns pass_at_K of the scores of responses, those to one prompt side by side [rows], for each power of two up
    to the number of responses to a prompt, and this number; nothing for one response."""
    if table.samples == 1:
        return {}
    scores_PS = scores.reshape(-1, table.samples)
    solved, scored = np.sum(scores_PS >= table.solved_at, axis=1), np.sum(~np.isnan(scores_PS), axis=1)
    powers = [2**power for power in range(table.samples.bit_length()) if 2**power < table.samples]
    return {f"pass_at_{k}": mean_of_scored(pass_at_k(solved, scored, k)) for k in (*powers, table.samples)}


def pass_at_k(solved: np.ndarray, scored: np.ndarray, k: int) -> np.ndarray:
    """Estimates for each prompt the probability that at least one of k responses solves it, without bias (Chen et al.
    2021, arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    Args:
        solved: Number c of responses that solve each prompt [prompts] int64.
        scored: Number n of responses to each prompt that were scored [prompts] int64.
        k: Number of attempts.

    Returns:
        Probabilities [prompts] float64; NaN for a prompt with fewer than k responses that were scored.
    """
    estimates = [
        1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan
        for c, n in zip(solved.tolist(), scored.tolist(), strict=True)
    ]
    return np.array(estimates, np.float64)


def is_share(weights: Mapping[str, float], services: Mapping[str, worker_pb2.DescribeResponse]) -> bool:
    """Whether a weighted sum of rewards lies between 0 and 1, by the score ranges that the services declare.

    Args:
        weights: Weights of its services, by name.
        services: Descriptions of the services, by name.
    """
    ends = []
    for name, weight in weights.items():
        if not services[name].HasField("score_range"):
            return False
        scores = services[name].score_range
        ends.append(sorted((weight * scores.lowest, weight * scores.highest)))
    return sum(low for low, _ in ends) >= 0 and sum(high for _, high in ends) <= 1
