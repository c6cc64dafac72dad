"""A controller that is killed, or stopped and replaced, while its services live: they go on with the state that they
hold, and the results are those of the run that nobody disturbed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.checkpoints.journal import read_journal
from controller.config.config import Config
from controller.tracking.ownership import LOCK
from integration.harness import Cluster, Processes, Service, wait_for_line, wait_until, write_config
from integration.resuming import (
    RUN_TIMEOUT_S,
    Results,
    Resumable,
    moments,
    resumable,
    sleep_until,
    with_tables,
)
from integration.test_resume_launched import ENGINES, launched, launched_on
from rlhf.v1 import worker_pb2

ROLES = {role: role for role in ("actor", "critic", "reference", "reward")}
STEPS = 6
ADAPTIVE = {"kl_target": 0.01, "kl_horizon": 200, "kl_reward_coefficient": 0.05}
RESUMED = re.compile(r"^resumed after step (\d+); (nothing was loaded|loaded: [\w, ]*)", re.MULTILINE)


@pytest.fixture(scope="module")
def services(cluster: Cluster) -> Config:
    """The config of a run on services that are up."""
    tables: dict[str, Any] = {"run": {"steps": STEPS, "evaluate_every": 4}, "algorithm": ADAPTIVE}
    return with_tables(cluster.select(**ROLES), **tables)


@pytest.fixture(scope="module")
def undisturbed(services: Config, tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("undisturbed")
    return Results.of(job.run(with_tables(services, run={"directory": directory}), "ppo").directory)


def last_step(run: Resumable) -> int:
    """Number of the step of a run's journal; 0 where there is none."""
    journals = [read_journal(path) for path in run.config.run.directory.glob("*-*-*")]
    return max((journal["step"] for journal in journals if journal), default=0)


def wait_for_step(run: Resumable, process: subprocess.Popen[str], step: int) -> None:
    """Waits for the end of a step."""
    wait_until(lambda: process.poll() is not None or last_step(run) >= step, RUN_TIMEOUT_S, f"step {step}")
    assert process.poll() is None, process.communicate()


def stop_after(run: Resumable, process: subprocess.Popen[str], step: int) -> int:
    """Stops a controller after a step or a later one, before the first update of the next; returns its number."""
    for number in range(step, run.config.run.steps):
        wait_for_step(run, process, number)
        os.killpg(process.pid, signal.SIGSTOP)
        held = {name: state_of(run.config, name) for name in ("actor", "critic")}
        journal = read_journal(run.run_dir)
        if journal and all(journal["states"][name] == state_id for name, state_id in held.items()):
            return journal["step"]
        os.killpg(process.pid, signal.SIGCONT)
    raise AssertionError("the controller was never stopped before an update")


def state_of(config: Config, name: str) -> str:
    """Id of the state that all ranks of a service hold when they have no more to do."""
    with closing(Service(name, config.services[name].address)) as service:
        for rank in service.ranks:
            service.watch_until(lambda status: status.phase == worker_pb2.PHASE_IDLE, rank)
        (state_id,) = {service.ask("Describe", rank).state_id for rank in service.ranks}
        return state_id


def pids(config: Config) -> list[int]:
    """Process ids of all ranks of all services."""
    found = []
    for name, table in config.services.items():
        with closing(Service(name, table.address)) as service:
            found += [rank.pid for rank in service.description.ranks]
    return found


