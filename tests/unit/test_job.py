"""Restarts and SIGTERM of a run at its edges: while it opens, and while it closes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.test_checkpoints import termination, write

from controller import job
from controller.checkpoints.store import CheckpointStore
from controller.checkpoints.termination import Termination
from rlhf.errors import ServiceLost

__all__ = ["termination"]

LOST = ServiceLost("service actor: rank 0 was killed by SIGKILL")


def plan_of(run_dir: Path, algorithm: Any, restarts: int = 1) -> Any:
    """The plan of a run that is resumed, as far as `_executed` reads it."""
    algorithm.trains = ()
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(restarts=restarts)),
        resumes=SimpleNamespace(run_dir=run_dir),
        algorithm=algorithm,
        elsewhere=False,
    )


def execute(plan: Any, termination: Termination) -> job.FinishedRun:
    return job._executed(plan, launch=True, take_over=False, owns_process=False, termination=termination)


def test_a_resume_that_loses_a_service_while_it_opens_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(CheckpointStore(tmp_path), 3)
    plan, opened = plan_of(tmp_path, lambda run: None), []

    @contextlib.contextmanager
    def open_planned(*_: Any, **__: Any) -> Iterator[Any]:
        opened.append(1)
        if len(opened) == 1:
            raise LOST
        yield SimpleNamespace(directory=tmp_path, finish=lambda trains: {"steps": 5})

    monkeypatch.setattr(job, "open_planned", open_planned)
    monkeypatch.setattr(job.Plan, "resuming", lambda *_, **__: plan)
    assert execute(plan, Termination()).summary == {"steps": 5}
    assert len(opened) == 2


def test_sigterm_while_a_failed_run_closes_promises_no_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    termination: Termination,
    capfd: pytest.CaptureFixture[str],
) -> None:
    @contextlib.contextmanager
    def open_planned(*_: Any, **__: Any) -> Iterator[Any]:
        try:
            yield SimpleNamespace(directory=tmp_path)
        finally:
            signal.raise_signal(signal.SIGTERM)

    def lose(run: Any) -> None:
        termination.grace_s = 60.0
        raise LOST

    monkeypatch.setattr(job, "open_planned", open_planned)
    with pytest.raises(KeyboardInterrupt):
        execute(plan_of(tmp_path, lose), termination)
    assert "a checkpoint follows" not in capfd.readouterr().err
