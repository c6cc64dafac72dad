"""Stage times that `rlhf-map probe` predicts beside measured ones.

Calibrates the constants of a CPU on the running quickstart (PPO, colocated: an actor of two ranks with engine fsdp, a
critic and a reference of one), and predicts with them the stages of steps with half and twice as many rows, and of
actors on other meshes. Then measures these, in the steps of runs but their first, from their timelines. All services
are up; probe and runs take turns. Of all repetitions the least counts, of the probe's calls and of the measured stages
alike: other work on the machine only adds to them. Nothing is fitted to the measured stages.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import tomli_w
from rich.table import Table

from benchmarks import quickstart
from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller import job
from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.launch import LaunchedServices
from controller.mapping.calibrate import calibrate
from controller.mapping.configured import described_plan, models_of
from controller.mapping.dataflow import STAGES, Call
from controller.mapping.devices import DeviceGroup, device_group
from controller.mapping.probe import Probed, probe_lines, probe_services, probe_table
from controller.mapping.problem import Problem
from controller.mapping.record import record_dataflow
from controller.mapping.workload import workload_of
from controller.simulation.durations import timed_calls
from settings.strict import override, read_toml

ALGORITHM = find_algorithm("ppo")
ACTORS = {"actor": {}, "actor_3d": {"engine": "3d", "mesh": "1-2-1"}, "actor_alone": {"ranks": 1}}
"""Actors that are up, by name, with their differences from the quickstart's."""
CASES: dict[str, tuple[str, int]] = {
    "as probed: 512 rows, actor fsdp on 2 ranks": ("actor", 512),
    "256 rows": ("actor", 256),
    "1,024 rows": ("actor", 1024),
    "actor 3d 1-2-1": ("actor_3d", 512),
    "actor on 1 rank": ("actor_alone", 512),
}
"""Actor and rows of each case."""
MOST_DEVIATION = 0.3


@dataclass(frozen=True)
class Stage:
    """A stage of a step, in seconds: the least and the median that were measured, and the prediction."""

    case: str
    stage: str
    measured_s: float
    median_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


def predicted(config: Config, group: DeviceGroup, probed: Probed) -> list[float]:
    """Seconds of each stage by the model of costs, with rows of the lengths that the probe has seen."""
    config = ALGORITHM.configure(config)
    models = models_of(config, record_dataflow(ALGORITHM, config)).models
    seen = next(call for call in probed.calls if call.name == "actor.compute_log_prob").workload
    workload = workload_of(config, seen.prompts, seen.responses)
    return list(described_plan(config, Problem(models, workload, (group,)), group).stages)


def measured(config: Config) -> list[list[float]]:
    """Seconds of each stage in each step of a run but the first: the sum over its calls, which take turns."""
    done = job.run(config, ALGORITHM)
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * len(STAGES))
    updated: set[int] = set()
    for call in timed_calls(done.directory):
        kind = Call(call.service, call.method, 0)
        # The evaluation after the last step has its number.
        is_evaluation = kind.kind != "training" and call.step in updated
        if call.step > 1 and not is_evaluation:
            sums[call.step][kind.stage] += call.end - call.start
        if kind.kind == "training":
            updated.add(call.step)
    return list(sums.values())


def pooled(rounds: Sequence[Probed]) -> Probed:
    """The calls of several probes, each with the least of its seconds, and the constants fitted to them."""
    calls = [
        min(each, key=lambda call: call.seconds)
        for each in zip(*(probed.calls for probed in rounds), strict=True)
    ]
    first = rounds[0]
    return Probed(first.group, calls, calibrate(first.group, calls), first.source)


def started(directory: Path, steps: int) -> tuple[Path, Config]:
    """The quickstart with all actors, and the path of its config."""
    tables = override(read_toml(quickstart.CONFIG), quickstart.settings(directory, steps))
    actor = tables["services"]["actor"]
    for name, more in ACTORS.items():
        tables["services"][name] = {**actor, "address": f"127.0.0.1:{free_port()}", **more}
    path = directory / "services.toml"
    path.write_text(tomli_w.dumps(tables))
    return path, load(path)


def chosen(config: Config, actor: str, rows: int) -> Config:
    """The config of a run with one of the actors."""
    services = {name: table for name, table in config.services.items() if name not in ACTORS}
    data = config.data.model_copy(update={"prompts_per_step": rows})
    update = {"services": {"actor": config.services[actor], **services}, "data": data}
    return config.model_copy(update={"placement": "colocate", **update})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1), help="Turns of each.")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(2), help="Steps of each run.")
@click.option("--table", type=click.Path(path_type=Path), help="Also write the calibrated table here.")
@json_option
def main(rounds: int, steps: int, table: Path | None, json_path: Path | None) -> None:
    """Calibrate a CPU on the quickstart, and compare predicted with measured stages of other steps."""
    before = circumstances()
    group = device_group("CPU:2")
    probes: list[Probed] = []
    seconds: dict[str, list[list[float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as name:
        path, config = started(Path(name), steps)
        with LaunchedServices(config, path, Path(name) / "logs"):
            for _ in range(rounds):
                probes.append(probe_services(chosen(config, "actor", 512), ALGORITHM, group))
                for case, choice in CASES.items():
                    seconds[case] += measured(chosen(config, *choice))
        probed = pooled(probes)
        found = []
        for case, choice in CASES.items():
            expected = predicted(chosen(config, *choice), probed.calibrated, probed)
            least = [min(times) for times in zip(*seconds[case], strict=True)]
            usual = [statistics.median(times) for times in zip(*seconds[case], strict=True)]
            stages = [Stage(case, *each) for each in zip(STAGES, least, usual, expected, strict=True)]
            # No service of the quickstart receives weights.
            found += [stage for stage in stages if stage.measured_s]
    shown = Table(
        "case", "stage", "measured s", "median", "predicted s", "ratio", title="PPO of the quickstart"
    )
    for each in found:
        figures = (each.measured_s, each.median_s, each.predicted_s)
        texts = (*(f"{figure:.3f}" for figure in figures), f"{each.ratio:.2f}")
        shown.add_row(each.case if each.stage == STAGES[0] else "", each.stage, *texts)
    console().print(f"CPU: {before['cpu']}, {before['cores']} cores")
    console().print(probe_table(probed))
    for line in probe_lines(probed):
        console().print(line)
    console().print(shown)
    others = [each for each in found if each.case != next(iter(CASES))]
    worst = max(others, key=lambda each: abs(each.ratio - 1))
    console().print(
        f"worst: {worst.ratio:.2f}, {worst.stage} of {worst.case} (within {MOST_DEVIATION:.0%}); "
        f"{sum(abs(each.ratio - 1) <= MOST_DEVIATION for each in others)} of {len(others)} are"
    )
    if table is not None:
        table.write_text(probed.text)
    calls = [
        {"call": call.name, "measured_s": call.seconds, "fitted_s": call.predicted_s(probed.calibrated)}
        for call in probed.calls
    ]
    figures = {
        "table": probed.calibration.table.model_dump(),
        "fitted": probed.calibration.fitted,
        "calls": calls,
        "stages": [{**asdict(each), "ratio": each.ratio} for each in found],
    }
    write_json(json_path, {"before": before, "after": circumstances(), **figures})


if __name__ == "__main__":
    main()
