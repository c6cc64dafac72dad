"""Dynamic sampling: rounds of prompts until enough groups have something to teach."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.simulated_run import QUICKSTARTS, Weather, simulate

from client.session import StepContext
from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.mapping.record import record_dataflow
from controller.role_groups.dataflow import FutureBatch
from controller.training.sampling import GroupOptions, check_sampling, filtered_by, sample, sample_groups
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
        return sample_groups(task, step, task, task, GroupOptions(max_rounds=max_rounds))


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
    assert filtered_by(config_of(*functions, weights=weights), GroupOptions(**options)) == services


def test_sources_that_are_only_evaluated_on_need_nothing_to_filter_by() -> None:
    tables = config_of("length", "format", weights={"length": 1, "format": 1}).model_dump(exclude_unset=True)
    tables["services"]["answer"] = {"role": "reward", "address": "127.0.0.1:7010", "function": "math"}
    sources = [{"path": "a.jsonl", "heldout": "b.jsonl", "reward": "answer"}, {"heldout": "c.jsonl"}]
    tables["data"] = {"sources": sources, "prompts_per_step": PROMPTS}
    assert filtered_by(Config.model_validate(tables), GroupOptions()) == []
    with pytest.raises(ConfigError, match="'length', only of: answer"):
        filtered_by(Config.model_validate(tables), GroupOptions(filter_by="length"))


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
        check_sampling(config, GroupOptions(max_rounds=10, **options))


GROUPED = ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp")
ROUNDS = ("algorithm.options={max_rounds=5}", "run.evaluate_every=0")


def test_without_rounds_all_groups_are_trained_on_and_nothing_is_scored_yet() -> None:
    task: Any = Task(SAME, MIXED, SAME)
    made = sample(task, step_of(task), task, task, GroupOptions())
    assert made.rows == PROMPTS * SAMPLES
    assert "rewards" not in made
    assert task.drawn == PROMPTS


@pytest.mark.parametrize("name", GROUPED)
def test_algorithms_that_compare_groups_train_on_those_that_differ(name: str, tmp_path: Path) -> None:
    run = simulate(tmp_path, name, *ROUNDS, "run.steps=4", "run.rollouts_every=1")
    rounds = [int(run.notes.metrics[step]["groups/rounds"]) for step in (1, 2, 3, 4)]
    generated = [
        sum(entry.method == "generate_sequences" and entry.step == step for entry in run.log)
        for step in (1, 2, 3)
    ]
    assert generated == rounds[:3], "the last step is evaluated too"
    assert max(rounds) > 1, "groups are left out"
    for step in (1, 2, 3, 4):
        scores = defaultdict(set)
        for row in run.notes.rollouts_of[step]:
            scores[row["prompt_number"]].add(row["reward"])
        assert len(scores) == run.notes.metrics[step]["groups/trained"] == 4
        assert all(len(of_group) == 2 for of_group in scores.values())


def test_grpo_with_the_keys_of_dapo_is_dapo(tmp_path: Path) -> None:
    keys = (
        "algorithm.kl_loss_coefficient=0",
        "algorithm.aggregation='token-mean'",
        "algorithm.clip_high=0.28",
    )
    grpo = simulate(tmp_path, "grpo", "algorithm.options={max_rounds=10}", *keys)
    assert grpo.states() == simulate(tmp_path, "dapo").states()


@pytest.mark.parametrize("name", GROUPED)
def test_a_run_with_rounds_repeats_and_resumes(name: str, tmp_path: Path) -> None:
    settings = ("algorithm.options={max_rounds=5}", "run.ahead=1", "run.steps=6")
    whole = simulate(tmp_path, name, *settings, every=2, weather=Weather(seed=3, longest_s=0.002))
    rest = simulate(tmp_path, name, *settings, every=2, resumed=whole.saver.saved[4])
    assert rest.states() == whole.states()
    assert rest.notes.metrics == {step: found for step, found in whole.notes.metrics.items() if step > 4}


@pytest.mark.parametrize("name", GROUPED)
def test_what_a_run_with_rounds_needs_is_foreseen(name: str) -> None:
    algorithm = find_algorithm(name)
    config = algorithm.configure(load(QUICKSTARTS / "groups.toml", ("algorithm.options={max_rounds=3}",)))
    assert algorithm.further_responses(config) == (2 * config.rows_per_step, 0)
    methods = [call.method for call in record_dataflow(algorithm, config)]
    assert methods.index("compute_reward") < methods.index("compute_log_prob")
    assert methods.count("compute_reward") == 1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("algorithm.options={filter_by='reward'}",), "filter_by: needs max_rounds above 0"),
        (
            ("algorithm.options={max_rounds=2}", "rollout.samples_per_prompt=1"),
            "dynamic sampling .* at least 2",
        ),
        (("algorithm.options={max_rounds=2,filter_by='x'}",), "no reward is made of 'x'"),
    ],
)
def test_rounds_that_make_no_sense_are_refused(settings: tuple[str, ...], text: str) -> None:
    algorithm = find_algorithm("reinforce_pp")
    config = load(QUICKSTARTS / "groups.toml", ("algorithm.mini_batch_size=8", *settings))
    with pytest.raises(ConfigError, match=text):
        algorithm.configure(config)
