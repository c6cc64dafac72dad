"""Services on one device that do not fit there together, on real services: what their ranks have there at once is
within its memory, and a run has the numbers of one with memory for all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.config.config import Config
from controller.config.memory import GB
from controller.tracking.metrics import read_metrics
from controller.tracking.timeline import read_events
from deploy.memory import predict_memory
from integration.conftest import Task
from integration.harness import Processes, free_ports, write_config
from integration.resuming import Results, resumable, with_tables
from rlhf.errors import RlhfError, ServiceLost

pytestmark = pytest.mark.timeout(600)

MODELS = ("actor", "critic", "reference")
METHODS = ("offload", "onload")
MOVED = tuple(f"transfer/{method}/bytes" for method in METHODS)


@dataclass(frozen=True)
class Device:
    """Services on one simulated device per rank.

    Attributes:
        config: Config of runs, without `device_memory_gb`.
        directory: Where ranks note what is on their devices; see `limited_services`.
        tightest: The least memory of a device, in bytes, for which `rlhf-deploy check` finds that the services take
            turns in it.
    """

    config: Config
    directory: Path
    tightest: int
    processes: Processes

    @property
    def limited(self) -> Config:
        return self.config.model_copy(update={"device_memory_gb": self.tightest / GB})

    def peak_of(self, service: str, method: str) -> int:
        """Returns the most bytes that a rank of a service had on its device in calls of a method."""
        lines = [
            json.loads(line)
            for path in self.directory.glob(f"{service}-*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return max(line["peak"] for line in lines if line["method"] == method)

    def most_bytes(self) -> int:
        """Forgets what ranks have noted, and returns the most bytes that they had at once on a device. Of a service
        with several ranks, the one counts that had most."""
        changes: list[tuple[float, str, str, int]] = []
        for path in self.directory.glob("*.jsonl"):
            service, rank = path.stem.rsplit("-", 1)
            for line in map(json.loads, path.read_text().splitlines()):
                changes.append((line["began"], service, rank, line["peak"]))
                changes.append((line["ended"], service, rank, line["after"]))
            path.unlink()
        held: dict[str, dict[str, int]] = {name: {} for name in MODELS}
        most = 0
        for _, service, rank, nbytes in sorted(changes):
            if service in held:
                held[service][rank] = nbytes
                most = max(most, sum(max(ranks.values(), default=0) for ranks in held.values()))
        return most


def tightest(config: Config) -> int:
    """The least memory of a device in which the services take turns, in bytes."""
    services = predict_memory(config, MODELS, None).services
    assert set(services) == set(MODELS)

    def beside(name: str, stage: str) -> int:
        others = [each for other, each in services.items() if other != name]
        return sum(each.idle if stage in ("loading", "idle") else each.stays for each in others)

    return max(
        footprint.device_bytes + beside(name, stage)
        for name, service in services.items()
        for stage, footprint in service.stages.items()
    )


@pytest.fixture(scope="module")
def device(config: Config, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    with serving(config, task, tmp_path_factory) as made:
        yield made


@contextmanager
def serving(
    config: Config, task: Task, tmp_path_factory: pytest.TempPathFactory, **actor: Any
) -> Iterator[Device]:
    """Services on one simulated device per rank; the actor's table has the further keys `actor`."""
    base: dict[str, Any] = {"model": task.model, "device": "cpu"}
    learner = {
        **base,
        "optimizer": {"learning_rate": 3e-4},
        "output_roots": [tmp_path_factory.getbasetemp()],
    }
    tables: dict[str, dict[str, Any]] = {
        "actor": {"role": "actor", "ranks": 2, **learner, **actor},
        "critic": {"role": "critic", "ranks": 2, **learner},
        "reference": {"role": "reference", **base},
        "reward": {"role": "reward", "function": "toy_rewards:digit_mean"},
    }
    ports = free_ports(len(tables))
    services = {
        name: {"address": f"127.0.0.1:{port}", **table}
        for (name, table), port in zip(tables.items(), ports, strict=True)
    }
    given = config.model_dump(exclude_unset=True)
    # One mini-batch, so that no snapshot is taken: it would be in host memory.
    given |= {"placement": "colocate", "services": services, "algorithm": {"mini_batch_size": 32}}
    given["data"]["max_prompt_tokens"] = 8
    given["run"]["steps"] = 2
    found = Config.model_validate(given)
    directory = tmp_path_factory.mktemp("limited")
    processes = Processes()
    try:
        path = write_config(found, directory / "services.toml")
        processes.serve(path, directory / "logs", program="limited_services.py")
        yield Device(found, directory, tightest(found), processes)
    finally:
        processes.kill()


