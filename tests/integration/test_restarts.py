"""Runs that lose one service after the other: the command goes on from its newest checkpoint each time, with services
that it starts again itself or that a supervisor does."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from controller.config.config import Config
from integration.harness import Processes, wait_until, write_config
from integration.resuming import Results, moments, resumable, sleep_until, with_tables
from integration.test_resume_launched import ROLES, launched, lose, resumed_after, undisturbed

pytestmark = pytest.mark.timeout(400)

STEPS = 5


@contextlib.contextmanager
def supervised(config: Config, directory: Path) -> Iterator[None]:
    """Services that are started again as soon as they end, as a supervisor such as systemd does."""
    directory.mkdir()
    path, processes, ended = write_config(config, directory / "services.toml"), Processes(), threading.Event()

    def keep(name: str) -> None:
        role, ranks = config.services[name].role, str(config.services[name].ranks)
        command = ["torchrun", "--rdzv-backend", "rlhf", "--nproc-per-node", ranks, "-m", "services", role]
        while not ended.is_set():
            process = processes.start(*command, "--config", str(path), "--name", name)
            process.communicate()

    keepers = [threading.Thread(target=keep, args=(name,)) for name in config.services]
    for keeper in keepers:
        keeper.start()
    try:
        yield
    finally:
        ended.set()
        for keeper in keepers:
            while keeper.is_alive():
                processes.kill()
                keeper.join(0.1)


@pytest.mark.full
def test_a_run_waits_for_services_that_a_supervisor_starts_again(config: Config, tmp_path: Path) -> None:
    chosen = launched(config, {role: role for role in ROLES})
    chosen = with_tables(chosen, run={"steps": STEPS, "connect_timeout_s": 60.0})
    expected = undisturbed(chosen, tmp_path, "ppo")
    table = with_tables(chosen, checkpoint={"every": 1, "restarts": 3})
    with (
        resumable(table, tmp_path, options=()) as run,
        supervised(table, tmp_path / "supervised"),
    ):
        process = run.start()
        for step, victim in ((1, "critic"), (3, "actor")):
            lose(run, process, step, victim)
        out, _ = run.finish(process)
        assert Results.of(run.run_dir) == expected
        assert "; restart 1 of 3 from the checkpoint of step " in out
        assert len(resumed_after(run)) >= 2


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_a_run_ends_whatever_of_its_services_is_killed_or_stopped_when(
    seed: int, config: Config, tmp_path: Path
) -> None:
    """Ten times a rank is killed or stopped, or a launcher killed, also while services start."""
    chosen = launched(
        config, {role: role for role in ROLES}, **{role: {"startup_timeout_s": 60.0} for role in ROLES}
    )
    chosen = with_tables(chosen, run={"steps": 60, "call_timeout_s": 15.0})
    expected = undisturbed(chosen, tmp_path, "ppo")
    drawn = random.Random(seed)
    with resumable(
        with_tables(chosen, checkpoint={"every": 1, "restarts": 20}), tmp_path, options=("--launch",)
    ) as run:
        process = run.start()
        wait_until(lambda: run.has_checkpoint(1), 60.0, "a checkpoint")
        for seconds in moments(seed, 10, 20.0):
            assert sleep_until(process, seconds), process.communicate()
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                victim = drawn.choice([each for each in run.processes.living() if each.pid != process.pid])
                is_rank = "services" in victim.cmdline()
                number = signal.SIGSTOP if is_rank and drawn.random() < 0.5 else signal.SIGKILL
                print(number.name, *victim.cmdline())
                victim.send_signal(number)
        out, err = process.communicate(timeout=400)
        print(out, err)
        assert process.returncode == 0
        assert Results.of(run.run_dir) == expected
        for left in run.processes.living():  # stopped before it was tied to its launcher, which was killed
            left.send_signal(signal.SIGCONT)
        wait_until(lambda: not run.processes.living(), 30.0, "the end of all processes")
