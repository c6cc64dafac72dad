"""Runs whose services are started again by a supervisor: the command goes on with them from its newest checkpoint."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.config.config import Config
from integration.harness import Processes, write_config
from integration.resuming import RUN_TIMEOUT_S, Results, resumable, with_tables
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
        command = ["torchrun", "--rdzv-backend", "rlhf", "--nproc-per-node", ranks, "-m", f"services.{role}"]
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
        processes.kill()
        for keeper in keepers:
            keeper.join(RUN_TIMEOUT_S)


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
