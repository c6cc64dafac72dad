"""One text of an algorithm under all placements, on real services: the same bits, and calls that overlap where their
devices differ and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest

from controller import job
from controller.config.config import Config
from controller.config.placements import Placement
from controller.evaluate import evaluate
from controller.role_groups.weights import PARTS, SYNC
from controller.tracking.metrics import read_metrics
from controller.tracking.timeline import read_events
from integration.conftest import Task
from integration.harness import Processes, free_ports, write_config
from integration.resuming import Results, resumable, with_tables

pytestmark = pytest.mark.timeout(600)

PPO = ("actor", "rollout", "critic", "reference", "reward")
BYTES = "transfer/"
"""Metrics of bytes, which differ between placements: rows are on other ranks."""


@pytest.fixture(scope="module")
def placed(config: Config, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """The config of services of all roles that are up, with a rollout service of the actor's mesh."""
    # With matmul = "auto" each service measures for itself, and two of the same role may differ.
    model = {"model": task.model, "matmul": "mkl"}
    learner = {
        **model,
        "optimizer": {"learning_rate": 3e-4},
        "output_roots": [tmp_path_factory.getbasetemp()],
    }
    tables: dict[str, dict[str, Any]] = {
        "actor": {"role": "actor", "ranks": 2, **learner},
        "rollout": {"role": "rollout", "ranks": 2, **model},
        "critic": {"role": "critic", **learner},
        "values": {"role": "values", **model},
        "cost_values": {
            "role": "values",
            "weights_of": "cost_critic",
            **model,
            "ranks": 2,
            "engine": "3d",
            "mesh": "1-2-1",
        },
        "cost_critic": {"role": "critic", **learner},
        "reference": {"role": "reference", **model},
        "reward": {"role": "reward", "function": "toy_rewards:digit_mean"},
        "cost": {"role": "reward", "function": "toy_rewards:digit_mean"},
    }
    ports = free_ports(len(tables))
    services = {
        name: {"address": f"127.0.0.1:{port}", **table}
        for (name, table), port in zip(tables.items(), ports, strict=True)
    }
    found = Config.model_validate({**config.model_dump(exclude_unset=True), "services": services})
    directory = tmp_path_factory.mktemp("placed")
    processes = Processes()
    try:
        processes.serve(write_config(found, directory / "services.toml"), directory / "logs")
        yield found
    finally:
        processes.kill()


def on(config: Config, names: tuple[str, ...], placement: str | None, **tables: Any) -> Config:
    """The config of a run on some of the services, under a placement, with other values in some of its tables."""
    services = {name: config.services[name] for name in names}
    found = with_tables(config.model_copy(update={"services": services}), **tables)
    return found.model_copy(update={"placement": placement}) if placement else found


def executed(config: Config, directory: Path, algorithm: str = "ppo") -> Path:
    return job.run(with_tables(config, run={"directory": directory}), algorithm).directory


def outcome(directory: Path) -> Results:
    """The results of a run that do not depend on where its rows are."""
    results = Results.of(directory)
    metrics = [
        {name: value for name, value in line.items() if not name.startswith(BYTES)}
        for line in results.metrics
    ]
    return Results(metrics, results.samples, results.sha256)


