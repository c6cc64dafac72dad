"""rlhf-controller: runs an algorithm on running services, or on services that it launches itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import tomli_w

from controller import algorithms
from controller.checkpoints.termination import Termination
from controller.config.config import Config, load
from controller.config.devices import ranks_line
from controller.data.endings import messages_without_end
from controller.epochs import steps_of_epochs
from controller.evaluate import evaluate
from controller.export import export
from controller.foresight import check_listening, check_models, missing_models
from controller.job import resume, run
from controller.optimizer_steps import with_total_steps
from controller.plan import Plan
from controller.quickstart import build_quickstart, load_quickstart
from controller.tracking.report import write_report
from controller.training.algorithm import Algorithm
from controller.training.environment import environment_factory
from reports.units import counted, figure_text, percent_text
from rlhf.addresses import address_host, is_loopback
from rlhf.errors import ConfigError
from rlhf.stacks import dump_on_signal
from settings.commands import Commands, errors_shown, set_option
from settings.function_check import check_function


def _write_report(context: click.Context, option: click.Parameter, directory: str | None) -> None:
    if directory is None:
        return
    with errors_shown():
        click.echo(f"report: {write_report(Path(directory))}")
    context.exit()


@click.group(
    cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--algo",
    default="",
    metavar="NAME",
    help=f"{', '.join(algorithms.known_names())}, or module:function. Required, except with --resume.",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file. Default: the quickstart.",
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
@set_option
@click.option(
    "--continue",
    "keep_weights",
    is_flag=True,
    help="Continue from the services' current weights instead of loading the models again.",
)
@click.option("--take-over", is_flag=True, help="End another run that uses the services.")
@click.option(
    "--resume",
    "run_dir",
    metavar="DIRECTORY",
    type=click.Path(path_type=Path),
    help="Resume a run from its directory: from the state that its services hold, or its newest checkpoint.",
)
@click.option(
    "--elsewhere",
    is_flag=True,
    help="With --resume: allow other meshes, engines and machines; results then differ by rounding.",
)
@click.option("--dry-run", is_flag=True, help="Check the config and print it, resolved; start nothing.")
@click.version_option(package_name="rlhf-cluster")
@click.pass_context
def main(
    context: click.Context,
    algo: str,
    config_path: Path | None,
    launch: bool,
    settings: tuple[str, ...],
    keep_weights: bool,
    take_over: bool,
    run_dir: Path | None,
    elsewhere: bool,
    dry_run: bool,
) -> None:
    """Run an algorithm of RLHF over role services.

    Without --config it builds the quickstart's model and data, launches those of the quickstart's services that the
    algorithm needs, and runs.
    """
    dump_on_signal()
    termination = Termination()
    termination.install()
    # A user's own algorithm may be in the working directory.
    sys.path.append(str(Path.cwd()))
    if context.invoked_subcommand:
        return
    if run_dir is not None:
        _check_alone(algo=algo, config=config_path, **{"continue": keep_weights, "dry-run": dry_run})
        done = resume(
            run_dir,
            settings=settings,
            launch=launch,
            take_over=take_over,
            elsewhere=elsewhere,
            owns_process=True,
            termination=termination,
        )
    else:
        algorithm, config = _given(algo, config_path, settings, elsewhere=elsewhere)
        launch |= config_path is None
        if dry_run:
            _show(algorithm, config, launch=launch, has_data=config_path is not None)
            return
        if config_path is None:
            build_quickstart(config)
        done = run(
            config,
            algorithm,
            launch=launch,
            keep_weights=keep_weights,
            take_over=take_over,
            owns_process=True,
            termination=termination,
        )
    if headline := _headline(done.summary):
        click.echo(headline)
    click.echo(f"report:            {done.directory / 'report.html'}")
    click.echo(f"run directory:     {done.directory}")


@main.command("evaluate")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file. Default: the config of the checkpoint's run.",
)
@click.option("--launch", is_flag=True, help="Start the services of the config, and stop them at the end.")
@click.option("--take-over", is_flag=True, help="End another run that uses the services.")
@set_option
def evaluate_command(
    directory: Path,
    config_path: Path | None,
    launch: bool,
    take_over: bool,
    settings: tuple[str, ...],
) -> None:
    """Measure a policy on the held-out rows.

    DIRECTORY is a checkpoint, RUN/checkpoints/step-N, or a model directory, which needs --config.
    """
    done = evaluate(
        directory,
        config_path=config_path,
        settings=settings,
        launch=launch,
        take_over=take_over,
    )
    for name, value in done.summary.items():
        click.echo(f"{name}: {value:.6g}")
    click.echo(f"run directory:     {done.directory}")


@main.command("export")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Directory of the model.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of the weights. Default: export_dtype of the service.",
)
@click.option(
    "--service", default="actor", show_default=True, metavar="NAME", help="Service whose model is exported."
)
@click.option("--launch", is_flag=True, help="Start the service, and stop it at the end.")
@click.option("--take-over", is_flag=True, help="End another run that uses the service.")
@set_option
def export_command(
    directory: Path,
    out: Path,
    dtype: str | None,
    service: str,
    launch: bool,
    take_over: bool,
    settings: tuple[str, ...],
) -> None:
    """Write a checkpoint as a Hugging Face directory.

    DIRECTORY is the checkpoint, RUN/checkpoints/step-N.
    """
    sha256 = export(
        directory,
        out,
        service=service,
        dtype=dtype or "",
        settings=settings,
        launch=launch,
        take_over=take_over,
        say=lambda line: click.echo(line, err=True),
    )
    click.echo(f"model: {out}\nsha256: {sha256}")


def _given(
    algo: str, config_path: Path | None, settings: tuple[str, ...], *, elsewhere: bool
) -> tuple[Algorithm, Config]:
    """Returns the algorithm and the configuration of a new run, from the options of these names.

    Raises:
        UsageError: --algo is missing, or --elsewhere is given.
        ConfigError: There is no such algorithm, or the configuration is invalid.
    """
    if not algo:
        known = ", ".join(algorithms.known_names())
        raise click.UsageError(f"Missing option '--algo': one of {known}, or module:function.")
    if elsewhere:
        raise click.UsageError("--elsewhere goes with --resume.")
    algorithm = algorithms.find_algorithm(algo)
    if config_path:
        return algorithm, load(config_path, settings)
    return algorithm, load_quickstart(algorithm.quickstart, settings)


def _check_alone(**given: object) -> None:
    """Raises ConfigError if an option is set that is not allowed with --resume."""
    wrong = [f"--{name}" for name, value in given.items() if value]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: not allowed with --resume; use --set to change a value")


def _show(algorithm: Algorithm, config: Config, *, launch: bool, has_data: bool) -> None:
    """Checks a configuration as a run would, and prints it with all defaults to stdout, and the services of the run to
    stderr, with the numbers of rows where `has_data`; else the data is not read, since a quickstart builds it and its
    model later. Warns of a model that this host does not have, of a service here that must already be running.

    Raises:
        ConfigError: The configuration, a model, the data, the environment or the function of a reward that would be
            started cannot be used; the same errors that `run` raises.
    """
    if has_data:
        plan = Plan.of(algorithm, config)
        config, (train, heldout) = plan.config, plan.data
        click.echo(f"data: {len(train)} train and {len(heldout)} held-out rows", err=True)
        if line := steps_of_epochs(config, len(train)):
            click.echo(line, err=True)
        for line in messages_without_end(config, plan.data, algorithm.columns):
            click.echo(f"warning: {line}", err=True)
    else:
        config = with_total_steps(algorithm.configure(config))
        check_models(config)
    environment_factory(config.rollout.environment)
    check_listening(config)
    missing = missing_models(config) if has_data else {}
    for name, table in config.services.items():
        ranks = counted(table.ranks, "rank")
        starts = launch and not table.external
        if name in missing and starts:
            raise ConfigError(missing[name])
        if starts:
            check_function(name, table)
        if name in missing and is_loopback(address_host(table.address)):
            click.echo(f"warning: {missing[name]}", err=True)
        start = "would be started" if starts else "must already be running"
        where = f", {ranks_line(config.device_order(name), table.ranks)}" if config.is_placed(name) else ""
        click.echo(f"services.{name}: {table.role}, {ranks} at {table.address}{where}, {start}", err=True)
    click.echo(tomli_w.dumps(algorithm.resolved(config)), nl=False)


def _headline(summary: Mapping[str, Any]) -> str:
    """Returns one line with the first held-out metric before and after training; empty where the summary has none."""
    name = next((key.removesuffix("_before") for key in summary if key.endswith("_before")), "")
    if not name:
        return ""
    before, after = summary[f"{name}_before"], summary[f"{name}_after"]
    text = percent_text if name == "accuracy" else figure_text
    shown, steps = {"reward": "mean reward"}.get(name, name), summary["steps"]
    return f"held-out {shown}: {text(before)} before, {text(after)} after {counted(steps, 'step')}"


if __name__ == "__main__":
    main()
