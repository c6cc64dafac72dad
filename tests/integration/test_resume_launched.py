"""Runs with services of their own that are killed with all that they have started, and resumed: on every engine, for
the algorithms that keep state, at many moments."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.checkpoints.store import DIRECTORY, PARTIAL, CheckpointStore
from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.harness import Cluster, Service, free_ports, wait_until
from integration.resuming import (
    RUN_TIMEOUT_S,
    Results,
    Resumable,
    moments,
    resumable,
    sleep_until,
    with_tables,
)

pytestmark = pytest.mark.timeout(900)

ROLES = ("actor", "critic", "reference", "reward")
SAFE = {
    "actor": "actor",
    "critic": "critic",
    "cost_critic": "cost_critic",
    "reference": "reference",
    "reward": "reward",
    "cost": "tensor_scorer",
}
LAUNCHED = ("--launch",)
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp": {},
    "3d": {
        "actor": {"ranks": 4, "engine": "3d", "mesh": "2-2-1"},
        "critic": {"ranks": 2, "engine": "3d", "mesh": "1-1-2", "shards_over_data": True},
    },
    "hybrid": {"actor": {"ranks": 4, "engine": "3d", "mesh": "1-2-2", "generation_mesh": "1-1-2-2"}},
    "zero": {
        "actor": {"engine": "zero", "zero": {"stage": 3}},
        "critic": {"ranks": 2, "engine": "zero", "zero": {"stage": 2}},
    },
    "fsdp, generating together": {"actor": {"ranks": 2, "generation_mesh": "1-2-1"}},
    "lora": {"actor": {"lora": {"rank": 8}}},
    "vllm": {"actor": {"rollout_engine": "vllm", "startup_timeout_s": 200.0}},
}


def launched(config: Config, names: dict[str, str], **changes: dict[str, Any]) -> Config:
    """A config with services of its own: name in the run = name of a service of the tests."""
    tables = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    ports = iter(free_ports(len(names)))
    services = {
        name: {
            **tables["services"][own],
            "address": f"127.0.0.1:{next(ports)}",
            **changes.get(name, {}),
        }
        for name, own in names.items()
    }
    return Config.model_validate({**tables, "services": services})


def launched_on(engine: str, config: Config) -> Config:
    """The config of PPO with services of its own, on an engine of ENGINES; skips the test where that is not
    installed."""
    if engine == "zero":
        pytest.importorskip("deepspeed")
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup-vllm")
    names = {role: role for role in ROLES if engine != "lora" or role != "reference"}
    return launched(config, names, **ENGINES[engine])


def undisturbed(config: Config, directory: Path, algorithm: str) -> Results:
    """The results of the run that nobody kills, on services that it launches."""
    with resumable(config, directory / "undisturbed", algorithm=algorithm, options=LAUNCHED) as run:
        run.finish(run.start())
        return Results.of(run.run_dir)


@pytest.fixture(scope="module")
def small(config: Config) -> Config:
    """The config of a run of Dr. GRPO with two services of its own."""
    chosen = launched(config, {"actor": "lone_actor", "reward": "reward"}, reward={"restarts": 0})
    return with_tables(chosen, run={"steps": 4, "evaluate_every": 3}, rollout={"samples_per_prompt": 2})


@pytest.fixture(scope="module")
def expected(small: Config, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return undisturbed(small, tmp_path_factory.mktemp("undisturbed"), "dr_grpo")


@pytest.mark.slow
def test_a_run_that_is_killed_with_its_services_goes_on_with_the_same_results(
    small: Config, expected: Results, tmp_path: Path
) -> None:
    with resumable(
        with_tables(small, checkpoint={"every": 1}), tmp_path, algorithm="dr_grpo", options=LAUNCHED
    ) as run:
        run.kill_after(run.start(), 2)
        run.finish(run.resume())
        assert Results.of(run.run_dir) == expected


@pytest.mark.slow
@pytest.mark.full
def test_a_resumed_run_may_have_another_learning_rate_and_says_so(small: Config, tmp_path: Path) -> None:
    config = with_tables(small, run={"steps": 2}, checkpoint={"at_end": True})
    key = "services.actor.optimizer.learning_rate"
    with resumable(config, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        run.finish(run.start())
        first = Results.of(run.run_dir)
        out, _ = run.finish(run.resume("--set", "run.steps=3", "--set", f"{key}=0.0"))
        assert f"{key} was 0.0003 and is 0.0 from here on" in " ".join(out.split())
        assert [line.get("actor/lr") for line in read_metrics(run.run_dir)] == [None, 3e-4, 3e-4, 0.0]
        # At rate 0 a step changes no weight.
        assert Results.of(run.run_dir).sha256 == first.sha256
        (entry,) = json.loads((run.run_dir / "run.json").read_text())["resumed"]
        assert entry["changed"] == {key: [3e-4, 0.0]}


@pytest.mark.slow
@pytest.mark.full
def test_a_schedule_ends_where_the_run_was_to_end_at_first(small: Config, tmp_path: Path) -> None:
    optimizer = {"learning_rate": 3e-4, "schedule": "linear", "warmup_ratio": 0.5}
    tables = small.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    tables["services"]["actor"]["optimizer"] = optimizer
    rows = tables["data"]["prompts_per_step"] * tables["rollout"]["samples_per_prompt"]
    tables["algorithm"] = {**tables.get("algorithm", {}), "mini_batch_size": rows}
    config = with_tables(Config.model_validate(tables), run={"steps": 2}, checkpoint={"at_end": True})
    key = "services.actor.optimizer.total_steps"
    with resumable(config, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        run.finish(run.start())
        run.finish(run.resume("--set", "run.steps=3"))
        out, _ = run.finish(run.resume("--set", "run.steps=4", "--set", f"{key}=0"))
        assert f"{key} was 2 and is 4 from here on" in " ".join(out.split())
        # Step 4 is half way down from the end of the warm-up of two steps.
        rates = [line.get("actor/lr") for line in read_metrics(run.run_dir)]
        assert rates == [None, 3e-4, 3e-4, 0.0, pytest.approx(1.5e-4)]


@pytest.mark.slow
def test_a_run_that_loses_services_restarts_by_itself_and_has_the_same_results(
    small: Config, expected: Results, tmp_path: Path
) -> None:
    table = with_tables(small, checkpoint={"every": 1, "restarts": 1})
    with resumable(table, tmp_path, algorithm="dr_grpo", options=LAUNCHED) as run:
        process = run.start()
        for step, victim in ((1, "actor"), (3, "reward")):
            lose(run, process, step, victim)
        out, err = run.finish(process)
        assert Results.of(run.run_dir) == expected
        assert not err
        for name in ("actor", "reward"):
            assert f"error: service {name}: " in out
        assert out.count("; restart 1 of 1 from the checkpoint of step ") == 2
        assert len(resumed_after(run)) == 2
        assert len(list((run.run_dir / "logs").glob("from-step-*"))) == 2


def lose(run: Resumable, process: subprocess.Popen[str], step: int, victim: str) -> None:
    """Kills a rank of a service after the checkpoint of a step."""
    wait_until(
        lambda: run.has_checkpoint(step) or process.poll() is not None, RUN_TIMEOUT_S, f"checkpoint {step}"
    )
    assert process.poll() is None, process.communicate()
    os.kill(rank_of(run, victim), signal.SIGKILL)


def resumed_after(run: Resumable) -> list[int]:
    """The steps after which a run was resumed."""
    return [entry["step"] for entry in json.loads((run.run_dir / "run.json").read_text())["resumed"]]


def kill_and_resume(run: Resumable, steps: list[int]) -> None:
    """Kills a run after the checkpoint of each of these steps, and lets it end."""
    process = run.start()
    for step in steps:
        run.kill_after(process, step)
        process = run.resume()
    run.finish(process)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dapo", "safe_rlhf"])
def test_a_run_that_is_killed_after_every_step_has_the_same_results(
    algorithm: str, config: Config, cluster: Cluster, tmp_path: Path
) -> None:
    names = SAFE if algorithm == "safe_rlhf" else {role: role for role in ROLES}
    chosen = with_tables(cluster.select(**names), run={"steps": 10, "evaluate_every": 4})
    if algorithm == "ppo":
        adaptive = {"kl_target": 0.01, "kl_horizon": 200, "kl_reward_coefficient": 0.05}
        chosen = with_tables(chosen, algorithm=adaptive)
    if algorithm == "safe_rlhf":
        chosen = with_tables(chosen, data={"pretrain": _texts(chosen, tmp_path)})
    table = with_tables(chosen, run={"directory": tmp_path / "undisturbed"})
    expected = Results.of(job.run(table, algorithm).directory)
    table = with_tables(chosen, checkpoint={"every": 1})
    with resumable(table, tmp_path, algorithm=algorithm) as run:
        kill_and_resume(run, list(range(1, 10)))
        assert Results.of(run.run_dir) == expected


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_goes_on_with_the_same_results(engine: str, config: Config, tmp_path: Path) -> None:
    chosen = with_tables(launched_on(engine, config), run={"steps": 5, "evaluate_every": 2})
    expected = undisturbed(chosen, tmp_path, "ppo")
    table = with_tables(chosen, checkpoint={"every": 1})
    with resumable(table, tmp_path, options=LAUNCHED) as run:
        kill_and_resume(run, [1, 2, 3])
        assert Results.of(run.run_dir) == expected


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_killed_at_any_moment_goes_on(seed: int, cluster: Cluster, tmp_path: Path) -> None:
    chosen = with_tables(cluster.select(**{role: role for role in ROLES}), run={"steps": 60})
    table = with_tables(chosen, run={"directory": tmp_path / "undisturbed"})
    expected = Results.of(job.run(table, "ppo").directory)
    with resumable(with_tables(chosen, checkpoint={"every": 1}), tmp_path) as run:
        process = run.start()
        run.kill_after(process, 1)
        process = run.resume()
        for seconds in moments(seed, 20, 3.0):
            assert sleep_until(process, seconds), "the run is too short for so many kills"
            run.kill(process)
            assert CheckpointStore(run.run_dir).commits()
            process = run.resume()
        run.finish(process)
        assert Results.of(run.run_dir) == expected


def _texts(config: Config, directory: Path) -> Path:
    """Pretraining texts."""
    path = directory / "texts.jsonl"
    lines = config.data.train.read_text().splitlines()
    path.write_text("".join(line.replace('"prompt"', '"text"') + "\n" for line in lines))
    return path


@pytest.mark.full
@pytest.mark.parametrize(("seed", "victim"), list(enumerate((*ROLES, "controller"))))
def test_a_run_goes_on_whichever_process_is_killed_while_a_checkpoint_is_written(
    seed: int, victim: str, config: Config, tmp_path: Path
) -> None:
    """A rank of a role or the controller is killed 8 times, up to 40 ms after a checkpoint was begun."""
    chosen = launched(config, {role: role for role in ROLES}, reward={"restarts": 0})
    chosen = with_tables(chosen, run={"steps": 30})
    expected = undisturbed(chosen, tmp_path, "ppo")
    with resumable(with_tables(chosen, checkpoint={"every": 1}), tmp_path, options=LAUNCHED) as run:
        process = run.start()
        run.kill_after(process, 1)
        for seconds in moments(seed, 8, 0.04):
            newest = CheckpointStore(run.run_dir).commits()[-1].step
            process = run.resume()
            wait_until_written(run, process, newest + 1)
            pid = process.pid if victim == "controller" else rank_of(run, victim)
            wait_until_written(run, process, newest + 2)
            assert sleep_until(process, seconds), process.communicate()
            os.kill(pid, signal.SIGKILL)
            _, err = process.communicate(timeout=RUN_TIMEOUT_S)
            run.processes.kill()
            if victim != "controller":
                assert re.fullmatch(
                    rf"error: service {victim}: (rank \d )?was killed by SIGKILL .*\n", err
                ), err
            assert CheckpointStore(run.run_dir).commits()[-1].step >= newest
        run.finish(run.resume())
        assert Results.of(run.run_dir) == expected


def wait_until_written(run: Resumable, process: subprocess.Popen[str], step: int) -> None:
    """Waits until a controller has begun to write the checkpoint of a step, or of a later one."""

    def is_written() -> bool:
        assert process.poll() is None, process.communicate()
        names = [path.name for path in (run.run_dir / DIRECTORY).glob(f"step-*{PARTIAL}")]
        return any(int(name.removeprefix("step-").partition(".")[0]) >= step for name in names)

    wait_until(is_written, RUN_TIMEOUT_S, f"checkpoint {step}")


def rank_of(run: Resumable, role: str) -> int:
    """The process id of the last rank of a role."""
    with contextlib.closing(Service(role, run.config.services[role].address)) as service:
        return service.description.ranks[-1].pid


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory for runs on a file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400m", "none", str(disk)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.full
def test_a_full_disk_leaves_the_checkpoints_before(
    cluster: Cluster, tmp_path: Path, small_disk: Path
) -> None:
    chosen = with_tables(cluster.select(**{role: role for role in ROLES}), run={"steps": 12})
    table = with_tables(chosen, run={"directory": tmp_path / "undisturbed"})
    expected = Results.of(job.run(table, "ppo").directory)
    drawn = random.Random(5)
    with resumable(with_tables(chosen, checkpoint={"every": 1}), small_disk) as run:
        process = run.start()
        run.kill_after(process, 2)
        size = sum(path.stat().st_size for path in (run.run_dir / "checkpoints" / "step-2").rglob("*"))
        for _ in range(5):
            process = run.resume()
            room = int(drawn.random() * size)
            with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(small_disk).free - room)
            _, err = process.communicate(timeout=RUN_TIMEOUT_S)
            (small_disk / "filler").unlink()
            assert process.returncode == 1
            assert re.fullmatch(r"error: .*[Nn]o space left on device.*\n", err), err
            assert CheckpointStore(run.run_dir).commits()
        run.finish(run.resume())
        assert Results.of(run.run_dir) == expected
