"""Rewards over groups in runs on real services: from the package outside the repository, and in Node.js. Each response
scores what the function gives it beside all other responses to its prompt."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from python_path import python_path

from controller import algorithms, job
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import Algorithm
from controller.training.run import Run
from integration import node_reward, toy_rewards
from integration.harness import Cluster, Processes, free_ports, write_config
from integration.test_reward_node import within_reach
from settings.reward import RewardTable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RANKS, SAMPLES, STEPS = 2, 4, 2
START_TIMEOUT_S, RUN_TIMEOUT_S = 110.0, 150.0
READ = ("prompt", "response", "ground_truth", "metadata", "prompt_number", "rewards")
"""Columns that the oracles read."""
SERVICES = {"grpo": ("actor", "reference"), "ppo": ("actor", "critic", "reference")}
BONUS = 0.4

Row = Mapping[str, Any]
GroupScores = Callable[[Sequence[str], str], list[float]]


def shared(responses: Sequence[str], truth: str) -> list[float]:
    """The oracle of `shared`, in Python and in Node.js."""
    right = [text.strip() == truth.strip() for text in responses]
    return [1 / sum(right) if is_right else 0.0 for is_right in right]


def concise(responses: Sequence[str], truth: str) -> list[float]:
    """The oracle of `concise`: less than half of the points are for being as brief as the briefest."""
    lengths = {i: len(text) for i, text in enumerate(responses) if text.split() and text.split()[-1] == truth}
    best = min(lengths.values(), default=0)
    return [0.6 + BONUS * best / lengths[i] if i in lengths else 0.0 for i in range(len(responses))]


def composed(responses: Sequence[str], truth: str) -> list[float]:
    """The oracle of the composed reward: two services of groups and one of rows."""
    digits = [toy_rewards.digit_mean("", text, "", {}) for text in responses]
    parts = zip(shared(responses, truth), concise(responses, truth), digits, strict=True)
    return [first + 0.5 * second + 0.25 * third for first, second, third in parts]


def spied(name: str, seen: list[list[Row]]) -> Algorithm:
    """An algorithm that notes the rows of each step as its reward scored them."""
    algorithm = algorithms.find_algorithm(name)

    @functools.wraps(algorithm.function)
    def spying(run: Run, *options: Any) -> None:
        made = run.reward

        def reward(name: str = "reward") -> Any:
            found = made(name)
            score = found.score

            def noted(batch: FutureBatch, *args: Any, **others: Any) -> FutureBatch:
                scored = score(batch, *args, **others)
                columns: Any = scored.result(READ).columns
                seen.append([{name: columns[name].values[i] for name in READ} for i in range(scored.rows)])
                return scored

            found.score = noted
            return found

        run.reward = reward
        algorithm.function(run, *options)

    return dataclasses.replace(algorithm, function=spying)


def run_config(
    cluster: Cluster,
    directory: Path,
    rewards: Mapping[str, RewardTable],
    algorithm: str = "grpo",
    prompts: int = 3,
) -> Config:
    """A run with rewards on the services that are up. Its prompts do not divide over the ranks of the reward."""
    selected = cluster.select(**{name: name for name in SERVICES[algorithm]})
    tables = {
        "run": {"steps": STEPS, "directory": directory / "runs"},
        "data": {"prompts_per_step": prompts},
        "rollout": {"samples_per_prompt": SAMPLES, "temperature": 0.3},
        "algorithm": {"mini_batch_size": prompts * SAMPLES},
    }
    config = selected.model_copy(update={"data": within_reach(selected.data, directory)})
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in tables.items()}
    return config.model_copy(update={**changed, "services": {**config.services, **rewards}})


@pytest.fixture(scope="module")
def outside(
    cluster: Cluster, plugins: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RewardTable]]:
    """The rewards of the installed package, one in the services themselves and one in processes of its own."""
    directory, ports = tmp_path_factory.mktemp("outside"), free_ports(2)
    tables = {"shared": {"ranks": RANKS}, "concise": {"processes": 1, "options": {"bonus": BONUS}}}
    services = {
        name: RewardTable(
            role="reward", address=f"127.0.0.1:{port}", function=f"rlhf_example.rewards:{name}", **table
        )
        for port, (name, table) in zip(ports, tables.items(), strict=True)
    }
    config = cluster.config.model_copy(update={"services": services})
    processes = Processes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(plugins))
        path = write_config(config, directory / "rewards.toml")
        up = processes.serve(path, directory / "logs")
    try:
        yield services
    finally:
        processes.kill()
        up.communicate()


def check_scores(seen: Sequence[Sequence[Row]], prompts: int, oracle: GroupScores) -> None:
    """Every row has the score of the oracle for its whole group, and some groups have several right responses."""
    assert len(seen) == STEPS
    several = 0
    for rows in seen:
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(int(row["prompt_number"]), []).append(row)
        assert [len(group) for group in groups.values()] == [SAMPLES] * prompts
        for group in groups.values():
            (prompt,) = {row["prompt"] for row in group}
            assert prompt
            expected = oracle([row["response"] for row in group], group[0]["ground_truth"])
            assert [row["rewards"] for row in group] == pytest.approx(expected, abs=1e-12)
            several += sum(row["response"].strip() == row["ground_truth"] for row in group) > 1
    assert several


@pytest.mark.parametrize(
    ("algorithm", "prompts"), [("grpo", 3), pytest.param("grpo", 1, marks=pytest.mark.full), ("ppo", 3)]
)
def test_each_response_scores_what_the_function_gives_it_in_its_group(
    algorithm: str, prompts: int, cluster: Cluster, outside: dict[str, RewardTable], tmp_path: Path
) -> None:
    """With one prompt a rank gets no rows; ppo adds no groups to its batch."""
    seen: list[list[Row]] = []
    config = run_config(cluster, tmp_path, {"reward": outside["shared"]}, algorithm, prompts)
    done = job.run(config, spied(algorithm, seen))
    check_scores(seen, prompts, shared)
    assert done.summary["steps"] == STEPS
    assert 0 < done.summary["accuracy_after"] <= 1
    means = [sum(row["rewards"] for row in rows) / len(rows) for rows in seen]
    assert [line["score/mean"] for line in done.metrics[1:]] == pytest.approx(means)


def composition(cluster: Cluster, outside: dict[str, RewardTable], directory: Path) -> Config:
    """A run with a reward that is made of both rewards of the package and of one that scores rows."""
    services = {**outside, "digits": cluster.config.services["reward"]}
    weights = {"shared": 1.0, "concise": 0.5, "digits": 0.25}
    config = run_config(cluster, directory, services)  # type: ignore[arg-type]
    return config.model_copy(update={"rewards": {"reward": weights}})


def test_a_composed_reward_sees_groups_and_rows(
    cluster: Cluster, outside: dict[str, RewardTable], tmp_path: Path
) -> None:
    seen: list[list[Row]] = []
    job.run(composition(cluster, outside, tmp_path), spied("grpo", seen))
    check_scores(seen, 3, composed)


def test_the_command_trains_with_the_rewards_of_the_package(
    cluster: Cluster, outside: dict[str, RewardTable], tmp_path: Path
) -> None:
    path = write_config(composition(cluster, outside, tmp_path), tmp_path / "run.toml")
    processes = Processes()
    try:
        run = processes.start("rlhf-controller", "--algo", "grpo", "--config", str(path))
        _, errors = run.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        processes.kill()
    assert run.returncode == 0, errors
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["steps"] == STEPS


def test_a_reward_in_node_scores_groups(cluster: Cluster, reward_node: Path, tmp_path: Path) -> None:
    seen: list[list[Row]] = []
    with node_reward.serving(reward_node, "shared") as address:
        table = RewardTable(role="reward", address=address, external=True)
        job.run(run_config(cluster, tmp_path, {"reward": table}), spied("grpo", seen))
    check_scores(seen, 3, shared)
