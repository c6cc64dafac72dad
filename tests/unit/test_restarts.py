"""Which errors of a run are followed by a restart, and how many restarts a checkpoint has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from unit.test_checkpoints import write

from controller.checkpoints.store import CheckpointStore
from controller.config.checkpoint import CheckpointTable
from controller.restarts import Restarts, how_to_resume
from controller.role_groups.replacement import LostAgain
from rlhf.errors import (
    ConfigError,
    CorruptWeights,
    DeadlineExceeded,
    OutOfStep,
    Restarted,
    RewardFailed,
    RlhfError,
    ServiceLost,
)

LOST = ServiceLost("service critic: rank 0 was killed by SIGKILL")


def test_each_checkpoint_has_as_many_restarts(tmp_path: Path) -> None:
    restarts, store = Restarts(2, launches=True), CheckpointStore(tmp_path)
    write(store, 3)
    lines = [restarts.next(LOST, tmp_path), restarts.next(LOST, tmp_path)]
    assert lines == [
        f"error: {LOST}; restart {number} of 2 from the checkpoint of step 3" for number in (1, 2)
    ]
    assert not restarts.next(LOST, tmp_path)
    write(store, 4)
    assert restarts.next(LOST, tmp_path).endswith("restart 1 of 2 from the checkpoint of step 4")


def test_without_a_checkpoint_there_is_no_restart(tmp_path: Path) -> None:
    assert not Restarts(2, launches=True).next(LOST, tmp_path)


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("kind", [ServiceLost, DeadlineExceeded, OutOfStep, Restarted, CorruptWeights])
def test_only_services_that_are_launched_are_restarted_for_corrupt_weights(
    kind: type[RlhfError], launches: bool, tmp_path: Path
) -> None:
    write(CheckpointStore(tmp_path), 3)
    line = Restarts(1, launches=launches).next(kind("it"), tmp_path)
    assert bool(line) == (launches or kind is not CorruptWeights)


@pytest.mark.parametrize("kind", [RlhfError, ConfigError, RewardFailed, LostAgain])
def test_an_error_that_would_come_again_is_no_reason(kind: type[RlhfError], tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path), 3)
    assert not Restarts(1, launches=True).next(kind("it"), tmp_path)


def test_a_first_restart_does_not_wait_and_later_ones_wait_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("controller.restarts.time.sleep", slept.append)
    write(CheckpointStore(tmp_path), 3)
    restarts = Restarts(9, launches=True)
    for _ in range(9):
        restarts.next(LOST, tmp_path)
        restarts.pause()
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_command_that_resumes_is_told_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    assert how_to_resume(tmp_path, launch=True) == f"{tmp_path} has no checkpoint to resume from"
    write(CheckpointStore(tmp_path), 3)
    assert how_to_resume(tmp_path, launch=False) == f"to resume: rlhf-controller --resume {tmp_path}"
    assert how_to_resume(tmp_path, launch=True, elsewhere=True).endswith(" --launch --elsewhere")


def test_services_that_live_on_resume_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.restarts.ResumePoint.journaled", lambda run_dir: object())
    spaced = tmp_path / "a run"
    spaced.mkdir()
    assert how_to_resume(spaced, launch=False) == f"to resume: rlhf-controller --resume '{spaced}'"
    assert how_to_resume(spaced, launch=True) == f"{spaced} has no checkpoint to resume from"


def test_old_damaged_checkpoints_and_copies_keep_no_run_from_its_newest_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (3, 4, 5):
        write(store, step)
    (store.place(3) / "COMMIT").write_text("{")
    shutil.copytree(store.place(4), store.path / "step-4.bak")
    assert [commit.step for commit in store.commits()] == [4, 5]
    assert Restarts(2, launches=True).next(LOST, tmp_path).endswith("from the checkpoint of step 5")


def test_a_damaged_checkpoint_hides_no_error(tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path), 3)
    (commit,) = tmp_path.rglob("COMMIT")
    commit.write_text("{")
    assert how_to_resume(tmp_path, launch=True).startswith(
        f"{tmp_path} cannot be resumed as it is: checkpoint "
    )
    assert Restarts(2, launches=True).next(LOST, tmp_path) == ""


def test_restarts_need_checkpoints() -> None:
    with pytest.raises(ValueError, match=r"restarts needs every"):
        CheckpointTable(restarts=1)
