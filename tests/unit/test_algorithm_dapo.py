"""Dynamic sampling: rounds of prompts until enough groups have something to teach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from client.session import StepContext
from controller.algorithms.dapo import DAPOOptions, check, filtered_by, sample_groups
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.step import Step
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError, InvalidRequest

PROMPTS, SAMPLES = 3, 2


class Task:
    """An actor, a reward and the data, as the algorithm sees them; a prompt says what its responses score.

    Args:
        scores: Of the responses to each prompt of the data.
    """

    def __init__(self, *scores: tuple[float, float]) -> None:
        self.config = config_of("exact_match")
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
        return sample_groups(task, step, task, task, DAPOOptions(max_rounds=max_rounds))


class DenseTask(Task):
    """A task whose reward has a second term, which is never the same."""

    def __init__(self, *scores: tuple[float, float]) -> None:
        super().__init__(*scores)
        self.config = config_of("math", "length", weights={"math": 1.0, "length": 0.1})

    def score(self, batch: FutureBatch) -> FutureBatch:
        scored = super().score(batch).rename(rewards="rewards/math")
        right, length = self.fetch(scored, "rewards/math")["rewards/math"], np.arange(batch.rows) / 10
        return scored | FutureBatch.of(**{"rewards": right + 0.1 * length, "rewards/length": length})


def config_of(*functions: str, weights: dict[str, float] | None = None, **options: Any) -> Config:
    """A run whose reward is a service with a function, or is made of one each."""
    names = functions if weights else ("reward",)
    return Config.model_validate(
        {
            "data": {"train": "a.jsonl", "heldout": "b.jsonl", "prompts_per_step": PROMPTS},
            "rollout": {"samples_per_prompt": SAMPLES},
            "algorithm": {"mini_batch_size": PROMPTS * SAMPLES, "options": options},
            "rewards": {"reward": weights} if weights else {},
            "services": {
                name: {"role": "reward", "address": f"127.0.0.1:{port}", "function": function}
                for port, (name, function) in enumerate(zip(names, functions, strict=True), 7000)
            },
        }
    )


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def step_of(task: Task) -> Step:
    return Step(StepContext(4), task.draw, FutureBatch(PROMPTS * SAMPLES, {}))


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


def test_a_dense_term_of_the_reward_does_not_hide_groups_that_are_all_right_or_all_wrong() -> None:
    task = DenseTask(SAME, MIXED, SAME, SAME, SAME, SAME, MIXED, MIXED, MIXED)
    columns: Any = task.sample(step_of(task)).result(["prompt"]).columns
    assert columns["prompt"].values == ["1", "1", "6", "6", "7", "7"]


@pytest.mark.parametrize(
    ("functions", "weights", "options", "services"),
    [
        (("exact_match",), None, {}, []),
        (("length", "math", "gsm8k"), {"length": 1, "math": 1, "gsm8k": 1}, {}, ["math"]),
        (("length", "math"), {"length": 1, "math": 1}, {"filter_by": "length"}, ["length"]),
    ],
)
def test_groups_are_filtered_by_the_first_service_that_checks_answers_or_by_the_one_that_is_named(
    functions: tuple[str, ...], weights: Any, options: dict[str, Any], services: list[str]
) -> None:
    assert filtered_by(config_of(*functions, weights=weights), DAPOOptions(**options)) == services


def test_sources_that_are_only_evaluated_on_need_nothing_to_filter_by() -> None:
    tables = config_of("length", "format", weights={"length": 1, "format": 1}).model_dump(exclude_unset=True)
    tables["services"]["answer"] = {"role": "reward", "address": "127.0.0.1:7010", "function": "math"}
    sources = [{"path": "a.jsonl", "heldout": "b.jsonl", "reward": "answer"}, {"heldout": "c.jsonl"}]
    tables["data"] = {"sources": sources, "prompts_per_step": PROMPTS}
    assert filtered_by(Config.model_validate(tables), DAPOOptions()) == []
    with pytest.raises(ConfigError, match="'length', only of: answer"):
        filtered_by(Config.model_validate(tables), DAPOOptions(filter_by="length"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "made of length, format; name the one"),
        ({"filter_by": "lenght"}, "'lenght', only of: format, length"),
    ],
)
def test_a_reward_of_which_nothing_says_what_to_filter_by_is_refused(
    options: dict[str, Any], text: str
) -> None:
    config = config_of("length", "format", weights={"length": 1, "format": 1})
    with pytest.raises(ConfigError, match=text):
        check(config, DAPOOptions(**options))
