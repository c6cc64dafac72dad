"""rlhf-controller: runs an algorithm on services that are running, or that it launches itself."""

from __future__ import annotations

import contextlib
import importlib.resources
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
import tomli_w

from controller import algorithms
from controller.algorithm import Algorithm
from controller.cluster import Cluster
from controller.config import Config, load
from controller.data import PromptData, TextData, load_data
from controller.group import Session
from controller.launch import LaunchedServices
from controller.recorder import Recorder
from controller.run import Run
from controller.tracking.progress import Progress
from controller.tracking.run_directory import RunDirectory
from rlhf.errors import ConfigError, RlhfError

CONFIG_FILE = "config.toml"
USAGE_ERROR = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--algo", required=True, metavar="NAME", help=f"{', '.join(algorithms.names())}, or module:function."
)
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="TOML file. Default: the quickstart."
)
@click.option("--launch", is_flag=True, help="Start the services of the config, and stop them at the end.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Put a value into the config; repeatable."
)
def main(algo: str, config_path: Path | None, launch: bool, settings: tuple[str, ...]) -> None:
    """Run an algorithm of RLHF over role services.

    Without --config it builds the quickstart's model and data, launches those of the quickstart's services that the
    algorithm needs, and runs.
    """
    signal.signal(signal.SIGTERM, _terminated)
    # An algorithm of the user's own may lie in the working directory.
    sys.path.append(str(Path.cwd()))
    try:
        algorithm = algorithms.find_algorithm(algo)
        config = load(config_path, settings) if config_path else _quickstart(algorithm.quickstart, settings)
        run_directory, summary = run(algorithm, config, launch=launch or config_path is None)
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        click.echo(f"stopped by {signal.Signals(number).name}", err=True)
        sys.exit(128 + number)
    except RlhfError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(USAGE_ERROR if isinstance(error, ConfigError) else 1)
    click.echo(_headline(summary))
    click.echo(f"report:            {run_directory / 'report.html'}")
    click.echo(f"run directory:     {run_directory}")


def run(algorithm: Algorithm, config: Config, *, launch: bool) -> tuple[Path, dict[str, Any]]:
    """One whole run; returns its directory and its summary. Whatever ends it, what it started is stopped.

    Raises:
        RlhfError: One line that names the culprit.
    """
    config = algorithm.configure(config)
    data = load_data(config, algorithm.columns)
    pretrain = TextData.load(config.data.pretrain, "data.pretrain") if config.data.pretrain else None
    directory = RunDirectory.create(config.run.directory, config.run.name)
    resolved = directory.write_text(CONFIG_FILE, tomli_w.dumps(algorithm.resolved(config)))
    progress = Progress()
    progress.message(f"run directory: {directory.path}")
    for what, rows in zip(("train", "held-out"), data, strict=True):
        if rows.num_long:
            progress.message(f"{rows.num_long} {what} rows left out: their prompt is too long")
    with contextlib.ExitStack() as stack:
        launched = None
        if launch:
            progress.message(f"starting services: {', '.join(config.services)}")
            launched = stack.enter_context(LaunchedServices(config, resolved, directory.path / "logs"))
        try:
            return directory.path, _run_connected(algorithm, config, data, pretrain, directory, progress)
        except RlhfError as error:
            raise (launched.explain(error) if launched else error) from error


def _run_connected(
    algorithm: Algorithm,
    config: Config,
    data: tuple[PromptData, PromptData],
    pretrain: TextData | None,
    directory: RunDirectory,
    progress: Progress,
) -> dict[str, Any]:
    table = config.run
    session = Session(seed=table.seed, timeout_s=table.call_timeout_s, balance=table.balance)
    cluster = Cluster(config, session)
    try:
        cluster.connect()
        progress.begin(config.run.steps)
        with Recorder(directory, progress) as recorder, recorder.following(cluster.running, cluster.memory):
            run = Run(config, data, cluster, recorder, pretrain)
            try:
                algorithm(run)
                return run.finish(algorithm.trains)
            finally:
                run.close()
    finally:
        cluster.close()


def _headline(summary: Mapping[str, Any]) -> str:
    """What came of the first thing that was measured on the held-out rows."""
    name = next(key.removesuffix("_before") for key in summary if key.endswith("_before"))
    before, after = summary[f"{name}_before"], summary[f"{name}_after"]
    shape = ".1%" if name == "accuracy" and 0 <= min(before, after) <= max(before, after) <= 1 else ".4g"
    return f"held-out {name}: {before:{shape}} before, {after:{shape}} after {summary['steps']} steps"


def _quickstart(name: str, settings: tuple[str, ...]) -> Config:
    """A bundled configuration by its name, its model and data built where they are missing."""
    with importlib.resources.as_file(
        importlib.resources.files("deploy") / "quickstart" / f"{name}.toml"
    ) as path:
        config = load(path, settings)
    command = [sys.executable, "-m", "deploy.quickstart.build", "--out", str(config.data.train.parent)]
    built = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if built.returncode:
        cause = built.stderr.strip().rpartition("\n")[2] or f"exit code {built.returncode}"
        raise ConfigError(f"the quickstart's model could not be built: {cause}")
    return config


def _terminated(number: int, _: object) -> NoReturn:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    main()
