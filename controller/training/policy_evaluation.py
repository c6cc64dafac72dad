"""Evaluation of a policy by the mean reward of its greedy responses to the held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from client.session import StepContext
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.group import RoleGroup
from controller.role_groups.roles import RewardGroup
from controller.tracking.metrics import Sample
from controller.training.columns import texts_of
from controller.training.evaluation import ROW, Evaluation, Measured, mean_of_scored, row_scores
from controller.training.rewards import Reward
from controller.training.roles import Actor
from nccl_transfer.refs.batch import LocalColumn
from rlhf.v1 import worker_pb2

SCORES, SOURCES = "/scores", "/sources"
"""Names of the numbers that are measured for every row: its score and its source. No reward can have these names."""


@dataclass(frozen=True)
class PolicyEvaluation:
    """Measures the reward of greedy responses, over all rows and over those of each source.

    The mean is called accuracy where the services declare that the reward lies between 0 and 1, else reward. Where
    `algorithm.on_failed_reward` is drop_group, rows_dropped is the number of rows that a reward or cost did not score.

    Attributes:
        config: Configuration of the run.
        groups: Role groups of the services, by name.
        actor: The policy.
        reward: Function that returns the reward or cost of a name.
        write_samples: Function that writes sample responses of a step; None: the newest.
    """

    config: Config
    groups: Mapping[str, RoleGroup]
    actor: Actor
    reward: Callable[[str], Reward]
    write_samples: Callable[[StepContext | None, list[Sample]], None]

    def evaluation(self) -> Evaluation:
        """Returns the `Evaluation` that generates and scores greedy responses, and summarizes them as mean rewards.
        Calls no service itself."""
        return Evaluation(self._measure, self._summarize)

    def _measure(self, prompts: FutureBatch) -> Measured:
        responses = self.actor.generate_sequences(prompts, greedy=True)
        scored = self.reward("reward").score_for_eval(prompts | responses)
        others = {
            name: self.reward(name).score_for_eval(prompts | responses) for name in self._other_rewards()
        }
        values = {name: row_scores(other) for name, other in others.items()} | {SCORES: row_scores(scored)}
        if "source" in prompts:
            values[SOURCES] = np.asarray(texts_of(prompts, "source"))
        self._write_samples(prompts, responses, values[SCORES])
        return values, (responses | scored, *others.values())

    def _summarize(self, values: Mapping[str, np.ndarray]) -> dict[str, float]:
        services = {name: group.description for name, group in self.groups.items()}
        recipes = self.config.recipes("reward")
        shares = {source: is_share(weights, services) for source, weights in recipes.items()}
        scores, sources = values[SCORES], values.get(SOURCES, np.empty(0, str))
        measured = {_name(all(shares.values())): mean_of_scored(scores)}
        for source in dict.fromkeys(sources.tolist()):
            measured[f"{_name(shares[source])}_{source}"] = mean_of_scored(scores[sources == source])
        others = {name: each for name, each in values.items() if name not in (SCORES, SOURCES)}
        measured |= {name: mean_of_scored(each) for name, each in others.items()}
        if self.config.algorithm.on_failed_reward == "drop_group":
            measured["rows_dropped"] = float(np.sum(np.isnan([scores, *others.values()]).any(axis=0)))
        return measured

    def _other_rewards(self) -> list[str]:
        """Returns the names of the rewards and costs that are measured too: reward services that are part of no
        composition, and compositions of `[rewards]`, that are not the reward itself."""
        config, groups = self.config, self.groups
        composed = {
            name: weights for name, weights in config.rewards.items() if weights.keys() <= groups.keys()
        }
        recipes = (*config.recipes("reward").values(), *composed.values())
        parts = {part for weights in recipes for part in weights}
        alone = [
            name for name, group in groups.items() if isinstance(group, RewardGroup) and name not in parts
        ]
        own = {source.reward for source in config.data.all_sources} | {"reward"}
        return [name for name in (*alone, *composed) if name not in own]

    def _write_samples(self, prompts: FutureBatch, responses: FutureBatch, scores: np.ndarray) -> None:
        """Writes samples for those rows of a batch that are among the first `run.samples` evaluated rows; generates
        their responses again if `responses` has no text."""
        column = prompts.result([ROW])[ROW]
        assert isinstance(column, LocalColumn)
        count = int(np.sum(np.asarray(column.values) < self.config.run.samples))
        if not count:
            return
        first = prompts.take(np.arange(count))
        if "response" in responses:
            shown = first | responses.select(["response"]).take(np.arange(count))
        else:
            shown = first | self.actor.generate_sequences(first, greedy=True, return_text=True)
        columns = [texts_of(shown, name) for name in ("prompt", "response", "ground_truth")]
        rows = zip(*columns, scores[:count].tolist(), strict=True)
        self.write_samples(prompts.step, [Sample(*row) for row in rows])


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


def _name(is_accuracy: bool) -> str:
    return "accuracy" if is_accuracy else "reward"