def overlapping_calls(config: Config, directory: Path) -> set[bool]:
    """For the pairs of calls of two services that overlap in the timeline, whether the services share a device."""
    events = read_events(directory / "timeline.json")
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    spans = [
        (tracks[event["pid"], event["tid"]].split(" (")[0], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event["cat"] == "controller" and event["name"] not in PARTS
    ]
    assert {service for service, _, _ in spans} == set(config.services)
    return {
        bool(config.devices_of(one) & config.devices_of(other))
        for (one, begin, end), (other, other_begin, other_end) in combinations(spans, 2)
        if one != other and begin < other_end and other_begin < end
    }


def check_placements(config: Config, placements: tuple[str, ...], directory: Path) -> None:
    """Runs of PPO under these placements have the results of one whose actor generates itself, and overlap only where
    their devices differ."""
    alone = outcome(executed(on(config, tuple(name for name in PPO if name != "rollout"), None), directory))
    for placement in placements:
        run = on(config, PPO, placement)
        done = executed(run, directory / placement)
        assert outcome(done) == alone, placement
        assert overlapping_calls(run, done) == (set() if placement == "colocate" else {False}), placement
        last = read_metrics(done)[-1]
        assert last[f"{BYTES}weights/bytes"] > 0
        assert last[f"time/{SYNC}_s"] > 0


@pytest.mark.slow
def test_a_policy_is_the_same_where_another_service_generates(placed: Config, tmp_path: Path) -> None:
    check_placements(with_tables(placed, run={"steps": 2}), ("disaggregated",), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_critic_is_the_same_where_another_service_computes_its_values(
    placed: Config, ahead: int, tmp_path: Path
) -> None:
    run = {"steps": 4, "evaluate_every": 0, "ahead": ahead}
    alone = outcome(executed(on(placed, PPO, None, run=run), tmp_path / "alone"))
    shadowed = on(placed, (*PPO, "values"), None, run=run)
    done = executed(shadowed, tmp_path / "shadowed")
    assert outcome(done) == alone
    assert overlapping_calls(shadowed, done) == {False}


@pytest.mark.slow
def test_values_are_the_same_to_rounding_on_another_engine_and_mesh(placed: Config, tmp_path: Path) -> None:
    names = ("actor", "critic", "cost_critic", "reference", "reward", "cost")
    run = {"steps": 3, "evaluate_every": 0}
    alone = outcome(executed(on(placed, names, None, run=run), tmp_path / "alone", "safe_rlhf"))
    shadowed = on(placed, (*names, "cost_values"), None, run=run)
    done = outcome(executed(shadowed, tmp_path / "shadowed", "safe_rlhf"))
    for line, other in zip(done.metrics, alone.metrics, strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4)


@pytest.mark.full
def test_a_policy_is_the_same_under_all_placements(placed: Config, tmp_path: Path) -> None:
    check_placements(placed, get_args(Placement), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_with_a_rollout_service_goes_on_after_a_kill(
    placed: Config, ahead: int, tmp_path: Path
) -> None:
    run_table = {"steps": 6, "evaluate_every": 4, "ahead": ahead}
    config = on(placed, PPO, "disaggregated", run=run_table, checkpoint={"every": 3})
    whole = executed(config, tmp_path / "whole")
    ages = [line.get("staleness/max") for line in Results.of(whole).metrics]
    assert ages == ([None, 0, 1, 1, 0, 1, 1] if ahead else [None] * 7)
    with resumable(config, tmp_path / "killed") as run:
        run.kill_after(run.start(), 3)
        run.finish(run.resume())
        assert Results.of(run.run_dir) == Results.of(whole)
    measured = evaluate(
        whole / "checkpoints" / "step-6", settings=(f"run.directory='{tmp_path / 'measured'}'",)
    )
    last = read_metrics(whole)[-1]
    assert measured.summary["accuracy"] == last["evaluation/accuracy"]


@pytest.mark.full
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "dapo", "safe_rlhf", "remax"])
def test_algorithms_run_disaggregated_from_their_texts(
    placed: Config, algorithm: str, ahead: int, tmp_path: Path
) -> None:
    config = on(
        placed,
        tuple(placed.services),
        "disaggregated",
        run={"ahead": ahead},
        rollout={"samples_per_prompt": 4},
    )
    done = executed(config, tmp_path, algorithm)
    lines = Results.of(done).metrics
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert max(line.get("staleness/max", 0) for line in lines) == ahead
    generated = {
        event["cat"]
        for event in read_events(done / "timeline.json")
        if event.get("ph") == "X" and event["name"] == "generate_sequences"
    }
    assert generated == {"controller", "rollout"}
