"""rlhf-controller: runs an algorithm on services that are running, or that it launches itself."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import tomli_w

from client.session import Session
from controller import algorithms
from controller.config.config import Config, load
from controller.data.draws import Limit, longest_prompt, overlong_share, prompt_limit, text_limit
from controller.data.prompts import PromptData, TextData, load_data
from controller.foresight import arena_warnings, check_models
from controller.identity import Identity
from controller.launch import LaunchedServices
from controller.role_groups.admission import with_measured
from controller.role_groups.cluster import Cluster, spare_garbage_collector
from controller.tracking.progress import Progress
from controller.tracking.recorder import Recorder
from controller.tracking.report import write_report
from controller.tracking.run_directory import RunDirectory
from controller.training.algorithm import Algorithm
from controller.training.run import Run
from rlhf.errors import ConfigError, RlhfError

CONFIG_FILE = "config.toml"
LOGS = "logs"
BUILD_STOPS_S = 10.0
"""Time in which the quickstart's build ends when it is told to."""
USAGE_ERROR = 2


def _write_report(context: click.Context, option: click.Parameter, directory: str | None) -> None:
    if directory is None:
        return
    try:
        click.echo(f"report: {write_report(Path(directory))}")
    except RlhfError as error:
        click.echo(f"error: {error}", err=True)
        context.exit(1)
    context.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--algo", required=True, metavar="NAME", help=f"{', '.join(algorithms.names())}, or module:function."
)
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="TOML file. Default: the quickstart."
)
@click.option("--launch", is_flag=True, help="Start the services of the config, and stop them at the end.")
@click.option(
    "--report",
    metavar="DIRECTORY",
    is_eager=True,
    expose_value=False,
    callback=_write_report,
    help="Write the report of a run from its directory, and do nothing else.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Put a value into the config; repeatable."
)
@click.option(
    "--continue",
    "keep_weights",
    is_flag=True,
    help="Go on from the weights that the services have, not anew.",
)
@click.option("--take-over", is_flag=True, help="End the run that has the services.")
@click.option("--dry-run", is_flag=True, help="Check the config and print it, resolved; start nothing.")
@click.version_option(package_name="rlhf-cluster")
def main(
    algo: str,
    config_path: Path | None,
    launch: bool,
    settings: tuple[str, ...],
    keep_weights: bool,
    take_over: bool,
    dry_run: bool,
) -> None:
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
        if dry_run:
            _show(algorithm, config, launch=launch or config_path is None, has_data=config_path is not None)
            return
        if config_path is None:
            _build_quickstart(config)
        run_directory, summary = run(
            algorithm,
            config,
            launch=launch or config_path is None,
            keep_weights=keep_weights,
            take_over=take_over,
        )
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        click.echo(f"stopped by {signal.Signals(number).name}", err=True)
        sys.exit(128 + number)
    except RlhfError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(USAGE_ERROR if isinstance(error, ConfigError) else 1)
    if headline := _headline(summary):
        click.echo(headline)
    click.echo(f"report:            {run_directory / 'report.html'}")
    click.echo(f"run directory:     {run_directory}")


def run(
    algorithm: Algorithm, config: Config, *, launch: bool, keep_weights: bool = False, take_over: bool = False
) -> tuple[Path, dict[str, Any]]:
    """One whole run; returns its directory and its summary. Whatever ends it, what it started is stopped.

    Args:
        launch: Start the services, and stop them at the end.
        keep_weights: As of `Cluster.connect`.
        take_over: End the run that has the services.

    Raises:
        RlhfError: One line that names the culprit.
    """
    plan = _Plan.of(algorithm, config)
    directory = RunDirectory.create(config.run.directory, config.run.name, algorithm=algorithm.name)
    try:
        return directory.path, _run_in(
            directory, plan, launch=launch, keep_weights=keep_weights, take_over=take_over
        )
    except (RlhfError, KeyboardInterrupt) as error:
        # A refusal says all there is to know; of a service that was lost, its log says more.
        unused = {CONFIG_FILE, LOGS} if isinstance(error, ConfigError) else {CONFIG_FILE}
        directory.remove_if_only(unused)
        raise


@dataclass(frozen=True)
class _Plan:
    """A checked run that is not yet connected to services."""

    algorithm: Algorithm
    config: Config
    data: tuple[PromptData, PromptData]
    pretrain: TextData | None
    identity: Identity

    @staticmethod
    def of(algorithm: Algorithm, config: Config) -> _Plan:
        """Raises ConfigError where the configuration or the data are not what the algorithm needs."""
        started_unix_ns = time.time_ns()
        config = algorithm.configure(config)
        check_models(config)
        data = load_data(config, algorithm.columns, started_unix_ns / 1e9)
        texts = config.data.pretrain
        pretrain = TextData.load(texts, "data.pretrain") if texts else None
        identity = Identity.of(algorithm.name, config.run.seed, started_unix_ns)
        return _Plan(algorithm, config, data, pretrain, identity)

    def resolved(self, config: Config) -> str:
        """A configuration with all that it leaves to defaults, as TOML."""
        return self.identity.as_comment() + tomli_w.dumps(self.algorithm.resolved(config))


def _run_in(
    directory: RunDirectory, plan: _Plan, *, launch: bool, keep_weights: bool, take_over: bool
) -> dict[str, Any]:
    config, progress = plan.config, Progress()
    resolved = directory.write_text(CONFIG_FILE, plan.resolved(config))
    for line in arena_warnings(config, longest_prompt(config, plan.data)):
        progress.message(line)
    with contextlib.ExitStack() as stack:
        launched = None
        if launch:
            progress.message(
                f"starting services: {', '.join(config.services)}; logs: {directory.path / LOGS}"
            )
            launched = stack.enter_context(LaunchedServices(config, resolved, directory.path / LOGS))
        try:
            return _run_connected(plan, directory, progress, keep_weights=keep_weights, take_over=take_over)
        except RlhfError as error:
            raise _pointing_to_log(launched.explain(error) if launched else error, launched) from error


