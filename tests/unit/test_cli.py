"""rlhf-controller's last lines: an error with the place of its traceback, or the figures of a run."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner

import conformance.cli
import controller.mapping.cli
import deploy.cli
from controller import algorithms, cli, export, job, launch, opening
from controller.config.config import load
from controller.launch import LaunchedServices
from controller.role_groups.discovery import Discovery
from integration.harness import free_ports
from rlhf.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    RewardFailed,
    RlhfError,
    ServiceLost,
    from_status,
    to_status,
)

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
WHERE = {"service": "actor", "rank": "1"}


def failed(error: Exception) -> RlhfError:
    """The error as the controller has it that a rank of the actor has raised."""
    return from_status(to_status(error, WHERE), "actor rank 1 UpdateActor")


@pytest.mark.parametrize("launched", [False, True])
def test_an_unforeseen_error_points_to_the_log_of_its_service(launched: bool, tmp_path: Path) -> None:
    services = LaunchedServices(load(QUICKSTART, ()), QUICKSTART, tmp_path) if launched else None
    log = tmp_path / "actor.log" if launched else "the log of services.actor"
    said = opening.pointing_to_log(failed(IndexError("index 22 is out of bounds")), services)
    assert str(said) == f"actor rank 1 UpdateActor: IndexError: index 22 is out of bounds (traceback: {log})"


@pytest.mark.parametrize("service", ["judge", "../judge"])
def test_an_error_points_to_no_log_that_the_run_has_not_started(service: str, tmp_path: Path) -> None:
    services = LaunchedServices(load(QUICKSTART, ()), QUICKSTART, tmp_path)
    error = from_status(to_status(IndexError("index 22"), WHERE | {"service": service}), "judge Score")
    said = opening.pointing_to_log(error, services)
    assert str(said) == f"judge Score: IndexError: index 22 (traceback: the log of services.{service})"


def test_an_error_that_says_all_there_is_to_say_points_nowhere() -> None:
    error = failed(InvalidRequest("column 'a' is missing"))
    assert opening.pointing_to_log(error, None) is error


COMMANDS: dict[str, click.Group] = {
    "rlhf-controller": cli.main,
    "rlhf-deploy": deploy.cli.main,
    "rlhf-map": controller.mapping.cli.main,
    "rlhf-conformance": conformance.cli.main,
}


@pytest.mark.parametrize("group", COMMANDS.values(), ids=COMMANDS)
def test_the_list_of_commands_has_a_whole_sentence_for_each(group: click.Group) -> None:
    listed = CliRunner().invoke(group, ["--help"]).output.partition("Commands:")[2]
    assert len(listed.splitlines()) == len(group.commands) + 1
    assert all(line.endswith(".") and not line.endswith("...") for line in listed.splitlines()[1:])


def launch_by(text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a shell script take the place of the launcher of services."""
    program = directory / "launcher"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


LAUNCHER = """\
#!/bin/sh
echo 'error: service critic: was killed by SIGKILL' >&2
echo ready
exec sleep 60
"""


def test_an_error_that_follows_from_a_lost_service_has_the_launchers_cause_in_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher stops the actor, which releases its shards, before the controller calls the critic again."""
    launch_by(LAUNCHER, tmp_path, monkeypatch)
    with LaunchedServices(load(QUICKSTART, ()), QUICKSTART, tmp_path) as services:
        said = services.explain(RlhfError("reference rank 0 ComputeRefLogProb: shard 9 was released"))
        stuck = DeadlineExceeded("actor rank 1 GenerateSequences: its process is stopped or stuck")
        assert services.explain(stuck) is stuck
    assert isinstance(said, ServiceLost)
    assert str(said) == (
        "service critic: was killed by SIGKILL; reference rank 0 ComputeRefLogProb: shard 9 was released"
    )


def test_the_cause_is_found_where_the_launchers_log_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a user who makes room on a full disk."""
    launch_by(LAUNCHER, tmp_path, monkeypatch)
    with LaunchedServices(load(QUICKSTART, ()), QUICKSTART, tmp_path / "logs") as services:
        shutil.rmtree(tmp_path / "logs")
        assert services.has_failed()
        said = services.explain(ServiceLost("critic rank 0: cannot be reached"))
    assert str(said) == "service critic: was killed by SIGKILL; critic rank 0: cannot be reached"