def executed(config: Config, directory: Path) -> Path:
    return job.run(with_tables(config, run={"directory": directory}), "ppo").directory


def outcome(directory: Path) -> Results:
    """The results of a run without the bytes that Offload and Onload moved."""
    results = Results.of(directory)
    metrics = [{name: value for name, value in line.items() if name not in MOVED} for line in results.metrics]
    return Results(metrics, results.samples, results.sha256)


def moved_services(directory: Path) -> set[tuple[str, str]]:
    """Method and service of the bars of Offload and Onload in the timeline of a run."""
    events = read_events(directory / "timeline.json")
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"].split(" (")[0]
        for event in events
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    return {
        (event["name"], tracks[event["pid"], event["tid"]])
        for event in events
        if event.get("ph") == "X" and event["cat"] == "controller" and event["name"] in METHODS
    }


@pytest.mark.full
def test_services_take_turns_in_the_memory_of_a_device(device: Device, tmp_path: Path) -> None:
    free = executed(device.config, tmp_path / "free")
    assert not moved_services(free)
    assert device.most_bytes() > device.tightest

    limited = executed(device.limited, tmp_path / "limited")
    assert device.most_bytes() <= device.tightest
    assert outcome(limited) == outcome(free)
    assert moved_services(limited) == {(method, name) for method in METHODS for name in MODELS}
    for line in read_metrics(limited)[1:]:
        for method in METHODS:
            assert line[f"transfer/{method}/bytes"] > 0
            assert line[f"time/transfer/{method}/seconds"] > 0

    (device.directory / "critic-1.full").touch()
    with pytest.raises(RlhfError, match=r"critic rank 1 .*Onload: OutOfMemoryError: tried to allocate"):
        executed(device.limited, tmp_path / "full")
    assert outcome(executed(device.limited, tmp_path / "again")) == outcome(free)


@pytest.mark.full
def test_an_actor_trains_in_the_memory_that_it_generated_in(
    config: Config, task: Task, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    outcomes, peaks, stages = [], [], []
    for sleeps in (False, True):
        with serving(config, task, tmp_path_factory, rollout_sleep=sleeps) as made:
            outcomes.append(outcome(executed(made.config, tmp_path / f"sleeps-{sleeps}")))
            peaks.append(made.peak_of("actor", "update_actor"))
            stages.append(predict_memory(made.config, ["actor"], None).services["actor"].stages)
    awake, asleep = stages
    weights = awake["update"].device["generation weights"]
    assert asleep["generation"].device["generation weights"] == weights
    assert "generation weights" not in asleep["update"].device
    assert outcomes[0] == outcomes[1]
    assert weights > 1 << 20
    # Tensors of calls before may be alive still, at most some rows of activations.
    assert peaks[0] - peaks[1] > 0.85 * weights


@pytest.mark.full
def test_a_run_goes_on_with_services_that_were_offloaded(device: Device, tmp_path: Path) -> None:
    config = with_tables(device.limited, run={"steps": 5}, checkpoint={"every": 1})
    whole = executed(config, tmp_path / "whole")
    with resumable(config, tmp_path / "killed") as run:
        run.kill_after(run.start(), 2)
        run.finish(run.resume())
        assert outcome(run.run_dir) == outcome(whole)


@pytest.mark.full
def test_a_run_ends_where_a_service_dies_offloaded(device: Device, tmp_path: Path) -> None:
    (device.directory / "critic-0.dies").touch()
    # The launcher ends the other services, whose calls may fail before the next call of the critic begins.
    with pytest.raises(ServiceLost, match=r"(critic|actor|reference) rank [01]"):
        executed(device.limited, tmp_path)
