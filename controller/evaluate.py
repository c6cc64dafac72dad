"""Measures a policy on the held-out rows: that of a checkpoint, or of a model directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.checkpoints.resume_point import ResumePoint
from controller.config.config import Config, load, with_settings
from controller.job import FinishedRun
from controller.opening import open_planned
from controller.plan import Plan
from controller.tracking.progress import Progress
from controller.training.algorithm import Algorithm, UnreadOptions
from controller.training.run import Run
from rlhf.errors import ConfigError
from settings.strict import read_toml, validate

MODEL_FILE = "config.json"
"""File by which a directory is a model directory."""
MEASURING = ("actor", "rollout", "reward")
"""Roles of the services that an evaluation uses."""


def evaluate(
    directory: Path,
    *,
    config_path: Path | None = None,
    settings: tuple[str, ...] = (),
    launch: bool = False,
    take_over: bool = False,
) -> FinishedRun:
    """Measures a policy on the held-out rows as a run does, by `rollout.evaluation` of the config. Writes a run
    directory of its own.

    Args:
        directory: A checkpoint, RUN/checkpoints/step-N, or the model directory of the policy.
        config_path: Config file. Default: the config of the checkpoint's run; for a model directory there is none.
        settings: Overrides "key.path=value" of the config.
        launch, take_over: As in `controller.job.run`.

    Raises:
        ConfigError: The directory is neither, or the config cannot be used or has no actor.
        RlhfError: A file of the checkpoint is damaged, or the evaluation failed.
    """
    point = None if (directory / MODEL_FILE).is_file() else ResumePoint.at(directory)
    config = _config(directory, point, config_path, settings)
    actor = _actor(config)
    plan = Plan.of(Algorithm(evaluation, options=UnreadOptions, trains=actor), config)
    if point:
        plan = replace(plan, loads={actor: point.place_of(actor)})
    with open_planned(plan, Progress(has_steps=False), launch=launch, take_over=take_over) as opened:
        measured = evaluation(opened)
        opened.recorder.summary({"evaluated": str(directory), **measured})
        return FinishedRun(opened.directory, measured)


def evaluation(run: Run) -> dict[str, float]:
    """Measures the policy of a run, records the metrics as those of step 0, and returns them by name."""
    metrics = run.evaluate()
    run.recorder.step(0, metrics)
    prefix = "evaluation/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _config(
    directory: Path, point: ResumePoint | None, path: Path | None, settings: tuple[str, ...]
) -> Config:
    """Returns the config of the evaluation, from `path`, or else from the checkpoint's run: only the services of role
    actor, rollout or reward, and neither checkpoints nor trackers. Raises ConfigError for a model directory without
    `path`."""
    if point:
        tables = point.facts["config"]
        config = (
            load(path, settings)
            if path
            else validate(Config, with_settings(tables, settings), str(directory))
        )
    elif path:
        tables = with_settings(read_toml(path), settings)
        config = validate(Config, _with_model(tables, directory), str(path))
    else:
        raise ConfigError(f"{directory} is a model directory: --config has to say which services measure it")
    needed = {name: table for name, table in config.services.items() if table.role in MEASURING}
    return config.without_outputs().model_copy(update={"services": needed})


def _with_model(tables: dict[str, Any], model: Path) -> dict[str, Any]:
    """Sets the model of the services of role actor in the tables of a config, which may be invalid, and returns
    them."""
    services = tables.get("services")
    for table in services.values() if isinstance(services, dict) else ():
        if isinstance(table, dict) and table.get("role") == "actor":
            table["model"] = str(model)
    return tables


def _actor(config: Config) -> str:
    """Returns the name of the service with the policy. Raises ConfigError where there is none."""
    names = [name for name, table in config.services.items() if table.role == "actor"]
    if not names:
        raise ConfigError(
            "an evaluation measures the policy of a service of role actor, and the config has none"
        )
    return "actor" if "actor" in names else names[0]