def _run_connected(
    plan: _Plan, directory: RunDirectory, progress: Progress, *, keep_weights: bool, take_over: bool
) -> dict[str, Any]:
    config, table = plan.config, plan.config.run
    session = Session(
        name=f"{directory.path.name}-{secrets.token_hex(4)}",
        started_unix_ns=plan.identity.started_unix_ns,
        seed=table.seed,
        timeout_s=table.call_timeout_s,
        save_timeout_s=table.save_timeout_s,
        balance=table.balance,
        take_over=take_over,
    )
    cluster = Cluster(config, session)
    try:
        outputs = {plan.algorithm.trains: directory.output(plan.algorithm.trains)}
        cluster.connect(progress.message, keep_weights=keep_weights, outputs=outputs)
        # A run of this file computes with the same libraries, so its bits are the same.
        directory.write_text(CONFIG_FILE, plan.resolved(with_measured(config, cluster.descriptions)))
        services = cluster.token_services()
        limits = prompt_limit(config, services), text_limit(config, services)
        if line := _limit_line(plan.data, limits[0]):
            progress.message(line)
        progress.message(f"run directory: {directory.path}")
        spare_garbage_collector()
        progress.begin(table.steps)
        known = plan.identity.with_services(cluster.descriptions, cluster.origins)
        with (
            Recorder(directory, progress, known) as recorder,
            recorder.following(cluster.running, cluster.memory),
        ):
            run = Run(config, plan.data, cluster, recorder, plan.pretrain, limits)
            try:
                plan.algorithm(run)
                return run.finish(plan.algorithm.trains)
            finally:
                run.close()
    finally:
        cluster.close()


def _limit_line(data: tuple[PromptData, PromptData], limit: Limit | None) -> str:
    """How many prompts of a sample are too long; empty where none is."""
    if limit is None:
        return "prompts are not checked for their length: their tokens cannot be counted here (see data.tokenizer)"
    (long, of), (long_heldout, of_heldout) = (
        overlong_share(rows, limit, lambda prompt: prompt.text) for rows in data
    )
    if not long and not long_heldout:
        return ""
    return (
        f"prompts of more than {limit.tokens} tokens are left out ({limit.why}): {long} of {of} training rows looked "
        f"at, {long_heldout} of {of_heldout} held-out ones"
    )


def _pointing_to_log(error: RlhfError, launched: LaunchedServices | None) -> RlhfError:
    """An error that nobody foresaw, with the place of its traceback."""
    if type(error) is not RlhfError or not error.remote_traceback or not error.service:
        return error
    log = launched.log_of(error.service) if launched else f"the log of services.{error.service}"
    return RlhfError(f"{error} (traceback: {log})")


def _show(algorithm: Algorithm, config: Config, *, launch: bool, has_data: bool) -> None:
    """Checks a configuration as a run would; prints it to stdout, and what the run would do to stderr.

    Raises:
        ConfigError: As of `run`.
    """
    check_models(algorithm.configure(config))
    if has_data:
        plan = _Plan.of(algorithm, config)
        config, (train, heldout) = plan.config, plan.data
        click.echo(f"data: {len(train)} train and {len(heldout)} held-out rows", err=True)
    else:
        config = algorithm.configure(config)
    for name, table in config.services.items():
        ranks = "1 rank" if table.ranks == 1 else f"{table.ranks} ranks"
        start = "would be started" if launch and not table.external else "has to be there"
        click.echo(f"services.{name}: {table.role}, {ranks} at {table.address}, {start}", err=True)
    click.echo(tomli_w.dumps(algorithm.resolved(config)), nl=False)


def _headline(summary: Mapping[str, Any]) -> str:
    """One line with the first held-out metric, before and after; empty where nothing was measured."""
    name = next((key.removesuffix("_before") for key in summary if key.endswith("_before")), "")
    if not name:
        return ""
    before, after = summary[f"{name}_before"], summary[f"{name}_after"]
    shape, shown = (
        (".1%", name) if name == "accuracy" else (".4g", "mean reward" if name == "reward" else name)
    )
    return f"held-out {shown}: {before:{shape}} before, {after:{shape}} after {summary['steps']} steps"


def _quickstart(name: str, settings: tuple[str, ...]) -> Config:
    """A bundled configuration by its name."""
    with importlib.resources.as_file(
        importlib.resources.files("deploy") / "quickstart" / f"{name}.toml"
    ) as path:
        return load(path, settings)


def _build_quickstart(config: Config) -> None:
    """Builds the quickstart's model and data where they are missing."""
    build_command = ["-m", "deploy.quickstart.build", "--out", str(config.data.train.parent)]
    # Ends with this process, however that ends.
    tied = [sys.executable, "-m", "deploy.with_parent", str(os.getpid())]
    command = [*tied, sys.executable, *build_command]
    # A session of its own: Ctrl-C reaches only us, and the build has the time to remove what is half done.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as build:
        try:
            _, said = build.communicate()
        except BaseException:
            build.terminate()
            build.wait(BUILD_STOPS_S)
            raise
    if build.returncode:
        cause = said.strip().rpartition("\n")[2] or f"exit code {build.returncode}"
        raise ConfigError(f"the quickstart's model could not be built: {cause}")


def _terminated(number: int, _: object) -> NoReturn:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    main()
