"""A run that was killed or stopped goes on from its last checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.checkpoints.journal import remove_journal
from controller.checkpoints.store import CheckpointStore
from controller.config.config import Config
from controller.evaluate import evaluate
from controller.tracking.metrics import read_metrics
from controller.tracking.timeline import read_events
from integration.harness import Cluster, wait_until, write_config
from integration.resuming import RUN_TIMEOUT_S, Results, resumable, with_tables
from rlhf.errors import ConfigError, RlhfError
from settings.strict import read_toml

pytestmark = pytest.mark.timeout(240)

STEPS = 6
ROLES = ("actor", "critic", "reference", "reward")


@pytest.fixture(scope="module")
def services(cluster: Cluster) -> Config:
    """The config of a run on services that are up, with an adaptive KL and an evaluation in between. Six steps take
    three quarters of the second pass over the data."""
    config = cluster.select(**{role: role for role in ROLES})
    return with_tables(
        config,
        run={"steps": STEPS, "evaluate_every": 4},
        algorithm={"kl_target": 0.01, "kl_horizon": 200, "kl_reward_coefficient": 0.05},
    )


@pytest.fixture(scope="module")
def undisturbed(services: Config, tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("undisturbed")
    return Results.of(job.run(with_tables(services, run={"directory": directory}), "ppo").directory)


def test_a_killed_run_goes_on_with_the_same_results(
    services: Config, undisturbed: Results, tmp_path: Path
) -> None:
    with resumable(with_tables(services, checkpoint={"every": 2}), tmp_path) as run:
        run.kill_after(run.start(), 2)
        out, _ = run.finish(run.resume())
        assert "resumed after step" in out
        assert Results.of(run.run_dir) == undisturbed
        store = CheckpointStore(run.run_dir)
        assert [commit.step for commit in store.commits()] == [4, 6]
        assert not list(store.path.glob("*.partial"))
        before, after = (
            json.loads((store.place(step) / "controller.json").read_text())["facts"] for step in (4, 6)
        )
        assert before["limits"] == after["limits"]
        assert before["limits"]["prompts"] > 0
        known = json.loads((run.run_dir / "run.json").read_text())
        (resumed,) = known["resumed"]
        assert resumed["step"] >= 2
        began_from = known["services"]["actor"]["began_from"]
        assert began_from.startswith("checkpoint ") or "continued from policy version" in began_from
        steps = [
            e["args"]["step"]
            for e in read_events(run.run_dir / "timeline.json")
            if e["name"] == "update_actor"
        ]
        assert sorted(set(steps)) == list(range(1, STEPS + 1))
        assert steps == sorted(steps)
        with pytest.raises(ConfigError, match=r"the run has ended after its 6 steps; --set run.steps=NUMBER"):
            job.resume(run.run_dir)


def test_sigterm_writes_a_checkpoint_first(services: Config, undisturbed: Results, tmp_path: Path) -> None:
    config = with_tables(services, checkpoint={"every": 100, "grace_s": 60.0})
    with resumable(config, tmp_path) as run:
        process = run.start()
        wait_until(lambda: list(tmp_path.glob("runs/*/metrics.jsonl")), RUN_TIMEOUT_S, "the run")
        wait_until(lambda: run.steps_done >= 1, RUN_TIMEOUT_S, "a step")
        process.send_signal(signal.SIGTERM)
        out, err = run.finish(process, 128 + signal.SIGTERM)
        assert "stopped by SIGTERM" in err
        (commit,) = CheckpointStore(run.run_dir).commits()
        assert commit.step == run.steps_done < STEPS
        assert f"checkpoint: {CheckpointStore(run.run_dir).place(commit.step)}" in out
        run.finish(run.resume())
        assert Results.of(run.run_dir) == undisturbed


def test_a_finished_run_goes_on_with_more_steps(
    services: Config, undisturbed: Results, tmp_path: Path
) -> None:
    config = with_tables(services, run={"directory": tmp_path, "steps": 4}, checkpoint={"at_end": True})
    first = job.run(config, "ppo").directory
    assert [commit.step for commit in CheckpointStore(first).commits()] == [4]
    done = job.resume(first, settings=(f"run.steps={STEPS}",))
    assert done.directory == first
    assert Results.of(first) == undisturbed
    assert (done.summary["steps"], len(done.metrics)) == (STEPS, STEPS + 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("run.seed=7",), "run.seed was 0"),
        (("services.actor.optimizer.eps=0.1",), "services.actor.optimizer.eps was"),
        # Allowed, but not with services that were started with another one.
        (
            ("run.steps=3", "services.actor.optimizer.learning_rate=0.1"),
            r"optimizer.learning_rate is \S+ there and 0.1 here",
        ),
        (("run.stepz=7",), "run.stepz"),
    ],
)
def test_another_config_is_refused(settings: tuple[str, ...], said: str, stopped: Path) -> None:
    before = (stopped / "config.toml").read_text()
    with pytest.raises(ConfigError, match=said):
        job.resume(stopped, settings=settings)
    assert (stopped / "config.toml").read_text() == before


def test_a_resume_whose_services_do_not_start_leaves_the_config_and_the_logs_of_others(
    stopped: Path, services: Config
) -> None:
    before = (stopped / "config.toml").read_bytes()
    for steps in (2, 3):
        with pytest.raises(RlhfError, match=services.services["actor"].address):
            job.resume(stopped, settings=(f"run.steps={steps}",), launch=True)  # the address is in use
        assert (stopped / "config.toml").read_bytes() == before
    logs = {path.name: read_toml(path / "config.toml") for path in (stopped / "logs").iterdir()}
    assert {name: table["run"]["steps"] for name, table in logs.items()} == {
        "from-step-1": 2,
        "from-step-1-2": 3,
    }


@pytest.fixture(scope="module")
def stopped(services: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended after a step with a checkpoint."""
    tables: dict[str, Any] = {"run": {"directory": tmp_path_factory.mktemp("stopped"), "steps": 1}}
    return job.run(with_tables(services, **tables, checkpoint={"every": 1}), "ppo").directory


