"""The plan that `rlhf-map` finds for two CPU devices, run as written, beside the placements colocate and standalone.

The services of the plan, and the quickstart's own, which both placements use, are all up, and short runs of PPO take
turns on them. Times of steps but the first of each run count. The plan is found with a table of constants: `--table`,
or one that `rlhf-map probe` measures first.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomli_w
from rich.table import Table

from benchmarks import quickstart
from benchmarks.report import circumstances, console, json_option, write_json
from controller import job
from controller.algorithms import find_algorithm
from controller.config.config import load
from controller.launch import LaunchedServices
from controller.mapping.configured import models_of, placeable
from controller.mapping.devices import DeviceGroup, device_group, read_devices
from controller.mapping.mapper import find_plan, named_plans
from controller.mapping.output import planned_config
from controller.mapping.probe import probe_services
from controller.mapping.problem import Problem
from controller.mapping.record import record_dataflow
from controller.mapping.report import placements_table, plan_table
from controller.mapping.workload import LengthShares, workload_of
from settings.strict import override, read_toml

ALGORITHM = find_algorithm("ppo")
DEVICES = "CPU:2"
PLACEMENTS = ("colocate", "standalone")
PROMPTS, RESPONSES = "4:1,5:4,6:4", "3:3,4:5"
"""Lengths of the quickstart's rows: two operands, + and =; up to three digits and the end."""
WITHIN = 0.05


@dataclass(frozen=True)
class Way:
    """A placement, and the seconds of its steps."""

    name: str
    config: Path
    seconds: list[float]


def calibrated(directory: Path, table: Path | None) -> DeviceGroup:
    """The devices, with the constants of a table, or of a probe of the quickstart."""
    if table is not None:
        return device_group(DEVICES, more=read_devices(table))
    config = quickstart.config(directory, 1, "placement='colocate'")
    return probe_services(config, ALGORITHM, device_group(DEVICES), launch=True).calibrated


def planned(path: Path, settings: tuple[str, ...], group: DeviceGroup) -> Path:
    """Finds a plan for the quickstart with settings, shows it, and writes its config to a path."""
    config = ALGORITHM.configure(load(quickstart.CONFIG, settings))
    models = models_of(config, record_dataflow(ALGORITHM, config)).models
    workload = workload_of(config, LengthShares.parse(PROMPTS), LengthShares.parse(RESPONSES))
    problem = Problem(tuple(map(placeable, models)), workload, (group,))
    plan = find_plan(problem)
    if plan is None:
        raise click.ClickException(f"no plan fits {DEVICES}")
    console().print(plan_table(problem, plan))
    console().print(placements_table(problem, {"found": plan, **named_plans(problem)}))
    tables = override(read_toml(quickstart.CONFIG), settings)
    path.write_text(tomli_w.dumps(planned_config(tables, problem, plan)[0]))
    return path


def placed(path: Path, placement: str, settings: tuple[str, ...]) -> Path:
    """Writes the quickstart's config under a placement to a path."""
    tables: Mapping[str, Any] = override(read_toml(quickstart.CONFIG), settings)
    path.write_text(tomli_w.dumps({"placement": placement, **tables}))
    return path


def take_turns(ways: list[Way], rounds: int, logs: Path) -> None:
    """Starts the services of the first two ways, whose second has those of the third too, and lets runs take turns."""
    with contextlib.ExitStack() as started:
        for way in ways[:2]:
            started.enter_context(LaunchedServices(load(way.config), way.config, logs / way.name))
        for _ in range(rounds):
            for way in ways:
                done = job.run(load(way.config), ALGORITHM)
                way.seconds.extend(line["time/step_s"] for line in done.metrics[2:])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="Runs of each placement."
)
@click.option("--steps", default=4, show_default=True, type=click.IntRange(2), help="Steps of a run.")
@click.option("--table", type=click.Path(path_type=Path), help="Constants of the CPU. Default: probe it.")
@json_option
def main(rounds: int, steps: int, table: Path | None, json_path: Path | None) -> None:
    """Time the plan found for two CPU devices beside colocate and standalone."""
    before = circumstances()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def settings() -> tuple[str, ...]:
            return quickstart.settings(directory, steps)

        group = calibrated(directory, table)
        ways = [Way("found", planned(directory / "plan.toml", settings(), group), [])]
        shared = settings()
        for placement in PLACEMENTS:
            ways.append(Way(placement, placed(directory / f"{placement}.toml", placement, shared), []))
        text = ways[0].config.read_text()
        take_turns(ways, rounds, directory / "logs")
    shown = Table("placement", "step s", "least", "most", "found beside it", title="PPO of the quickstart")
    medians = {way.name: statistics.median(way.seconds) for way in ways}
    for way in ways:
        figures = (medians[way.name], min(way.seconds), max(way.seconds))
        shown.add_row(way.name, *(f"{each:.3f}" for each in figures), f"{medians['found'] / figures[0]:.2f}")
    console().print(f"CPU: {before['cpu']}, {before['cores']} cores")
    console().print(shown)
    ratio = medians["found"] / min(medians[placement] for placement in PLACEMENTS)
    console().print(f"found: {ratio:.2f} of the faster of the others (at most {1 + WITHIN:.2f})")
    figures = {"seconds": {way.name: way.seconds for way in ways}, "ratio": ratio, "plan": text}
    write_json(
        json_path,
        {"before": before, "after": circumstances(), "table": group.table.model_dump(), **figures},
    )


if __name__ == "__main__":
    main()
