"""Ranks that a test launches end with it, and it learns how they end."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Iterator

import pytest

from integration.harness import Processes, wait_for_line, wait_until
from integration.ranks import launch

TIMEOUT_S = 30.0
MAIN = "integration.ranks_main"
PRELOADING_LITTLE = f"""
import sys
sys.path[:0] = {sys.path}
from integration import ranks
ranks.PRELOADED = "torch"
ranks.launch({MAIN!r}, 2, "waits", deadline_s=600)
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    processes = Processes()
    # A process that is killed leaves its temporary files.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield processes
        processes.kill()


def test_every_rank_reports_and_finds_the_engines_imported():
    assert launch(MAIN, 2, "reports", deadline_s=TIMEOUT_S) == [
        {"rank": rank, "ranks": 2, "threads": 1, "finds imported": True} for rank in range(2)
    ]


def test_a_rank_that_fails_is_named_and_ends_those_that_wait_for_it(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(AssertionError, match=r"rank 1 .* exitcode=1\b"):
        launch(MAIN, 2, "fails", deadline_s=TIMEOUT_S)
    assert multiprocessing.active_children() == []
    assert "RuntimeError: this rank fails" in capfd.readouterr().err


def test_ranks_that_are_late_are_named_and_ended():
    with pytest.raises(AssertionError, match=r"not in time: .*rank 0 .* started"):
        launch(MAIN, 2, "waits", deadline_s=1.0)
    assert multiprocessing.active_children() == []


def test_ranks_end_with_who_launched_them_however_it_ends(processes: Processes):
    launcher = processes.start("python", "-c", PRELOADING_LITTLE)
    wait_for_line(launcher, "waiting\n")
    launcher.kill()
    launcher.wait(TIMEOUT_S)
    wait_until(lambda: not processes.living(), TIMEOUT_S, "the end of all")
