"""Reward models, the second step of RLHF, trained on pairs of responses of which people chose one (Bradley and Terry
1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1), and cost models of Safe RLHF (Dai et al. 2024, arXiv
2310.12773, equation 6)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import SCHEDULE, algorithm
from controller.training.evaluation import Evaluation, Measured
from controller.training.run import Run
from nccl_transfer.refs.batch import LocalColumn
from rlhf.errors import ConfigError, InvalidRequest
from settings.reward import RewardTable
from settings.strict import Strict

Z_95 = 1.959964
"""Standard score (z) of a two-sided confidence level of 95 %."""


class RewardModelOptions(Strict):
    """Options of reward-model training: table `[algorithm.options]`."""

    loss: Literal["bradley_terry", "cost"] = "bradley_terry"
    """Loss of a pair. bradley_terry trains the chosen response to score higher than the rejected one. cost trains the
    chosen response, here the safer one, to score lower, and unsafe responses to score above 0; it needs fields
    chosen_unsafe and rejected_unsafe, true or false, in every row."""


def check(config: Config, options: RewardModelOptions) -> None:
    """Raises ConfigError where the service reward has no model that learns. One that is external passes, whose server
    says itself whether it can be trained."""
    table = config.services["reward"]
    assert isinstance(table, RewardTable), "the algorithm declares its role"
    if not (table.external or (table.kind == "model" and table.keeps_state)):
        raise ConfigError(
            'services.reward: reward_model trains this service, which needs kind = "model" and an optimizer, for '
            "example optimizer.learning_rate = 1e-5"
        )


@algorithm(
    services=("reward",),
    options=RewardModelOptions,
    columns=("chosen", "rejected"),
    trains="reward",
    quickstart="pairs",
    reads=SCHEDULE,
    check=check,
)
def reward_model(run: Run, options: RewardModelOptions) -> None:
    """Trains a reward or cost model. Needs a service reward of kind model with an optimizer, and rows with prompt,
    chosen and rejected."""
    reward = run.reward_model()
    sign = -1.0 if options.loss == "cost" else 1.0

    def measure(heldout: FutureBatch) -> Measured:
        """Measures the margin of each held-out pair: the score of the response that should be higher minus the
        other."""
        scored = reward.compare_pairs(heldout)
        chosen, rejected = run.fetch(scored, "chosen_scores", "rejected_scores").values()
        return {"margins": sign * (chosen.astype(np.float64) - rejected.astype(np.float64))}, [scored]

    for step in run.steps(Evaluation(measure, pair_accuracy)):
        batch = step.prompts
        if options.loss == "cost":
            batch |= signs(batch)
        step.finish(batch, reward.update_reward(batch, options.loss))


def pair_accuracy(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the metrics of held-out pairs from `values["margins"]` [pairs]: accuracy, the share of pairs whose margin
    is above 0, with its 95 % confidence interval (accuracy_low, accuracy_high), pairs, their number, and margin, the
    mean."""
    margins = values["margins"]
    correct = int(np.sum(margins > 0))
    low, high = wilson_interval(correct, len(margins))
    measured = {"accuracy": correct / len(margins), "accuracy_low": low, "accuracy_high": high}
    return {**measured, "pairs": float(len(margins)), "margin": float(margins.mean())}


def signs(batch: FutureBatch) -> FutureBatch:
    """Returns columns chosen_sign and rejected_sign [rows] float64, from chosen_unsafe and rejected_unsafe in the rows'
    column metadata: +1 for an unsafe response, -1 for a safe one. Raises InvalidRequest where one is missing."""
    column = batch.result(["metadata"])["metadata"]
    assert isinstance(column, LocalColumn)
    rows = [json.loads(text) for text in column.texts]
    return FutureBatch.of(
        chosen_sign=np.asarray([_sign(row, "chosen_unsafe") for row in rows]),
        rejected_sign=np.asarray([_sign(row, "rejected_unsafe") for row in rows]),
    )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Returns the lower and upper end of the 95 % confidence interval of a share (Wilson 1927): with p = successes /
    trials, n = trials, at least 1, and z = `Z_95`, (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    z = Z_95
    share, ratio = successes / trials, z * z / trials
    centre = share + ratio / 2
    spread = z * math.sqrt(share * (1 - share) / trials + ratio / (4 * trials))
    return (centre - spread) / (1 + ratio), (centre + spread) / (1 + ratio)


def _sign(row: dict[str, object], name: str) -> float:
    if not isinstance(row.get(name), bool | int):
        raise InvalidRequest(f"a row of the data has no {name}, true or false, which loss cost needs")
    return 1.0 if row[name] else -1.0
