"""Episodes of several turns on real services: every algorithm that generates trains on them, a reward of the
environment improves, and a killed run goes on bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.harness import Cluster, Processes, free_ports, write_config
from integration.resuming import Results, resumable, with_tables
from rlhf.errors import RlhfError
from settings.reward import RewardTable

pytestmark = pytest.mark.timeout(240)

CALCULATOR = "examples.plugins.rlhf_example.calculator:Calculator"
NINES = "toy_environments:Nines"
SERVICES = {
    "actor": "actor",
    "critic": "critic",
    "cost_critic": "cost_critic",
    "reference": "reference",
    "reward": "reward",
    "cost": "tensor_scorer",
}
PARITY = 1e-4
"""Largest difference of the log-probabilities of rollout and training, in nats: were a token another one, or a mask
shifted, they would differ by more."""


def with_environment(config: Config, factory: str, **tables: dict[str, Any]) -> Config:
    environment = {"factory": factory, "turns": 3, "turn_tokens": 4, **tables.pop("environment", {})}
    table = config.rollout.environment.model_copy(update=environment)
    rollout = {"max_response_tokens": 20, "environment": table, **tables.pop("rollout", {})}
    return with_tables(config, rollout=rollout, **tables)


@pytest.fixture(autouse=True)
def finds_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the controller's command does where the module is in its directory."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture(scope="module")
def environment_reward(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardTable]:
    """A reward service that is up and returns what environments have given."""
    directory, (port,) = tmp_path_factory.mktemp("reward"), free_ports(1)
    table = {"role": "reward", "address": f"127.0.0.1:{port}", "function": "environment"}
    reward = RewardTable.model_validate(table)
    path = write_config(config.model_copy(update={"services": {"reward": reward}}), directory / "reward.toml")
    processes = Processes()
    try:
        processes.serve(path, directory / "logs")
        yield reward
    finally:
        processes.kill()


@pytest.fixture
def own_rewards(cluster: Cluster, environment_reward: RewardTable) -> Config:
    """The config of a run whose rewards are those of the environment."""
    config = cluster.select(actor="actor", critic="critic", reference="reference")
    return config.model_copy(update={"services": {**config.services, "reward": environment_reward}})


@pytest.mark.parametrize(
    "name", ["grpo", "ppo", "rloo", "dapo", "remax", "reinforce_pp", "gspo", "safe_rlhf"]
)
def test_an_algorithm_trains_on_episodes_of_exact_tokens(cluster: Cluster, tmp_path: Path, name: str) -> None:
    run = {"directory": tmp_path, "steps": 2, "samples": 2}
    config = with_environment(cluster.select(**SERVICES), CALCULATOR, run=run)
    done = job.run(config, name)
    lines = read_metrics(done.directory)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    for line in lines[1:]:
        assert 1 < line["episode/turns_mean"] <= 3
        assert line["episode/failed"] == 0
        assert 0 <= line["episode/finished"] <= 1
        assert "actor/finished" not in line
        assert line["episode/sampled_mean"] < line["response/length_mean"] <= 20
        assert line["rollout/parity_max_abs"] < PARITY
        assert line["actor/grad_norm"] > 0
    samples = [json.loads(line) for line in (done.directory / "samples.jsonl").read_text().splitlines()]
    assert any(";" in sample["response"] for sample in samples)


def test_the_reward_of_an_environment_improves(own_rewards: Config, tmp_path: Path) -> None:
    run = {"directory": tmp_path, "steps": 10, "samples": 0}
    done = job.run(with_environment(own_rewards, NINES, run=run), "grpo")
    rewards = [line["reward/mean"] for line in read_metrics(done.directory)[1:]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


def test_a_killed_run_of_episodes_goes_on_with_the_same_results(own_rewards: Config, tmp_path: Path) -> None:
    run = {"directory": tmp_path / "undisturbed", "steps": 4}
    config = with_environment(own_rewards, NINES, run=run)
    undisturbed = Results.of(job.run(config, "ppo").directory)
    with resumable(with_tables(config, checkpoint={"every": 1}), tmp_path / "killed") as killed:
        killed.kill_after(killed.start(), 1)
        killed.finish(killed.resume())
        assert Results.of(killed.run_dir) == undisturbed


def test_steps_that_overlap_play_episodes_with_the_same_bits(own_rewards: Config, tmp_path: Path) -> None:
    shas = set()
    for name in ("first", "second"):
        run = {"directory": tmp_path / name, "steps": 3, "ahead": 1, "samples": 0}
        done = job.run(with_environment(own_rewards, NINES, run=run), "ppo")
        shas.add(done.summary["actor_sha256"])
        assert [line["staleness/max"] for line in read_metrics(done.directory)[1:]] == [0, 1, 1]
    assert len(shas) == 1


def test_an_episode_that_fails_ends_the_run_as_a_reward_that_fails_does(
    own_rewards: Config, tmp_path: Path
) -> None:
    run = {"directory": tmp_path, "steps": 1}
    config = with_environment(own_rewards, NINES, run=run, environment={"options": {"fails": "+"}})
    with pytest.raises(
        RlhfError, match=r"reward: 16 of 16 rows .*Nines: step: ValueError: the calculator is broken"
    ):
        job.run(config, "grpo")


def test_the_groups_of_failed_episodes_are_dropped_where_asked(own_rewards: Config, tmp_path: Path) -> None:
    run, algorithm = {"directory": tmp_path, "steps": 1}, {"on_failed_reward": "drop_group"}
    environment = {"options": {"fails": "1"}}
    config = with_environment(own_rewards, NINES, run=run, algorithm=algorithm, environment=environment)
    line = read_metrics(job.run(config, "grpo").directory)[1]
    assert line["reward/rows_dropped"] > 0
    assert line["episode/failed"] == 0