def killed(process: subprocess.Popen[str]) -> str:
    """Kills a controller; returns what it has said."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=RUN_TIMEOUT_S)[0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_controller_that_is_killed_twice_goes_on_with_the_state_of_its_services(
    services: Config, undisturbed: Results, tmp_path: Path
) -> None:
    before = pids(services)
    with resumable(with_tables(services, checkpoint={"every": 1}), tmp_path, options=()) as run:
        first = run.start()
        step = stop_after(run, first, 1)
        _, err = run.finish(run.resume("--take-over"), 2)
        assert re.search(rf"process {first.pid} of host \S+ runs in it; .* end it", err)
        killed(first)
        second = run.resume()
        wait_for_step(run, second, step + 1)
        wait_until(lambda: run.has_checkpoint(1), RUN_TIMEOUT_S, "a checkpoint")
        said = killed(second)
        assert f"resumed after step {step}; nothing was loaded; held the state: actor, critic" in said
        out, _ = run.finish(run.resume("--take-over"))
        assert RESUMED.search(out), out
        assert Results.of(run.run_dir) == undisturbed
    assert pids(services) == before


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_controller_that_was_replaced_while_it_was_stopped_changes_nothing(
    services: Config, undisturbed: Results, tmp_path: Path
) -> None:
    """The lock of the directory is lost, as on a file system without locks; else nothing could replace it."""
    with resumable(with_tables(services, checkpoint={"every": 1}), tmp_path, options=()) as run:
        stale = run.start()
        stop_after(run, stale, 1)
        (run.run_dir / LOCK).unlink()
        run.finish(run.resume("--take-over"))
        before = contents(run.run_dir)
        os.killpg(stale.pid, signal.SIGCONT)
        _, err = run.finish(stale, 1)
        # Where it was stopped in a call, that may have failed on rows which the new session has released.
        assert re.search(
            r"superseded|is not the current one|has ended|has taken it over|was released", err
        ), err
        assert contents(run.run_dir) == before
        assert Results.of(run.run_dir) == undisturbed


@contextmanager
def deployed(config: Config, path: Path) -> Iterator[None]:
    """Services by `rlhf-deploy up`."""
    processes = Processes()
    up = processes.start("rlhf-deploy", "up", str(write_config(config, path)))
    try:
        wait_for_line(up, "ready\n", RUN_TIMEOUT_S)
        yield
        up.terminate()
        up.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        processes.kill()


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [3])
def test_a_controller_that_is_killed_twenty_times_changes_no_number_and_no_service(
    seed: int, config: Config, tmp_path: Path
) -> None:
    """At random moments, most of them after a step, some while the run begins; every second successor waits until the
    services have given up the session before."""
    chosen = launched(config, ROLES)
    chosen = with_tables(chosen, run={"steps": 150, "evaluate_every": 20}, algorithm=ADAPTIVE)
    drawn, said = random.Random(seed), list[str]()
    with deployed(chosen, tmp_path / "services.toml"):
        before = pids(chosen)
        table = with_tables(chosen, run={"directory": tmp_path / "undisturbed"})
        expected = Results.of(job.run(table, "ppo").directory)
        with resumable(with_tables(chosen, checkpoint={"every": 3}), tmp_path, options=()) as run:
            process = run.start()
            for number in range(20):
                if number == 0:
                    wait_until(lambda: run.has_checkpoint(3), RUN_TIMEOUT_S, "a checkpoint")
                elif drawn.random() < 0.8:
                    wait_for_step(run, process, last_step(run) + 1)
                assert sleep_until(process, drawn.uniform(0, 2)), "the run is too short for so many kills"
                said.append(killed(process))
                process = run.resume(*(["--take-over"] if number % 2 else []))
            said.append(run.finish(process)[0])
            assert Results.of(run.run_dir) == expected
        assert pids(chosen) == before
    resumes = [found.groups() for out in said if (found := RESUMED.search(out))]
    warm = sum(what == "nothing was loaded" for _, what in resumes)
    print(f"seed {seed}: {len(resumes)} of 20 resumes reached a step; {warm} loaded nothing: {resumes}")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "fsdp"])
def test_services_of_every_engine_hold_their_state_for_the_next_controller(
    engine: str, config: Config, tmp_path: Path
) -> None:
    """The controller is killed three times: twice between two steps, and then at any moment, after which the services
    may have to load."""
    chosen = with_tables(
        launched_on(engine, config), run={"steps": 10, "evaluate_every": 4}, algorithm=ADAPTIVE
    )
    said = list[str]()
    with deployed(chosen, tmp_path / "services.toml"):
        before = pids(chosen)
        table = with_tables(chosen, run={"directory": tmp_path / "undisturbed"})
        expected = Results.of(job.run(table, "ppo").directory)
        with resumable(with_tables(chosen, checkpoint={"every": 1}), tmp_path) as run:
            process, step = run.start(), 0
            for _ in range(2):
                step = stop_after(run, process, step + 1)
                said.append(killed(process))
                process = run.resume()
            wait_for_step(run, process, step + 1)
            assert sleep_until(process, moments(7, 1, 1.0)[0])
            said += [killed(process), run.finish(run.resume())[0]]
            assert Results.of(run.run_dir) == expected
        assert pids(chosen) == before
    resumes = [match.groups() for out in said if (match := RESUMED.search(out))]
    print(f"{engine}: {resumes}")
    assert [what for _, what in resumes[:2]] == ["nothing was loaded"] * 2
