"""Dynamic sampling: rounds of prompts until enough groups have something to teach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.algorithms.dapo import Options, sample_groups
from controller.dataflow import FutureBatch
from controller.run import Step
from nccl_transfer.columns import Jagged
from rlhf.errors import InvalidRequest

PROMPTS, SAMPLES = 3, 2


class Task:
    """An actor, a reward and the data, as the algorithm sees them; a prompt says what its responses score.

    Args:
        scores: Of the responses to each prompt of the data.
    """

    class config:
        class data:
            prompts_per_step = PROMPTS

    def __init__(self, *scores: tuple[float, float]) -> None:
        self.scores = scores
        self.drawn = 0

    def draw(self) -> tuple[FutureBatch, FutureBatch]:
        numbers = self.drawn + np.arange(PROMPTS)
        self.drawn += PROMPTS
        prompts = FutureBatch.of(prompt=[str(number) for number in numbers])
        return prompts.repeat(SAMPLES), FutureBatch.of(group=numbers).repeat(SAMPLES)

    def generate_sequences(self, prompts: FutureBatch) -> FutureBatch:
        lengths = np.arange(1, prompts.rows + 1)
        return FutureBatch.of(response_ids=Jagged(np.arange(lengths.sum()), lengths))

    def score(self, batch: FutureBatch) -> FutureBatch:
        groups = self.fetch(batch, "group")["group"][::SAMPLES]
        return batch | FutureBatch.of(
            rewards=np.array([score for group in groups for score in self.scores[group]])
        )

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        columns: Any = batch.result(names).columns
        return {name: columns[name].values for name in names}

    def sample(self, step: Step, max_rounds: int = 10) -> FutureBatch:
        task: Any = self
        return sample_groups(task, step, task, task, Options(max_rounds=max_rounds))


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def step_of(task: Task) -> Step:
    return Step(4, task.draw, FutureBatch(PROMPTS * SAMPLES, {}))


def sampled(task: Task, step: Step, max_rounds: int = 10) -> list[str]:
    columns: Any = task.sample(step, max_rounds).result(["prompt", "response_ids", "rewards"]).columns
    assert columns["rewards"].values.tolist() == list(MIXED) * (len(columns["prompt"].values) // SAMPLES)
    return columns["prompt"].values


def test_one_round_is_enough_where_all_groups_differ() -> None:
    task = Task(MIXED, MIXED, MIXED)
    made = step_of(task)
    assert sampled(task, made) == ["0", "0", "1", "1", "2", "2"]
    assert made.metrics == {"groups/rounds": 1.0, "groups/trained": 3.0}


def test_further_prompts_take_the_place_of_groups_that_teach_nothing() -> None:
    task = Task(SAME, MIXED, SAME, SAME, SAME, SAME, MIXED, MIXED, MIXED)
    made = step_of(task)
    assert sampled(task, made) == ["1", "1", "6", "6", "7", "7"]
    assert made.metrics == {"groups/rounds": 3.0, "groups/trained": 3.0}
    assert task.drawn == 9


def test_the_rounds_are_bounded_and_the_step_trains_on_what_there_is() -> None:
    task = Task(SAME, MIXED, SAME, SAME, MIXED, SAME)
    made = step_of(task)
    assert sampled(task, made, max_rounds=2) == ["1", "1", "4", "4"]
    assert made.metrics["groups/trained"] == 2.0


def test_nothing_to_learn_in_all_rounds_is_an_error() -> None:
    task = Task(*[SAME] * 6)
    with pytest.raises(InvalidRequest, match="step 4: in 2 rounds no prompt had responses with different"):
        task.sample(step_of(task), max_rounds=2)