STARTER = """\
#!/bin/sh
echo ready
exec sleep 60
"""


def test_no_report_is_waited_for_where_an_external_service_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(seconds: float) -> None:
        raise AssertionError("it waits for a report of the launcher")

    launch_by(STARTER, tmp_path, monkeypatch)
    config = load(QUICKSTART, ("services.reward.external=true",))
    lost = ServiceLost("cannot be reached or died").of_call("reward")
    with LaunchedServices(config, QUICKSTART, tmp_path) as services, monkeypatch.context() as patch:
        patch.setattr(launch.time, "sleep", waits)
        assert services.explain(lost) is lost


@pytest.mark.parametrize(
    ("external", "called"),
    [("reward", "actor"), ("actor", "critic"), ("actor,critic,reference,reward", "actor")],
)
def test_services_that_are_not_there_are_lost_by_one_that_the_launcher_has_started_where_there_is_one(
    external: str, called: str
) -> None:
    addresses = [
        f"services.{role}.address=127.0.0.1:{port}"
        for role, port in zip(("actor", "critic", "reference", "reward"), free_ports(4), strict=True)
    ]
    outside = [f"services.{role}.external=true" for role in external.split(",")]
    config = load(QUICKSTART, ("run.connect_timeout_s=0.1", *addresses, *outside))
    with pytest.raises(ServiceLost) as raised:
        asyncio.run(Discovery(config, lambda text: None).find_all())
    assert raised.value.called == called


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [("interrupted", False), ("refused", False), ("it died (log: {logs}/actor.log)", True)],
)
def test_the_log_of_an_export_is_kept_where_an_error_names_it(
    text: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    launch_by(STARTER, tmp_path, monkeypatch)
    logs.mkdir()
    monkeypatch.setattr(export.tempfile, "mkdtemp", lambda prefix: str(logs))
    error = KeyboardInterrupt() if text == "interrupted" else ServiceLost(text.format(logs=logs))
    with pytest.raises(type(error)), export.launched_alone(load(QUICKSTART, ())):
        raise error
    assert logs.exists() is is_kept


RELAUNCHER = """\
#!/bin/sh
echo 'lost: service reward: was killed by SIGKILL' >&2
echo 'lost: service reward: exited with 3' >&2
echo 'lost: service cost: exited with 4' >&2
echo ready
exec sleep 60
"""


def test_a_service_that_is_started_again_explains_errors_of_its_own_calls_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two losses before one replacement none is left for a later error, and an error that does not follow from a
    loss keeps its class, by which the run is restarted or not."""
    launch_by(RELAUNCHER, tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "EXPLAIN_TIMEOUT_S", 0.0)
    with LaunchedServices(load(QUICKSTART, ()), QUICKSTART, tmp_path) as services:
        lost = ServiceLost("step 3: refused").of_call("reward")
        assert str(services.explain(lost)) == "service reward: exited with 3; step 3: refused"
        assert services.take_loss("reward") == "was killed by SIGKILL"
        assert services.take_loss("reward") == ""
        for unexplained in (
            ServiceLost("cannot be reached").of_call("reward"),
            ServiceLost("cannot be reached").of_call("actor"),
            RewardFailed("row 7: no score").of_call("cost"),
            ServiceLost("cost rank 0 cannot be reached"),
        ):
            assert services.explain(unexplained) is unexplained


SLOW_LAUNCHER = """\
#!/bin/sh
echo 'actor: healthy after 1.2 s' >&2
echo 'reward: healthy after 1.3 s' >&2
sleep 1
echo ready
exec sleep 60
"""


def test_a_long_start_names_the_services_that_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_by(SLOW_LAUNCHER, tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "SILENCE_S", 0.3)
    lines: list[str] = []
    with LaunchedServices(load(QUICKSTART, ()), QUICKSTART, tmp_path, lines.append):
        assert "waiting for critic, reference, 0 s so far" in lines


@pytest.fixture
def settings(tmp_path: Path) -> tuple[str, ...]:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    return (
        f"data.train='{tmp_path}/train.jsonl'",
        f"data.heldout='{tmp_path}/heldout.jsonl'",
        f"run.directory='{tmp_path}/runs'",
    )


def test_a_run_whose_directory_was_deleted_ends_with_its_own_error(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleted(*_: object, **__: object) -> NoReturn:
        shutil.rmtree(tmp_path / "runs")
        raise RlhfError("the services are lost")

    monkeypatch.setattr(opening, "LaunchedServices", deleted)
    with pytest.raises(RlhfError, match="the services are lost"):
        job.run(load(QUICKSTART, settings), "ppo", launch=True)


def test_a_dry_run_refuses_texts_that_cannot_be_read(settings: tuple[str, ...]) -> None:
    settings = (*settings, "data.pretrain='nowhere.jsonl'")
    config = load(QUICKSTART.with_name("safe_rlhf.toml"), settings)
    with pytest.raises(ConfigError, match=r"data\.pretrain: nowhere\.jsonl: No such file"):
        cli._show(algorithms.find_algorithm("safe_rlhf"), config, launch=False, has_data=True)


def test_a_dry_run_refuses_an_environment_that_cannot_be_imported(settings: tuple[str, ...]) -> None:
    settings = (*settings, "rollout.environment.factory='nowhere:Tool'", "rollout.environment.turn_tokens=2")
    with pytest.raises(
        ConfigError, match=r"rollout\.environment\.factory: 'nowhere:Tool' cannot be imported"
    ):
        cli._show(algorithms.find_algorithm("ppo"), load(QUICKSTART, settings), launch=False, has_data=True)


def test_a_dry_run_refuses_a_reward_that_it_would_start_and_whose_function_cannot_be_imported(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = (*settings, "services.reward.function='nowhere:score'")
    settings += tuple(
        f"services.{name}.model='{tmp_path}/model'" for name in ("actor", "critic", "reference")
    )

    def show(*further: str, launch: bool) -> None:
        config = load(QUICKSTART, (*settings, *further))
        cli._show(algorithms.find_algorithm("ppo"), config, launch=launch, has_data=True)

    with pytest.raises(ConfigError, match=r"^services\.reward\.function: 'nowhere:score' cannot be imported"):
        show(launch=True)
    show(launch=False)
    show("services.reward.external=true", launch=True)


def test_a_dry_run_names_a_model_that_this_host_does_not_have(
    settings: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    models = {"actor": tmp_path / "no", "critic": tmp_path / "model", "reference": "owner/name"}
    settings = (*settings, *(f"services.{name}.model='{model}'" for name, model in models.items()))
    line = f"services.actor.model: there is no directory {tmp_path / 'no'}"

    def show(*further: str, launch: bool) -> str:
        config = load(QUICKSTART, (*settings, *further))
        cli._show(algorithms.find_algorithm("ppo"), config, launch=launch, has_data=True)
        return capsys.readouterr().err

    with pytest.raises(ConfigError, match=f"^{line}$"):
        show(launch=True)
    warnings = [said for said in show(launch=False).splitlines() if said.startswith("warning: services.")]
    assert warnings == [f"warning: {line}"]
    elsewhere = ("services.actor.address='192.0.2.1:7101'", "services.actor.external=true")
    assert line not in show(*elsewhere, launch=False) + show(*elsewhere, launch=True)


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        ({"steps": 3}, ""),
        ({"steps": 3, "accuracy_before": 0.5, "accuracy_after": 1.0},
         "held-out accuracy: 50.0 % before, 100.0 % after 3 steps"),
    ],
)  # fmt: skip
def test_a_run_is_summed_up_by_its_first_figure_where_it_has_one(summary: dict[str, Any], line: str) -> None:
    assert cli._headline(summary) == line
