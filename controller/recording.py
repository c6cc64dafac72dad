"""The recorder of a connected run, with its trackers, its traces and its endpoint for Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from controller.config.config import Config
from controller.plan import Plan
from controller.role_groups.cluster import Cluster
from controller.tracking.observer import Observer
from controller.tracking.progress import Progress
from controller.tracking.prometheus import MetricsEndpoint
from controller.tracking.recorder import Recorder
from controller.tracking.run_directory import RunDirectory
from controller.tracking.traces import Traces
from controller.tracking.tracker import TrackedRun
from controller.tracking.trackers import Trackers, find_trackers
from rlhf.errors import ConfigError


@contextlib.contextmanager
def recording(
    plan: Plan,
    config: Config,
    cluster: Cluster,
    directory: RunDirectory,
    progress: Progress,
    identity: Mapping[str, Any],
    endpoint: MetricsEndpoint | None,
) -> Iterator[Recorder]:
    """Context manager that records a run.

    Args:
        plan: The run.
        config: Its configuration with the measured libraries.
        cluster: Connected services.
        directory: Run directory, whose files are cut to the point that a resumed run goes on from.
        progress: Terminal display.
        identity: Identity of the run as JSON values.
        endpoint: Endpoint for Prometheus; None where the config has none.
    """
    try:
        kinds = find_trackers(config.tracking.trackers)
    except ConfigError as error:  # which was not so before anything started
        progress.message(f"{error}; the run continues without trackers")
        kinds = {}
    path = directory.path.resolve()
    run = TrackedRun(path.name, path, config.tracking.project, plan.identity.algorithm, identity)
    trackers = Trackers(
        kinds,
        directory,
        run,
        plan.algorithm.resolved(config),
        plan.resumes.step if plan.resumes else None,
        progress.message,
    )
    observers: list[Observer] = [trackers]
    if endpoint:
        endpoint.watch(cluster, lambda: trackers.deliveries)
        observers.append(endpoint)
    with contextlib.ExitStack() as opened:
        opened.enter_context(trackers)
        if config.tracking.opentelemetry:
            observers.append(opened.enter_context(Traces(run, progress.message)))
        # Trackers are told before the exit of the traces, so that both are waited for at the same time.
        opened.push(trackers.end)
        recorder = opened.enter_context(Recorder(directory, progress, identity, observers=observers))
        opened.enter_context(recorder.following(cluster.running, cluster.memory))
        yield recorder
