"""Two runs at a time on one reference and one reward, each with an actor and a critic of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from controller import job
from controller.config.config import Config
from integration.harness import (
    Cluster,
    Processes,
    Service,
    free_ports,
    wait_until,
    write_config,
)
from integration.resuming import Results, Resumable
from services.runtime.sessions import ABSENCE_S

pytestmark = pytest.mark.timeout(240)

LEARNERS = (("actor", "critic"), ("lone_actor", "cost_critic"))
"""Actor and critic of each run."""
START_TIMEOUT_S = 110.0
STOP_TIMEOUT_S = 40.0


@dataclass
class Site:
    """Services that learn, and frozen ones that runs share.

    Attributes:
        cluster: Services of all tests.
        frozen: Config of the reference and the reward.
    """

    cluster: Cluster
    frozen: Config

    def config(self, run: int, directory: Path, steps: int = 2) -> Config:
        """The config of the first or the second run."""
        actor, critic = LEARNERS[run]
        config = self.cluster.select(actor=actor, critic=critic)
        table = config.run.model_copy(update={"directory": directory, "steps": steps, "seed": run})
        services = {**config.services, **self.frozen.services}
        return config.model_copy(update={"run": table, "services": services})

    def sessions(self) -> list[int]:
        """Number of sessions that each shared service has open."""
        found = []
        for name, table in self.frozen.services.items():
            service = Service(name, table.address)
            found.append(service.description.sessions)
            service.close()
        return found


def results_of(config: Config, barrier: threading.Barrier | None = None) -> Results:
    """Runs PPO, once all threads have come to the barrier, and returns its results."""
    if barrier is not None:
        barrier.wait(20)
    return Results.of(job.run(config, "ppo").directory)


def at_once(configs: Sequence[Config]) -> list[Results]:
    """Runs PPO by several configs at a time."""
    barrier = threading.Barrier(len(configs))
    with ThreadPoolExecutor(len(configs)) as threads:
        runs = [threads.submit(results_of, config, barrier) for config in configs]
        return [run.result() for run in runs]


def test_two_runs_at_once_on_one_reference_and_one_reward_give_the_same_bits_as_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    site = Site(cluster, cluster.select(reference="reference", reward="reward"))
    alone = [results_of(site.config(run, tmp_path / f"alone-{run}", steps=1)) for run in range(2)]
    assert at_once([site.config(run, tmp_path / f"both-{run}", steps=1) for run in range(2)]) == alone
    assert site.sessions() == [0, 0]


@pytest.fixture(scope="module")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A reference of two ranks, and a reward."""
    directory, processes = tmp_path_factory.mktemp("shared"), Processes()
    ports = free_ports(2)
    reference, reward = (
        cluster.config.services[name].model_copy(update={"address": f"127.0.0.1:{port}", "ranks": ranks})
        for name, port, ranks in (("reference", ports[0], 2), ("reward", ports[1], 1))
    )
    frozen = cluster.config.model_copy(update={"services": {"reference": reference, "reward": reward}})
    path = write_config(frozen, directory / "frozen.toml")
    try:
        up = processes.serve(path, directory / "logs")
        yield Site(cluster, frozen)
        up.terminate()
        assert up.wait(STOP_TIMEOUT_S) == 0
    finally:
        processes.kill()


@pytest.fixture(scope="module")
def alone(site: Site, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Results of each run while the other is not there."""
    return [results_of(site.config(run, tmp_path_factory.mktemp("alone"), steps=3)) for run in range(2)]


@pytest.mark.slow
def test_two_runs_at_once_on_a_reference_of_two_ranks_give_the_same_bits_as_alone(
    site: Site, alone: list[Results], tmp_path: Path
) -> None:
    assert at_once([site.config(run, tmp_path / f"both-{run}", steps=3) for run in range(2)]) == alone


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_the_other_on_its_reference_undisturbed(
    site: Site, alone: list[Results], tmp_path: Path
) -> None:
    """The services end the session of the one that was killed by themselves."""
    (tmp_path / "killed").mkdir()
    config = site.config(1, tmp_path / "killed" / "runs", steps=1000)
    killed = Resumable(config, tmp_path / "killed")
    process = killed.start()
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(results_of, site.config(0, tmp_path / "survivor", steps=3))
        wait_until(lambda: killed.steps_done >= 0, START_TIMEOUT_S, "a step of the run that is to be killed")
        process.send_signal(signal.SIGKILL)
        assert run.result() == alone[0]
    wait_until(lambda: site.sessions() == [0, 0], ABSENCE_S + 10, "the end of the session that was killed")
