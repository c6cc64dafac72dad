"""The cluster in `benchmarks.end_to_end`: a run of an algorithm on services of its own, with all that `rlhf-controller`
does, iterating when it has its turn."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.end_to_end_task import Stopwatch, mean_of
from benchmarks.turns import Turns
from client.session import Session
from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.data.prompts import PromptData
from controller.launch import LaunchedServices
from controller.role_groups.cluster import Cluster
from controller.tracking.progress import Progress
from controller.tracking.recorder import Recorder
from controller.tracking.run_directory import RunDirectory
from controller.training.run import Run
from controller.training.step import Step


class TimedRun(Run):
    """A run that iterates in turns with other systems."""

    def __init__(self, *arguments: Any, turns: Turns, warm_up: int, iterations: int) -> None:
        super().__init__(*arguments)
        self._stages: list[dict[str, float]] = []
        self._stopwatch = Stopwatch(turns, warm_up, iterations, self._mean_stages)

    def steps(self, *arguments: Any) -> Iterator[Step]:
        for step in super().steps(*arguments):
            if step.number > 1:
                self._stopwatch.lap()
            yield step
            self._stages.append(stages(step))

    def _mean_stages(self) -> dict[str, float]:
        measured, self._stages = self._stages, []
        return mean_of(measured)


def stages(step: Step) -> dict[str, float]:
    """Seconds that the slowest rank computed in each call of a step, by method."""
    return {
        record.method: max(response.outcome.timing.compute_s for response in record.responses)
        for record in step.records
    }


def iterate(name: str, path: Path, turns: Turns, warm_up: int, iterations: int) -> None:
    """Starts the services of a configuration and runs the algorithm on them."""
    algorithm = find_algorithm(name)
    config = algorithm.configure(load(path))
    data = (
        PromptData.load(config.data.train, "data.train"),
        PromptData.load(config.data.heldout, "data.heldout"),
    )
    directory = RunDirectory.create(config.run.directory, config.run.name)
    progress = Progress(Console(file=io.StringIO()))
    with (
        LaunchedServices(config, path, directory.path / "logs"),
        contextlib.closing(_connect(config)) as cluster,
    ):
        progress.begin(config.run.steps)
        with (
            Recorder(directory, progress) as recorder,
            recorder.following(cluster.running, cluster.memory),
            contextlib.closing(
                TimedRun(config, data, cluster, recorder, turns=turns, warm_up=warm_up, iterations=iterations)
            ) as run,
        ):
            algorithm(run)


def _connect(config: Config) -> Cluster:
    run = config.run
    cluster = Cluster(config, Session(seed=run.seed, timeout_s=run.call_timeout_s, balance=run.balance))
    cluster.connect()
    return cluster


@click.command()
@click.option("--algorithm", required=True)
@click.option("--config", "path", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--warm-up", type=int, required=True)
@click.option("--iterations", type=int, required=True)
def main(algorithm: str, path: Path, warm_up: int, iterations: int) -> None:
    """Iterate on request, and report the time."""
    iterate(algorithm, path, Turns(), warm_up, iterations)


if __name__ == "__main__":
    main()
