"""Stage times that `rlhf-map probe` predicts beside measured ones.

Calibrates the constants of a CPU on the running quickstart (PPO, colocated: an actor of two ranks with engine fsdp, a
critic and a reference of one), and predicts with them the stages of steps with half and twice as many rows, and of an
actor on another mesh. Then measures these: medians of steps after the first, from the timeline of a run. Nothing is
fitted to the measured stages.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from benchmarks import quickstart
from benchmarks.report import circumstances, console, json_option, write_json
from controller import job
from controller.algorithms import find_algorithm
from controller.config.config import Config
from controller.mapping.configured import described_plan, models_of
from controller.mapping.dataflow import STAGES, Call
from controller.mapping.devices import DeviceGroup, device_group
from controller.mapping.probe import Probed, probe_lines, probe_services, probe_table
from controller.mapping.problem import Problem
from controller.mapping.record import record_dataflow
from controller.mapping.workload import workload_of
from controller.simulation.durations import timed_calls

ALGORITHM = find_algorithm("ppo")
COLOCATED = "placement='colocate'"
CASES: dict[str, tuple[str, ...]] = {
    "as probed: 512 rows, actor fsdp on 2 ranks": (),
    "256 rows": ("data.prompts_per_step=256",),
    "1,024 rows": ("data.prompts_per_step=1024",),
    "actor 3d 1-2-1": ("services.actor.engine='3d'", "services.actor.mesh='1-2-1'"),
    "actor on 1 rank": ("services.actor.ranks=1",),
}
MOST_DEVIATION = 0.3


@dataclass(frozen=True)
class Stage:
    """A stage of a step, in seconds."""

    case: str
    stage: str
    measured_s: float
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


def measured(config: Config) -> list[float]:
    """Seconds of each stage in the median of the steps of a run but the first: the sum over its calls, which take
    turns."""
    done = job.run(config, ALGORITHM, launch=True)
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * len(STAGES))
    steps = config.run.steps
    generated: set[int] = set()
    for call in timed_calls(done.directory):
        kind = Call(call.service, call.method, 0)
        # The evaluation after the last step is in its timeline too.
        is_evaluation = kind.kind != "training" and call.step == steps and call.step in generated
        if call.step > 1 and not is_evaluation:
            sums[call.step][kind.stage] += call.end - call.start
        if kind.kind == "training":
            generated.add(call.step)
    return [statistics.median(each[stage] for each in sums.values()) for stage in range(len(STAGES))]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=6, show_default=True, type=click.IntRange(3), help="Steps of each run.")
@click.option("--table", type=click.Path(path_type=Path), help="Also write the calibrated table here.")
@json_option
def main(steps: int, table: Path | None, json_path: Path | None) -> None:
    """Calibrate a CPU on the quickstart, and compare predicted with measured stages of other steps."""
    before = circumstances()
    group = device_group("CPU:2")
    found = []
    with tempfile.TemporaryDirectory() as name:

        def config(*more: str) -> Config:
            return quickstart.config(Path(name), steps, COLOCATED, *more)

        probed = probe_services(config(), ALGORITHM, group, launch=True)
        for case, more in CASES.items():
            times = predicted(config(*more), probed.calibrated, probed), measured(config(*more))
            found += [Stage(case, *each) for each in zip(STAGES, times[1], times[0], strict=True)]
    shown = Table("case", "stage", "measured s", "predicted s", "ratio", title="PPO of the quickstart")
    for each in found:
        figures = f"{each.measured_s:.3f}", f"{each.predicted_s:.3f}", f"{each.ratio:.2f}"
        shown.add_row(each.case if each.stage == STAGES[0] else "", each.stage, *figures)
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
