"""rlhf-map: finds the fastest placement of the models of a config on given devices, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import click
import tomli_w
from rich.console import Console

from controller import algorithms
from controller.config.config import Config, load, with_settings
from controller.mapping.configured import (
    ConfiguredModels,
    described_calls,
    described_plan,
    models_of,
    placeable,
)
from controller.mapping.devices import DeviceGroup, built_in_devices, device_group, read_devices
from controller.mapping.explain import comparison, misfits, why_nothing_fits
from controller.mapping.mapper import find_plan, named_plans
from controller.mapping.output import planned_config
from controller.mapping.probe import probe_lines, probe_services, probe_table
from controller.mapping.problem import Problem
from controller.mapping.record import record_dataflow
from controller.mapping.report import placements_table, plan_table, summary, timeline_page
from controller.mapping.workload import LengthShares, Workload, workload_of
from controller.simulation.durations import CallTimes, Durations, measured
from controller.simulation.report import steps_table, timeline_lines
from controller.simulation.report import summary as simulation_summary
from controller.simulation.run import simulate_run
from rlhf.errors import ConfigError
from settings.commands import Commands, set_option, write_file
from settings.strict import read_toml

NOTHING_FITS = 1


@dataclass(frozen=True)
class MappingRequest:
    """Config and mapping problem that a command was given.

    Attributes:
        config: The config.
        configured: Its models, in the layouts that it describes.
        problem: The problem. Its models use the engines for which the search chooses meshes.
    """

    config: Config
    configured: ConfiguredModels
    problem: Problem


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_CONFIGURED: tuple[Decorator, ...] = (
    click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path)),
    click.option(
        "--algo", default="ppo", show_default=True, metavar="NAME", help="Algorithm, as for rlhf-controller."
    ),
    click.option(
        "--per-machine",
        default=8,
        show_default=True,
        type=click.IntRange(1),
        metavar="N",
        help="Devices per machine.",
    ),
    click.option(
        "--table", type=click.Path(path_type=Path), metavar="FILE", help="TOML file with further devices."
    ),
    set_option,
)
_COMMON: tuple[Decorator, ...] = (
    *_CONFIGURED,
    click.option(
        "--prompts",
        metavar="LENGTHS",
        help="Tokens per prompt: N, or N:WEIGHT,N:WEIGHT. Default: data.max_prompt_tokens.",
    ),
    click.option(
        "--responses",
        metavar="LENGTHS",
        help="Tokens per response, in the same form. Default: rollout.max_response_tokens.",
    ),
)
_SEARCHED: tuple[Decorator, ...] = (
    *_COMMON,
    click.option(
        "--devices", "kinds", multiple=True, required=True, metavar="KIND:COUNT",
        help="Devices, such as A100-80GB:16; repeatable for further kinds.",
    ),
    click.option(
        "--ahead", default=0, show_default=True, type=click.IntRange(0), metavar="N",
        help="Number of steps that generation may run ahead of updates.",
    ),
)  # fmt: skip


def _options(*options: Decorator) -> Decorator:
    """Returns a decorator that adds options to a command, in order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-cluster")
def main() -> None:
    """Find the fastest placement of the models of a config: which of them share devices, how many devices each has, and
    its mesh. Computes on one core, and starts nothing."""
    # A user's own algorithm may be in the working directory.
    sys.path.append(str(Path.cwd()))


@main.command()
@_options(*_SEARCHED)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the config with the plan here.",
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a picture of one step here (HTML).",
)
def find(output: Path | None, timeline: Path | None, **given: Any) -> None:
    """Find the fastest plan for the services of CONFIG.

    Chooses pools and meshes for its rows and algorithm.
    """
    request = _request(**given)
    problem = request.problem
    plan = find_plan(problem)
    if plan is None:
        raise _DoesNotFit(why_nothing_fits(problem))
    console = _console()
    console.print(plan_table(problem, plan))
    click.echo(summary(problem, plan))
    for name, why in request.configured.left_out.items():
        click.echo(f"{name} is not placed: {why}")
    others = {"found": plan, **named_plans(problem)}
    console.print(placements_table(problem, others))
    if output is not None:
        tables = with_settings(read_toml(given["config_path"]), given["settings"])
        _write(output, tomli_w.dumps(planned_config(tables, problem, plan)[0]))
    if timeline is not None:
        _write(timeline, timeline_page(problem, plan))


@main.command()
@_options(*_SEARCHED)
def explain(**given: Any) -> None:
    """Say why the plan of CONFIG is slower than the fastest one.

    Or what of it does not fit. All services are on devices of the first kind.
    """
    request = _request(**given)
    problem = request.problem
    described = replace(problem, models=request.configured.models)
    plan = described_plan(request.config, described, problem.devices[0])
    _console().print(plan_table(described, plan))
    click.echo(summary(problem, plan))
    best = find_plan(problem)
    lacking = misfits(described, plan)
    for line in lacking:
        click.echo(f"does not fit: {line}")
    if best is None:
        raise _DoesNotFit(why_nothing_fits(problem))
    for line in comparison(described, plan, best):
        click.echo(line)
    if lacking:
        raise _DoesNotFit(["the plan does not fit; rlhf-map find has one that does"])


