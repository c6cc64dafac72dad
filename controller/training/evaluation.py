"""Evaluation on the held-out rows: an algorithm measures them batch by batch and sums the numbers up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from controller.data.prompts import PromptData
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.roles import RewardGroup
from controller.tracking.metrics import Sample
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.v1 import worker_pb2

if TYPE_CHECKING:
    from controller.training.run import Run

ROW = "heldout_row"
"""Column of a batch of held-out rows: the number of each row among those evaluated, from 0."""

SCORES, SOURCES = "/scores", "/sources"
"""Metrics measured of every row, under names that no reward has."""

Measured = tuple[Mapping[str, np.ndarray], Sequence[FutureBatch]]
"""Numbers by name, one for each row of a batch [rows], and the batches whose calls made them."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the held-out rows.

    Attributes:
        measure: Called with one batch of rows after the other, in the order of the rows.
        summarize: From the numbers of all rows, by name, to the metrics of the evaluation.
    """

    measure: Callable[[FutureBatch], Measured]
    summarize: Callable[[Mapping[str, np.ndarray]], dict[str, float]]


def batches(data: PromptData, rows: np.ndarray, most: int) -> Iterator[FutureBatch]:
    """These rows of the data in batches of at most `most`, with column `ROW`."""
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        yield data.batch(part) | FutureBatch.of(**{ROW: first + np.arange(len(part))})


def policy_evaluation(run: Run) -> Evaluation:
    """The mean reward of greedy responses, over all rows and those of each source; some responses become samples.

    It is called accuracy where the services say that the reward lies between 0 and 1, so that its mean is a share; else
    reward.
    """
    services = {name: group.description for name, group in run.groups.items()}
    recipes = run.config.recipes("reward")
    shares = {source: is_share(weights, services) for source, weights in recipes.items()}

    def summarize(values: Mapping[str, np.ndarray]) -> dict[str, float]:
        scores, sources = values[SCORES], values.get(SOURCES, np.empty(0, str))
        measured = {_name(all(shares.values())): mean_of_scored(scores)}
        for source in dict.fromkeys(sources.tolist()):
            measured[f"{_name(shares[source])}_{source}"] = mean_of_scored(scores[sources == source])
        others = {name: each for name, each in values.items() if name not in (SCORES, SOURCES)}
        return measured | {name: mean_of_scored(each) for name, each in others.items()}

    return Evaluation(lambda batch: _measure_policy(run, batch), summarize)


def is_share(weights: Mapping[str, float], services: Mapping[str, worker_pb2.DescribeResponse]) -> bool:
    """Whether a reward made of services lies between 0 and 1.

    Args:
        weights: Of the services it is made of, by name.
        services: What services say of themselves.
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


def _measure_policy(run: Run, prompts: FutureBatch) -> Measured:
    responses = run.actor().generate_sequences(prompts, greedy=True)
    scored = run.reward().score_for_eval(prompts | responses)
    others = {name: run.reward(name).score_for_eval(prompts | responses) for name in _other_rewards(run)}
    values = {name: row_scores(other) for name, other in others.items()} | {SCORES: row_scores(scored)}
    if "source" in prompts:
        values[SOURCES] = np.asarray(_texts(prompts, "source"))
    _write_samples(run, prompts, responses, values[SCORES])
    return values, (responses | scored, *others.values())


def _other_rewards(run: Run) -> list[str]:
    """Rewards and costs beside the reward: by themselves, or made of several."""
    config, groups = run.config, run.groups
    made_up = {name: weights for name, weights in config.rewards.items() if weights.keys() <= groups.keys()}
    parts = {part for weights in (*config.recipes("reward").values(), *made_up.values()) for part in weights}
    alone = [name for name, group in groups.items() if isinstance(group, RewardGroup) and name not in parts]
    own = {source.reward for source in config.data.all_sources} | {"reward"}
    return [name for name in (*alone, *made_up) if name not in own]


def _write_samples(run: Run, prompts: FutureBatch, responses: FutureBatch, scores: np.ndarray) -> None:
    """Writes those of the first `run.samples` held-out rows that are in this batch."""
    column = prompts.result([ROW])[ROW]
    assert isinstance(column, LocalColumn)
    count = int(np.sum(np.asarray(column.values) < run.config.run.samples))
    if not count:
        return
    first = prompts.take(np.arange(count))
    if "response" in responses:
        shown = first | responses.select(["response"]).take(np.arange(count))
    else:
        shown = first | run.actor().generate_sequences(first, greedy=True, return_text=True)
    columns = [_texts(shown, name) for name in ("prompt", "response", "ground_truth")]
    rows = zip(*columns, scores[:count].tolist(), strict=True)
    run.recorder.samples(run.step, [Sample(*row) for row in rows])


def row_scores(scored: FutureBatch) -> np.ndarray:
    """Score of each response [rows] float64; scores of tokens are added up. Waits for them."""
    rewards = scored.result(["rewards"])["rewards"]
    assert isinstance(rewards, LocalColumn), "verdicts come in the response itself"
    if isinstance(rewards.values, Jagged):
        return np.asarray([row.sum() for row in _rows(rewards.values)])
    return np.asarray(rewards.values)


def mean_of_scored(scores: np.ndarray) -> float:
    """Mean over the rows that could be scored [rows]; not a number where none could."""
    found = scores[~np.isnan(scores)]
    return float(np.mean(found)) if len(found) else float("nan")


def _rows(values: Jagged[np.ndarray]) -> list[np.ndarray]:
    return np.split(values.values, np.cumsum(values.lengths)[:-1]) if values.rows else []


def _texts(batch: FutureBatch, name: str) -> list[str]:
    column = batch.result([name])[name]
    assert isinstance(column, LocalColumn)
    return column.texts