def test_other_rows_are_refused(stopped: Path) -> None:
    path = Path(Config.model_validate(_tables(stopped)).data.train)
    other = path.with_name("other.jsonl")
    other.write_text(path.read_text().replace("1", "2"))
    with pytest.raises(ConfigError, match=r"data.train.0: the contents differ from those"):
        job.resume(stopped, settings=("run.steps=2", f"data.train='{other}'"))


def test_a_checkpoint_is_evaluated_as_the_run_has_done(
    stopped: Path, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, last = CheckpointStore(stopped).place(1), read_metrics(stopped)[-1]
    settings = (f"run.directory='{tmp_path}'",)
    measured = dict(evaluate(place, settings=settings).summary)
    printed = capsys.readouterr().out
    assert "held-out" in printed
    assert "step 0/" not in printed
    names = [name.removeprefix("evaluation/") for name in last if name.startswith("evaluation/")]
    assert measured == {name: last[f"evaluation/{name}"] for name in names}
    sampled = [f"rollout.evaluation.{each}" for each in ("samples=3", "temperature=1", "solved_at=0.5")]
    measured = dict(evaluate(place, settings=(*settings, *sampled)).summary)
    assert 0 <= measured["pass_at_1"] <= measured["pass_at_2"] <= measured["pass_at_3"] <= 1
    config = write_config(cluster.config, tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r"services.actor: .* was started with another config: model is"):
        evaluate(stopped / "actor", config_path=config, settings=settings)
    with pytest.raises(ConfigError, match="is neither a complete checkpoint"):
        evaluate(tmp_path)


def test_another_algorithm_is_refused(stopped: Path) -> None:
    with pytest.raises(ConfigError, match="is a run of ppo, not of grpo"):
        job.resume(stopped, "grpo")


def test_a_damaged_shard_is_named(stopped: Path) -> None:
    path = stopped.resolve() / "checkpoints" / "step-1" / "actor" / "rank-00001.safetensors"
    remove_journal(stopped)  # services that hold the state read no checkpoint
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    try:
        with pytest.raises(RlhfError, match=f"checkpoint file {path} is damaged: it has"):
            job.resume(stopped, settings=("run.steps=2",))
    finally:
        path.write_bytes(whole)


def test_a_metric_that_does_not_exist_is_found_after_the_first_step(services: Config, tmp_path: Path) -> None:
    table = {"every": 1, "best": "reward/maen"}
    with pytest.raises(ConfigError, match=r"no metric 'reward/maen'; did you mean 'reward/mean'\?"):
        job.run(with_tables(services, run={"directory": tmp_path}, checkpoint=table), "ppo")
    (directory,) = tmp_path.iterdir()
    assert [line["step"] for line in read_metrics(directory)] == [0, 1]


def _tables(run_dir: Path) -> dict[str, Any]:
    return read_toml(run_dir / "config.toml")
