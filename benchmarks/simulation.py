"""Simulated runs beside a measured one, and their speed.

Runs the quickstart's PPO on real services, feeds the timeline of that run to the simulation (`rlhf-map simulate
--times`), and compares the time of each step. Then simulates 20 steps of PPO on three services of 1,024 ranks each and
a reward. Both figures of the first part are from one run, so that the speed of the machine is in both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from benchmarks import quickstart
from benchmarks.report import circumstances, console, json_option, write_json
from controller import job
from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.mapping.record import record_dataflow
from controller.simulation.durations import CallTimes, Durations, measured
from controller.simulation.run import Trace, simulate_run

ALGORITHM = "ppo"
RANKS, RANK_STEPS, MOST_S = 1024, 20, 120.0
MOST_DEVIATION = 0.1
CALL_S = 2.0
"""Seconds of each call on many ranks; how long the simulation takes does not depend on them."""
PROMPTS, RESPONSES = [(1024, 1.0)], [(256, 0.5), (1024, 0.5)]


@dataclass(frozen=True)
class Repeated:
    """One step, measured and simulated, in seconds."""

    step: int
    measured_s: float
    simulated_s: float

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.measured_s


@dataclass(frozen=True)
class ManyRanks:
    """The simulation of many ranks: its seconds of this host, in all and of CPU, the controller's CPU time of a step,
    and whether a second simulation of two steps gave the same trace."""

    steps: int
    wall_s: float
    cpu_s: float
    controller_s: float
    requests: int
    repeats: bool


def simulated(config: Config, durations: Durations, steps: int) -> Trace:
    algorithm = find_algorithm(ALGORITHM)
    return simulate_run(algorithm.configure(config), algorithm, durations, PROMPTS, RESPONSES, steps)


def repeat(steps: int) -> list[Repeated]:
    """Runs the quickstart, and returns its steps beside those that are simulated from its timeline."""
    with tempfile.TemporaryDirectory() as directory:
        config = quickstart.config(Path(directory), steps)
        done = job.run(config, ALGORITHM, launch=True)
        lines = {int(line["step"]): line["time/step_s"] for line in done.metrics if "time/step_s" in line}
        trace = simulated(config, measured(done.directory, list(config.services)), steps)
    return [
        Repeated(number, lines[number], metrics["time/step_s"])
        for number, metrics in enumerate(trace.metrics, start=1)
    ]


def many_ranks(steps: int) -> ManyRanks:
    ranks = [f"services.{name}.ranks={RANKS}" for name in ("actor", "critic", "reference")]
    sizes = (f"data.prompts_per_step={4 * RANKS}", f"algorithm.mini_batch_size={RANKS}")
    config = load(quickstart.CONFIG, (*sizes, *ranks))
    algorithm = find_algorithm(ALGORITHM)
    calls = record_dataflow(algorithm, algorithm.configure(config))
    durations = Durations(CallTimes({(call.service, call.method): [CALL_S] for call in calls}), spread=0.05)
    wall, cpu = time.perf_counter(), time.process_time()
    trace = simulated(config, durations, steps)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    once, again = (simulated(config, durations, 2) for _ in range(2))
    is_same = (once.calls, once.metrics) == (again.calls, again.metrics)
    return ManyRanks(steps, wall_s, cpu_s, trace.controller_s / steps, trace.requests, is_same)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=8, show_default=True, type=click.IntRange(2), help="Steps of the real run.")
@click.option(
    "--rank-steps", default=RANK_STEPS, show_default=True, type=click.IntRange(0), help="0: no many ranks."
)
@json_option
def main(steps: int, rank_steps: int, json_path: Path | None) -> None:
    """Compare the steps of a measured run with simulated ones, and time a simulation of many ranks."""
    before = circumstances()
    found = repeat(steps)
    table = Table("step", "measured s", "simulated s", "ratio", title=f"{ALGORITHM} of the quickstart")
    for each in found:
        table.add_row(
            str(each.step), f"{each.measured_s:.3f}", f"{each.simulated_s:.3f}", f"{each.ratio:.3f}"
        )
    console().print(f"CPU: {before['cpu']}, {before['cores']} cores")
    console().print(table)
    ratio = statistics.median(each.simulated_s for each in found) / statistics.median(
        each.measured_s for each in found
    )
    console().print(f"median step: {ratio:.3f} of the measured one (within {MOST_DEVIATION:.0%})")
    ranks = many_ranks(rank_steps) if rank_steps else None
    if ranks:
        console().print(
            f"{ranks.steps} steps of {RANKS} ranks a service: {ranks.wall_s:.0f} s, {ranks.cpu_s:.0f} s of CPU "
            f"(at most {MOST_S:.0f} s); controller {ranks.controller_s:.2f} s a step, {ranks.requests:,} requests; the "
            f"same seed {'gives the same trace' if ranks.repeats else 'gave ANOTHER trace'}"
        )
    figures = {
        "steps": [{**asdict(each), "ratio": each.ratio} for each in found],
        "median_ratio": ratio,
        "many_ranks": asdict(ranks) if ranks else None,
    }
    write_json(json_path, {"before": before, "after": circumstances(), **figures})


if __name__ == "__main__":
    main()
