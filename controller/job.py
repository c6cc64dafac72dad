"""One run from its configuration, or from where it was interrupted, to its summary. For the command line, for scripts
and for notebooks alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.algorithms import AnyAlgorithm, as_algorithm
from controller.checkpoints.termination import Termination
from controller.config.config import AnyConfig, as_config
from controller.opening import open_planned
from controller.plan import Plan
from controller.restarts import Restarts, how_to_resume
from controller.role_groups.cluster import spare_garbage_collector
from controller.tracking.metrics import read_metrics
from controller.tracking.progress import Progress
from controller.training.algorithm import Algorithm, UnreadOptions
from controller.training.run import Run
from rlhf.errors import RlhfError
from rlhf.file_limit import raise_file_limit


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended well.

    Attributes:
        directory: Path of the run directory; docs/runs.md lists its files.
        summary: Figures of the run by name, those of `summary.json` without the run's identity.
    """

    directory: Path
    summary: Mapping[str, Any]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each step by name, read from `metrics.jsonl`; the first are those of the evaluation before
        training, step 0."""
        return read_metrics(self.directory)


def run(
    config: AnyConfig,
    algorithm: AnyAlgorithm,
    *,
    launch: bool = False,
    keep_weights: bool = False,
    take_over: bool = False,
    owns_process: bool = False,
    termination: Termination | None = None,
) -> FinishedRun:
    """Executes a run and returns it when it has ended. Services that it launched are stopped in any case.

    Args:
        config: Configuration of the run: a `Config`, the tables of one by name, or the path of a TOML file.
        algorithm: Name of the algorithm, an `Algorithm`, or a function that takes a `Run`.
        launch: Whether to start the services, and stop them at the end. False: they must be running.
        keep_weights: Whether to continue from the weights that the services have; see `Cluster.connect`.
        take_over: Whether to end another run that holds the services.
        owns_process: Whether the process exists for this run alone, so that its garbage collector may be changed;
            see `spare_garbage_collector`.
        termination: Handlers of SIGTERM of this process, which ask for a checkpoint. Default: there are none.

    Raises:
        RlhfError: The run failed; the text is one line that names service, rank and cause.
    """
    plan = Plan.of(as_algorithm(algorithm), as_config(config))
    return _executed(
        plan,
        launch=launch,
        keep_weights=keep_weights,
        take_over=take_over,
        owns_process=owns_process,
        termination=termination or Termination(),
    )


def resume(
    run_dir: Path | str,
    algorithm: AnyAlgorithm | None = None,
    *,
    settings: tuple[str, ...] = (),
    launch: bool = False,
    take_over: bool = False,
    elsewhere: bool = False,
    owns_process: bool = False,
    termination: Termination | None = None,
) -> FinishedRun:
    """Goes on with a run in its directory, and returns it when it has ended: from its last step where all services run
    that still hold their states after it, else from its newest checkpoint. On the same meshes, threads, CPUs and
    versions its numbers are those of a run that was never interrupted.

    Args:
        run_dir: The run directory.
        algorithm: The algorithm, for one that is a function of a script or a notebook. Default: the algorithm whose
            name the run has recorded.
        settings: Overrides "key.path=value" of the run's config, for example `run.steps=200`. Few keys may differ.
        launch, take_over, owns_process, termination: As in `run`. Running services load the checkpoint as far as they
            do not hold its states. Where another run has services, waits for seconds: its controller may have died.
        elsewhere: Whether the run may go on on other meshes, engines, threads, CPUs or versions, with results that
            differ by rounding.

    Raises:
        ConfigError: There is no checkpoint, or config, data, models or services are not those of the checkpoint; the
            text names the differing keys.
        RlhfError: A file of the checkpoint is damaged, which the text names; or the run failed.
    """
    plan = Plan.resuming(Path(run_dir), algorithm, settings, elsewhere=elsewhere, is_warm=not launch)
    return _executed(
        plan,
        settings,
        launch=launch,
        take_over=take_over,
        owns_process=owns_process,
        termination=termination or Termination(),
    )


def _executed(
    plan: Plan,
    settings: tuple[str, ...] = (),
    *,
    launch: bool,
    keep_weights: bool = False,
    take_over: bool,
    owns_process: bool,
    termination: Termination,
) -> FinishedRun:
    """Executes a plan and returns its run when it has ended. Where the run loses a service, resumes it up to
    `checkpoint.restarts` times; see `Restarts`. The arguments are those of `run` and `resume`."""
    if owns_process:
        raise_file_limit()
    progress, restarts = Progress(), Restarts(plan.config.checkpoint.restarts, launches=launch)
    run_dir, was_opened = plan.resumes.run_dir if plan.resumes else None, False
    while True:
        try:
            with open_planned(
                plan,
                progress,
                launch=launch,
                keep_weights=keep_weights,
                take_over=take_over,
                termination=termination,
            ) as opened:
                run_dir, was_opened = opened.directory, True
                if owns_process:
                    spare_garbage_collector()
                try:
                    plan.algorithm(opened)
                    return FinishedRun(run_dir, opened.finish(plan.algorithm.trains))
                finally:
                    # No step follows whose checkpoint SIGTERM could ask for.
                    termination.grace_s = 0.0
        except (RlhfError, KeyboardInterrupt) as error:
            if run_dir is None or termination.is_requested:
                raise
            line = restarts.next(error, run_dir)
            hint = how_to_resume(run_dir, launch=launch, elsewhere=plan.elsewhere) if was_opened else ""
            if line or hint:
                progress.message(line or hint)
            if not line:
                raise
        restarts.pause()
        plan = Plan.resuming(run_dir, plan.algorithm, settings, elsewhere=plan.elsewhere, is_warm=not launch)
        progress, keep_weights, take_over = Progress(), False, False


def by_hand(run: Run) -> None:
    """Stands for the algorithm of a run whose calls are made one by one, as in a notebook. Does nothing, and has all
    services of the configuration."""


BY_HAND = Algorithm(by_hand, options=UnreadOptions)


def open_run(
    config: AnyConfig,
    algorithm: AnyAlgorithm = BY_HAND,
    *,
    launch: bool = False,
    keep_weights: bool = False,
    take_over: bool = False,
) -> Run:
    """Opens a run whose calls are made by hand, for example cell by cell in a notebook, and returns it connected to
    its services. `Run.close`, or the end of a `with` block, ends the session and stops services that were launched.

    Args:
        config, launch, keep_weights, take_over: The same as the arguments of `run` of these names.
        algorithm: Algorithm whose services, defaults and options the run gets; it is not executed. Default: none; all
            services of the configuration, whose `[algorithm.options]` are not checked.

    Raises:
        RlhfError: The configuration cannot be used, or a service does not start or respond.
    """
    plan = Plan.of(as_algorithm(algorithm), as_config(config))
    progress = Progress(is_live=False)
    return open_planned(plan, progress, launch=launch, keep_weights=keep_weights, take_over=take_over)
