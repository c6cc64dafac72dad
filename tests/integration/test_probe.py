"""Costs that are measured on running services: calibration by `rlhf-map probe`, the plan that is found for CPU devices,
and the simulation of a run from its timeline."""

from __future__ import annotations

import tomllib
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from click.testing import CliRunner, Result

from controller import job
from controller.algorithms import find_algorithm
from controller.api import open_run
from controller.config.config import Config
from controller.mapping import probe
from controller.mapping.cli import main
from controller.mapping.devices import read_devices
from controller.simulation.durations import measured
from controller.simulation.run import simulate_run
from controller.tracking.timeline import read_events
from controller.training.run import Run
from integration.harness import Cluster, free_ports, write_config
from nccl_transfer.refs.columns import Jagged
from rlhf.v1 import worker_pb2

pytestmark = pytest.mark.timeout(400)

ROLES = ("actor", "critic", "reference", "reward")
EXPORT = worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE
LENGTHS = ("--prompts", "8")


@pytest.fixture
def four(cluster: Cluster) -> Config:
    """The config of PPO on running services."""
    return cluster.select(**{role: role for role in ROLES})


def mapped(command: str, config: Path, *options: str) -> Result:
    return CliRunner().invoke(main, [command, str(config), "--algo", "ppo", "--devices", "CPU:2", *options])


def sha256_of(run: Run, name: str) -> str:
    """The sha256 of the weights that a service holds."""
    saved = run.groups[name].save_checkpoint(str(run.directory / f"{name}-weights"), EXPORT)
    return saved.records()[0].responses[0].sha256


def test_a_probe_writes_a_table_and_leaves_services_with_their_models(four: Config, tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    done = mapped("probe", write_config(four, tmp_path / "config.toml"), "-o", str(table))
    assert done.exit_code == 0, done.output
    for call in (
        "actor.generate_sequences, one token",
        "actor.generate_sequences ",
        "actor.compute_log_prob",
        "reference.compute_ref_log_prob",
        "critic.compute_values",
        "critic.update_critic ",
        "critic.update_critic, whole",
        "actor.update_actor ",
        "actor.update_actor, whole",
    ):
        assert call in done.output
    (found,) = read_devices(table).values()
    assert found.call_us > 0, "small calls take nothing but the time of a call"
    assert "Measured by rlhf-map probe" in table.read_text()
    with open_run(four, "ppo", keep_weights=True) as run:
        left = {name: sha256_of(run, name) for name in ("actor", "critic")}
    with open_run(four, "ppo") as run:
        assert {name: sha256_of(run, name) for name in left} == left


def test_a_probe_that_fails_midway_leaves_services_with_their_models(
    four: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actor and critic have been updated once when an update is refused."""
    made_up, calls = probe._made_up, count(1)

    def bad_in_step_2(lengths: np.ndarray, seed: int) -> Jagged[np.ndarray]:
        column = made_up(lengths, seed)
        return column if next(calls) == 1 else Jagged(column.values * np.float32(np.nan), column.lengths)

    with open_run(four, "ppo") as run:
        models = {name: sha256_of(run, name) for name in ("actor", "critic")}
    monkeypatch.setattr(probe, "_made_up", bad_in_step_2)
    done = mapped("probe", write_config(four, tmp_path / "config.toml"))
    assert done.exit_code == 1, done.output
    assert "not finite" in done.output
    assert next(calls) == 3
    with open_run(four, "ppo", keep_weights=True) as run:
        assert {name: sha256_of(run, name) for name in models} == models


def test_a_probe_does_not_disturb_a_run(four: Config, tmp_path: Path) -> None:
    path = write_config(four, tmp_path / "config.toml")
    with open_run(four, "ppo") as run:
        done = mapped("probe", path)
        assert done.exit_code == 1, done.output
        assert "error: " in done.output
        assert "run" in done.output
        assert sha256_of(run, "actor")


@pytest.mark.full
def test_the_plan_found_for_two_cpu_devices_runs_as_written(config: Config, tmp_path: Path) -> None:
    ports = iter(free_ports(len(ROLES)))
    services = {
        role: config.services[role].model_copy(update={"address": f"127.0.0.1:{next(ports)}"})
        for role in ROLES
    }
    # The launcher does not find the functions of the tests.
    services["reward"] = services["reward"].model_copy(update={"function": "exact_match"})
    run = config.run.model_copy(update={"steps": 2})
    given = write_config(
        config.model_copy(update={"services": services, "run": run}), tmp_path / "given.toml"
    )
    plan = tmp_path / "plan.toml"
    done = mapped("find", given, "-o", str(plan), *LENGTHS)
    assert done.exit_code == 0, done.output
    written = tomllib.loads(plan.read_text())
    devices = [device for names in written["pools"].values() for device in names]
    assert len(devices) == len(set(devices)) == 2

    finished = job.run(plan, "ppo", launch=True)
    assert finished.summary["steps"] == 2
    events = read_events(finished.directory / "timeline.json")
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for name in ("actor", "critic", "reference"):
        tracks = {
            event["tid"]
            for event in events
            if event["ph"] == "X" and processes[event["pid"]] == name and event["name"].startswith("compute_")
        }
        assert len(tracks) == written["services"][name]["ranks"], name


@pytest.mark.full
def test_a_measured_run_is_repeated_by_the_simulation(four: Config) -> None:
    """Both times are of one run, so that the speed of the machine does not matter."""
    algorithm, steps = find_algorithm("ppo"), 6
    settled = four.model_copy(update={"run": four.run.model_copy(update={"steps": steps})})
    done = job.run(settled, "ppo")
    known = [line["time/step_s"] for line in done.metrics if "time/step_s" in line]
    durations = measured(done.directory, list(settled.services))
    trace = simulate_run(algorithm.configure(settled), algorithm, durations, [(8, 1.0)], [(6, 1.0)], steps)
    found = [metrics["time/step_s"] for metrics in trace.metrics]
    assert len(found) == len(known) == steps
    assert median(found) == pytest.approx(median(known), rel=0.1)
