"""Held-out accuracy of the quickstart with rows of older weights: one step at a time, `run.ahead = 1`, and partial
rollouts with a bound of 2.

PPO runs from the same start with several seeds for each way, in turns. The anchor is the mean of one step at a time:
the others are to be within 3 points of it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller import job
from controller.config.config import Config, load

QUICKSTART = Path(__file__).parent.parent / "deploy" / "quickstart" / "quickstart.toml"
ALGORITHM = "ppo"
WAYS = {
    "one step at a time": (),
    "run.ahead = 1": ("run.ahead=1",),
    "run.ahead = 2, rollout.segments = 2": ("run.ahead=2", "rollout.segments=2"),
}
MOST_POINTS = 3.0
MATMUL = "mkl"
"""Library of matrix products: "auto" measures, and may choose another one for a run beside other work."""


@dataclass(frozen=True)
class Trained:
    """One run.

    Attributes:
        before, after: Accuracy on the held-out rows, between 0 and 1.
        staleness_mean: Mean over steps of the mean staleness of the rows of a step, in policy versions.
        staleness_max: Largest staleness of a row, in policy versions.
        step_s: Median time of a step, in seconds.
        seconds: Time of the run, start and stop of the services included.
    """

    way: str
    seed: int
    before: float
    after: float
    staleness_mean: float
    staleness_max: float
    step_s: float
    seconds: float


def config(way: str, seed: int, steps: int | None, directory: Path) -> Config:
    """The quickstart at free ports; its model and data are built where they are missing."""
    plain = load(QUICKSTART)
    build = [sys.executable, "-m", "deploy.quickstart.build", "--out", str(plain.data.train.parent)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    settings = [
        f"run.seed={seed}",
        f"run.directory='{directory}'",
        f"run.steps={steps or plain.run.steps}",
        "run.samples=0",
        *(f"services.{name}.address='127.0.0.1:{free_port()}'" for name in plain.services),
        *(
            f"services.{name}.matmul='{MATMUL}'"
            for name, table in plain.services.items()
            if table.role != "reward"
        ),
        *WAYS[way],
    ]
    return load(QUICKSTART, tuple(settings))


def train(way: str, seed: int, steps: int | None) -> Trained:
    with tempfile.TemporaryDirectory() as directory:
        chosen = config(way, seed, steps, Path(directory))
        started = time.monotonic()
        done = job.run(chosen, ALGORITHM, launch=True)
        seconds = time.monotonic() - started
        lines, summary = done.metrics, done.summary
    updates = [line for line in lines if "time/update_actor_s" in line]
    return Trained(
        way,
        seed,
        summary["accuracy_before"],
        summary["accuracy_after"],
        statistics.mean(line.get("staleness/mean", 0.0) for line in updates),
        max(line.get("staleness/max", 0.0) for line in updates),
        statistics.median(line["time/step_s"] for line in updates),
        seconds,
    )


def table_of(runs: list[Trained]) -> Table:
    """Means over seeds; in brackets the smallest and the largest."""
    table = Table(title="Held-out accuracy of the quickstart, means over seeds")
    for name in ("way", "seeds", "before", "after", "points from the first", "staleness", "most", "step s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    by_way = {way: [run for run in runs if run.way == way] for way in WAYS}
    anchor = statistics.mean(run.after for run in by_way[next(iter(WAYS))])
    for way, own in by_way.items():
        after = [run.after for run in own]
        table.add_row(
            way,
            str(len(own)),
            f"{statistics.mean(run.before for run in own):.1%}",
            f"{statistics.mean(after):.1%} [{min(after):.1%}-{max(after):.1%}]",
            f"{100 * (statistics.mean(after) - anchor):+.1f}",
            f"{statistics.mean(run.staleness_mean for run in own):.2f}",
            f"{max(run.staleness_max for run in own):g}",
            f"{statistics.median(run.step_s for run in own):.2f}",
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Seeds, from 0 on.")
@click.option("--steps", type=click.IntRange(1), help="Steps of a run. Default: those of the quickstart.")
@json_option
def main(seeds: int, steps: int | None, json_path: Path | None) -> None:
    """Train the quickstart with rows of weights of different age, and compare what it learns."""
    before = circumstances()
    runs = [train(way, seed, steps) for seed in range(seeds) for way in WAYS]
    console().print(f"CPU: {before['cpu']}, {before['cores']} cores")
    console().print(table_of(runs))
    console().print(f"aim: within {MOST_POINTS:g} points of one step at a time")
    write_json(json_path, {"before": before, "after": circumstances(), "runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    main()