@main.command()
@_options(*_COMMON)
@click.option(
    "--devices", "kind", metavar="KIND:COUNT", help="Devices whose cost model gives the durations of calls."
)
@click.option(
    "--times",
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="Take durations from this run's timeline.",
)
@click.option(
    "--steps", default=5, show_default=True, type=click.IntRange(1), metavar="N", help="Steps to simulate."
)
@click.option(
    "--show",
    default=2,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="Last steps of the timeline to print.",
)
@click.option(
    "--spread", default=0.0, show_default=True, type=click.FloatRange(0, 3), metavar="N",
    help="Stragglers: standard deviation of the logarithm of a rank's duration.",
)  # fmt: skip
def simulate(
    kind: str | None, times: Path | None, steps: int, show: int, spread: float, **given: Any
) -> None:
    """Run the real controller on simulated ranks, in virtual time.

    Services are placed as CONFIG says. Prints the timeline of the last steps. The seed is run.seed; overlap is as
    run.ahead says.
    """
    if (kind is None) == (times is None):
        raise ConfigError("give either --devices KIND:COUNT or --times RUN_DIR")
    algorithm = algorithms.find_algorithm(given["algo"])
    config = algorithm.configure(load(given["config_path"], given["settings"]))
    workload = _workload(config, given["prompts"], given["responses"])
    if times is not None:
        durations = measured(times, [*config.services, *config.also_served])
    else:
        more = read_devices(given["table"]) if given["table"] else {}
        group = device_group(kind or "", given["per_machine"], more)
        models = models_of(config, record_dataflow(algorithm, config)).models
        described = described_calls(config, Problem(models, workload, (group,)), group)
        durations = Durations(CallTimes(described))
    durations = replace(durations, spread=spread, seed=config.run.seed)
    trace = simulate_run(
        config, algorithm, durations, workload.prompts.shares, workload.responses.shares, steps
    )
    for line in timeline_lines(trace, show):
        click.echo(line)
    _console().print(steps_table(trace))
    click.echo(simulation_summary(trace))


@main.command()
@_options(*_CONFIGURED)
@click.option(
    "--devices", "kind", required=True, metavar="KIND:COUNT", help="Devices that the services run on."
)
@click.option("--launch", is_flag=True, help="Start the services of the config, and stop them at the end.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the calibrated table here."
)
def probe(kind: str, launch: bool, output: Path | None, **given: Any) -> None:
    """Time calls of running services, and fit device constants.

    The services are those of CONFIG, and the constants those of their devices. Begins a session of its own: refused
    while a run is using the services.
    """
    algorithm = algorithms.find_algorithm(given["algo"])
    config = load(given["config_path"], given["settings"])
    more = read_devices(given["table"]) if given["table"] else {}
    group = device_group(kind, given["per_machine"], more)
    probed = probe_services(config, algorithm, group, launch=launch)
    _console().print(probe_table(probed))
    for line in probe_lines(probed):
        click.echo(line)
    if output is not None:
        _write(output, probed.text)


@main.command()
@click.option(
    "--table", type=click.Path(path_type=Path), metavar="FILE", help="TOML file with further devices."
)
def devices(table: Path | None) -> None:
    """List the known devices and their rates."""
    for name, each in {**built_in_devices(), **(read_devices(table) if table else {})}.items():
        rates = each.model_dump(exclude={"tflops"})
        peak = ", ".join(f"{rate:g} TFLOPS {dtype}" for dtype, rate in each.tflops.items())
        click.echo(f"{name}: {peak}, " + ", ".join(f"{key} {value:g}" for key, value in rates.items()))


def _request(
    config_path: Path,
    algo: str,
    kinds: tuple[str, ...],
    per_machine: int,
    table: Path | None,
    prompts: str | None,
    responses: str | None,
    ahead: int,
    settings: tuple[str, ...],
) -> MappingRequest:
    algorithm = algorithms.find_algorithm(algo)
    config = algorithm.configure(load(config_path, settings))
    more = read_devices(table) if table else {}
    groups: list[DeviceGroup] = [device_group(text, per_machine, more) for text in kinds]
    if len({group.name for group in groups}) < len(groups):
        raise ConfigError("--devices: give each kind once")
    workload = _workload(config, prompts, responses)
    configured = models_of(config, record_dataflow(algorithm, config))
    models = tuple(placeable(model) for model in configured.models)
    return MappingRequest(config, configured, Problem(models, workload, tuple(groups), ahead))


def _workload(config: Config, prompts: str | None, responses: str | None) -> Workload:
    return workload_of(
        config,
        _lengths("--prompts", prompts),
        _lengths("--responses", responses),
    )


def _lengths(option: str, text: str | None) -> LengthShares | None:
    try:
        return LengthShares.parse(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _console() -> Console:
    is_terminal = sys.stdout.isatty()
    # Names of services and devices are shown as they are, also those that rich would read as markup.
    return Console(width=None if is_terminal else 200, soft_wrap=not is_terminal, markup=False, emoji=False)


def _write(path: Path, text: str) -> None:
    write_file(path, text)
    click.echo(f"written: {path}")


class _DoesNotFit(click.ClickException):
    """Nothing fits; ends the command with `NOTHING_FITS`, and a line for each reason.

    Args:
        reasons: The lines.
    """

    exit_code = NOTHING_FITS

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(reasons))
        self._reasons = reasons

    def show(self, file: IO[Any] | None = None) -> None:
        for reason in self._reasons:
            click.echo(f"error: {reason}", file, err=file is None)
