"""What rlhf-controller says of an error that nobody foresaw: one line, and where its traceback is."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller import cli
from controller.config.config import load
from controller.launch import LaunchedServices
from rlhf.errors import InvalidRequest, RlhfError, from_status, to_status

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
WHERE = {"service": "actor", "rank": "1"}


def failed(error: Exception) -> RlhfError:
    """The error as the controller has it that a rank of the actor has raised."""
    return from_status(to_status(error, WHERE), "actor rank 1 UpdateActor")


@pytest.mark.parametrize("launched", [False, True])
def test_an_unforeseen_error_points_to_the_log_of_its_service(launched: bool, tmp_path: Path) -> None:
    services = LaunchedServices(load(QUICKSTART, ()), QUICKSTART, tmp_path) if launched else None
    log = tmp_path / "actor.log" if launched else "the log of services.actor"
    said = cli._pointing_to_log(failed(IndexError("index 22 is out of bounds")), services)
    assert str(said) == f"actor rank 1 UpdateActor: IndexError: index 22 is out of bounds (traceback: {log})"


def test_an_error_that_says_all_there_is_to_say_points_nowhere() -> None:
    error = failed(InvalidRequest("column 'a' is missing"))
    assert cli._pointing_to_log(error, None) is error
