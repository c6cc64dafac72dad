"""Runs that lose a reward and go on in the same step, when it serves again: the same results as without a loss."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from python_path import python_path

from client.session import Session
from controller.config.config import Config
from controller.launch import LaunchedServices
from controller.role_groups import cluster as connecting
from controller.role_groups.dataflow import FutureBatch
from controller.tracking.metrics import read_metrics
from controller.tracking.timeline import read_events
from integration.harness import HERE, Processes, Service, free_ports, wait_for_line, wait_until, write_config
from integration.resuming import RUN_TIMEOUT_S, Results, Resumable, resumable, sleep_until, with_tables
from integration.test_resume_launched import LAUNCHED, launched, rank_of, undisturbed

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

OF_LOSSES = ("restarts/", "transfer/controller_bytes")
"""Metrics that count what was sent again."""


@pytest.fixture(scope="module")
def small(config: Config) -> Config:
    """The config of a run of Dr. GRPO with two services of its own: steps of 32 rows, evaluations of 16. It has more
    steps than tests wait for, so that it goes on until they have killed something."""
    chosen = launched(config, {"actor": "lone_actor", "reward": "reward"})
    return with_tables(chosen, run={"steps": 8, "evaluate_every": 3})


@pytest.fixture(scope="module")
def expected(small: Config, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return undisturbed(small, tmp_path_factory.mktemp("undisturbed"), "dr_grpo")


def with_reward(config: Config, **keys: Any) -> Config:
    """A config with other keys of the reward."""
    tables = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    tables["services"]["reward"] |= keys
    return Config.model_validate(tables)


def dying(config: Config, directory: Path, at: str, **keys: Any) -> Config:
    """A config whose reward dies before it scores these rows, counted from 1 over all that were begun."""
    options = {"counter": str(directory / "counter"), "at": at, "instead": keys.pop("instead", "kill")}
    return with_reward(config, function="toy_rewards:dying", options=options, **keys)


def results(run: Resumable) -> Results:
    """The results of a run without the metrics that losses change."""
    return without_losses(Results.of(run.run_dir))


def without_losses(found: Results) -> Results:
    metrics = [{k: v for k, v in line.items() if not k.startswith(OF_LOSSES)} for line in found.metrics]
    return Results(metrics, found.samples, found.sha256)


def losses(run: Resumable) -> list[tuple[str, int]]:
    """Service and step of each loss in `run.json`."""
    known = json.loads((run.run_dir / "run.json").read_text())
    return [(entry["service"], entry["step"]) for entry in known.get("replaced", [])]


def wait_for_step(run: Resumable, process: Any, step: int) -> None:
    wait_until(lambda: run.steps_done >= step or process.poll() is not None, RUN_TIMEOUT_S, f"step {step}")
    assert process.poll() is None, process.communicate()


def test_a_launched_reward_that_dies_in_calls_is_started_again_and_the_results_are_the_same(
    small: Config, expected: Results, tmp_path: Path
) -> None:
    table = dying(small, tmp_path, "5,30,31,60")
    with resumable(table, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        process = run.start()
        wait_for_step(run, process, 2)
        os.kill(rank_of(run, "reward"), signal.SIGKILL)
        out, err = run.finish(process)
        assert results(run) == without_losses(expected)
        assert not err
        again = (
            r"reward: was killed by SIGKILL \(log: \S+/logs/reward\.log\); it was started again, sent again: "
        )
        for call in ("step 0 (1 of 3)", "step 1 (1 of 3)", "step 1 (2 of 3)", "step 1 (3 of 3)"):
            assert re.search(f"{again}compute_reward of {re.escape(call)}", out.replace("\n", " ")), out
        found = losses(run)
        assert found[:4] == [("reward", 0), ("reward", 1), ("reward", 1), ("reward", 1)]
        assert len(found) == 5
        assert json.loads((run.run_dir / "summary.json").read_text())["replaced"][0]["service"] == "reward"
        assert next(each for each in read_metrics(run.run_dir) if each["step"] == 1)["restarts/reward"] == 3
        spans = [e for e in read_events(run.run_dir / "timeline.json") if e["name"] == "lost and replaced"]
        assert len(spans) == 5
        assert (run.run_dir / "logs" / "reward.log").read_text().count("serving") != 1
    assert not run.processes.living()


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.full)], ids=["one rank", "one of two ranks"]
)
def test_a_reward_that_is_stopped_in_a_call_is_used_again_when_the_same_processes_go_on(
    ranks: int, small: Config, expected: Results, tmp_path: Path
) -> None:
    """Nothing starts it again, since none of its processes has ended."""
    table = dying(small, tmp_path, "60", instead="stop", ranks=ranks)
    with resumable(table, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        process = run.start()
        wait_for_step(run, process, 0)
        with contextlib.closing(Service("reward", table.services["reward"].address)) as service:
            pids = [rank.pid for rank in service.description.ranks]
        assert process.stdout is not None
        said = next(line for line in process.stdout if "until services.reward serves again" in line)
        assert "its process is stopped" in said
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        out, err = run.finish(process)
        assert (
            "reward: it could not be reached; it answers again, sent again: compute_reward of step 2 (1 of 3)"
            in out.replace("\n", " ")
        ), out
        assert not err
        assert results(run) == without_losses(expected)
        assert losses(run) == [("reward", 2)]
        assert (run.run_dir / "logs" / "reward.log").read_text().count("ready: ") == 1
    assert not run.processes.living()


def test_a_reward_that_dies_on_a_row_each_time_ends_the_run_with_the_cause(
    small: Config, tmp_path: Path
) -> None:
    table = dying(small, tmp_path, "all", instead="exit", restarts=1)
    with resumable(table, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        _, err = run.finish(run.start(), code=1)
        assert re.fullmatch(
            r"error: reward: compute_reward of step 0 was lost with the service 2 times, and "
            r"services\.reward\.restarts is 1; the last time: exited with .*\(log: \S+/logs/reward\.log\); "
            r"reward rank 0 \(\S+\) ComputeReward: .*\n",
            err,
        ), err
    assert not run.processes.living()


@pytest.mark.parametrize("moment", ["before its session begins", "when its session has begun"])
def test_a_reward_that_is_lost_while_the_run_connects_is_replaced(
    moment: str, small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(HERE))
    alone = small.model_copy(update={"services": {"reward": small.services["reward"]}})
    said: list[str] = []

    def kill(now: str) -> None:
        if now == moment:
            os.kill(cluster.descriptions["reward"].ranks[0].pid, signal.SIGKILL)

    def choose(held: Any) -> dict[str, Any]:
        kill("when its session has begun")
        return {}

    path = write_config(alone, tmp_path / "run.toml")
    with LaunchedServices(alone, path, tmp_path / "logs") as launched:
        cluster = connecting.Cluster(alone, Session(timeout_s=60.0), launcher=launched)
        try:
            cluster.connect(
                said.append,
                admit=lambda services: kill("before its session begins"),
                restoration=connecting.Restoration((), choose),
            )
            group: Any = cluster.group("reward")
            rows = FutureBatch.of(prompt=["1+1="], response=["99"], ground_truth=["2"], metadata=["{}"])
            scored: Any = group.compute_reward(rows).result(["rewards"], 60.0)["rewards"]
            assert scored.values.tolist() == [1.0]
        finally:
            cluster.close()
    assert len(said) == 2
    assert "was killed by SIGKILL" in said[1]


@pytest.mark.full
def test_with_restarts_0_a_lost_reward_ends_the_run_as_that_of_any_other_service(
    small: Config, tmp_path: Path
) -> None:
    table = dying(small, tmp_path, "5", restarts=0)
    with resumable(table, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        _, err = run.finish(run.start(), code=1)
        assert err.startswith("error: service reward: was killed by SIGKILL"), err


@contextlib.contextmanager
def kept_running(config: Config, directory: Path) -> Iterator[Processes]:
    """Services that are started by hand, each again as soon as it has ended."""
    path, processes, ended = write_config(config, directory / "services.toml"), Processes(), threading.Event()

    def keep(name: str) -> None:
        table = config.services[name]
        command = ["torchrun", "--rdzv-backend", "rlhf", "--nproc-per-node", str(table.ranks)]
        while not ended.is_set():
            service = ("-m", "services", table.role, "--config", str(path), "--name", name)
            processes.start(*command, *service).communicate()

    keepers = [threading.Thread(target=keep, args=(name,)) for name in config.services]
    for keeper in keepers:
        keeper.start()
    try:
        yield processes
    finally:
        ended.set()
        for keeper in keepers:
            while keeper.is_alive():
                processes.kill()
                keeper.join(0.1)


@pytest.mark.full
def test_a_run_waits_for_a_reward_that_something_else_starts_again(
    small: Config, expected: Results, tmp_path: Path
) -> None:
    table = with_tables(dying(small, tmp_path, "30,31"), run={"connect_timeout_s": 120.0})
    with (
        resumable(table, tmp_path, algorithm="dr_grpo", options=()) as run,
        kept_running(table, tmp_path),
    ):
        out, _ = run.finish(run.start())
        assert results(run) == without_losses(expected)
        assert losses(run) == [("reward", 1)] * 2
        assert "waiting up to 120 s until services.reward serves again" in out.replace("\n", " ")


@pytest.mark.full
def test_a_reward_model_that_reads_tokens_may_lose_one_of_its_ranks(config: Config, tmp_path: Path) -> None:
    """Of two ranks, one is killed in a call; both are started again, on other ports, and read rows of the actor."""
    names = {"actor": "lone_actor", "reward": "tensor_scorer"}
    table = with_tables(launched(config, names, reward={"ranks": 2}), run={"steps": 20})
    expected = undisturbed(table, tmp_path, "dr_grpo")
    with resumable(table, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        process = run.start()
        wait_for_step(run, process, 1)
        kill_in_a_call(run, process)
        wait_until(lambda: losses(run) or process.poll() is not None, RUN_TIMEOUT_S, "the replacement")
        assert process.poll() is None, process.communicate()
        kill_in_a_call(run, process)
        out, _ = run.finish(process)
        assert results(run) == without_losses(expected)
        assert [service for service, _ in losses(run)] == ["reward", "reward"]
        assert "reward: rank 1 was killed by SIGKILL" in out
    assert not run.processes.living()


def kill_in_a_call(run: Resumable, process: Any) -> None:
    """Stops the last rank of the reward, so that the next call does not end, and kills it seconds later."""
    last = rank_of(run, "reward")
    os.kill(last, signal.SIGSTOP)
    assert sleep_until(process, 3.0), process.communicate()
    os.kill(last, signal.SIGKILL)


@pytest.mark.full
def test_a_reward_that_nothing_starts_again_ends_the_run_at_its_deadline_and_ctrl_c_ends_the_wait(
    small: Config, tmp_path: Path
) -> None:
    table = dying(small, tmp_path, "20,40")
    alone = table.model_copy(update={"services": {"reward": table.services["reward"]}})
    processes = Processes()
    try:
        for wait_s, is_interrupted in ((100.0, True), (5.0, False)):
            directory = tmp_path / f"{wait_s:g}"
            directory.mkdir()
            by_hand = processes.serve(write_config(alone, directory / "services.toml"), directory / "logs")
            chosen = with_tables(with_reward(table, external=True), run={"connect_timeout_s": wait_s})
            with resumable(chosen, directory, algorithm="dr_grpo", options=LAUNCHED) as run:
                process = run.start()
                assert process.stdout is not None
                said = next(line for line in process.stdout if "until services.reward serves again" in line)
                assert said.startswith("reward rank 0 (")
                if is_interrupted:
                    process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
                if is_interrupted:
                    assert (process.returncode, err) == (128 + signal.SIGINT, "stopped by SIGINT\n"), out
                else:
                    assert process.returncode == 1
                    address = re.escape(table.services["reward"].address)
                    assert re.fullmatch(
                        rf"error: reward rank 0 \({address}\) ComputeReward: .*; "
                        rf"services\.reward \({address}\): Connection refused.*\n",
                        err,
                    ), err
                assert not run.processes.living()
            by_hand.terminate()
            by_hand.wait(60)
    finally:
        processes.kill()


def test_a_server_in_another_language_that_is_started_again_is_sent_its_calls_again(
    small: Config, expected: Results, tmp_path: Path
) -> None:
    """It has no epoch and no session, and gives the scores of ours."""
    (port,) = free_ports(1)
    tables = small.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    tables["services"]["reward"] = {"role": "reward", "address": f"127.0.0.1:{port}", "external": True}
    table = Config.model_validate(tables)
    servers = Processes()

    def serve() -> Any:
        server = servers.start("python", str(Path(__file__).with_name("foreign_reward.py")), str(port))
        wait_for_line(server, "ready\n")
        return server

    server = serve()
    try:
        with resumable(table, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
            process = run.start()
            wait_for_step(run, process, 1)
            server.kill()
            server.communicate()
            assert process.stdout is not None
            next(line for line in process.stdout if "until services.reward serves again" in line)
            server = serve()
            run.finish(process)
            assert [service for service, _ in losses(run)] == ["reward"]
            sha256 = json.loads((run.run_dir / "summary.json").read_text())["actor_sha256"]
            assert sha256 == expected.sha256
    finally:
        servers.kill()
        server.communicate()
