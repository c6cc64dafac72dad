"""Runs whose steps overlap, on real services: the same bits each time, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller import job
from controller.config.config import Config
from controller.tracking.timeline import read_events
from integration.harness import Cluster
from integration.resuming import Results, resumable, with_tables

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

STEPS = 6
ROLES = ("actor", "critic", "reference", "reward")


@pytest.fixture(scope="module")
def overlapping(cluster: Cluster) -> Config:
    """The config of a run with an adaptive KL whose steps overlap, on services that are up."""
    return with_tables(
        cluster.select(**{role: role for role in ROLES}),
        run={"steps": STEPS, "evaluate_every": 4, "ahead": 1},
        algorithm={
            "kl_target": 0.01,
            "kl_horizon": 200,
            "kl_reward_coefficient": 0.05,
            "max_log_prob_drift": 0.0,
        },
        checkpoint={"every": 3},
    )


def executed(config: Config, directory: Path, algorithm: str = "ppo") -> Path:
    return job.run(with_tables(config, run={"directory": directory}), algorithm).directory


@pytest.mark.parametrize("segments", [1, 2])
def test_overlapping_steps_give_the_same_bits_again_and_after_a_kill(
    overlapping: Config, segments: int, tmp_path: Path
) -> None:
    overlapping = with_tables(overlapping, rollout={"segments": segments})
    first = executed(overlapping, tmp_path / "first")
    undisturbed = Results.of(first)
    ages = [line.get("staleness/max") for line in undisturbed.metrics]
    assert ages == [None, 0, 1, 1, 0, 1, 1]
    assert Results.of(executed(overlapping, tmp_path / "second")) == undisturbed
    starts: dict[tuple[int, str], float] = {}
    for event in read_events(first / "timeline.json"):
        if event.get("ph") == "X" and event["name"] in ("generate_sequences", "update_actor"):
            call = event["args"]["step"], event["name"]
            starts[call] = min(event["ts"], starts.get(call, event["ts"]))
    assert starts[2, "generate_sequences"] < starts[1, "update_actor"]
    with resumable(overlapping, tmp_path / "killed") as run:
        run.kill_after(run.start(), 3)
        run.finish(run.resume())
        assert Results.of(run.run_dir) == undisturbed


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "dapo", "remax"])
def test_algorithms_run_with_overlapping_steps(cluster: Cluster, algorithm: str, tmp_path: Path) -> None:
    config = with_tables(
        cluster.select(**{role: role for role in ROLES}),
        run={"directory": tmp_path, "steps": 3, "ahead": 1},
        rollout={"samples_per_prompt": 4},
    )
    done = job.run(config, algorithm)
    assert done.summary["steps"] == 3
