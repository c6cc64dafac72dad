"""Tracks a run in MLflow. Server and account are those of its environment variables, such as MLFLOW_TRACKING_URI and
MLFLOW_TRACKING_TOKEN."""

from __future__ import annotations

import importlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from controller.tracking.metrics import Sample
from controller.tracking.run_directory import json_text
from controller.tracking.tracker import Started, Status, TrackedRun, Tracker, without_credentials
from rlhf.errors import ConfigError

MARKER = "step"
"""Metric that is logged last of each step, so that a step that has it is complete."""
MAX_METRICS, MAX_PARAMS, MAX_VALUE = 1000, 100, 6000
"""Most metrics and most parameters of one request, and most characters of a parameter."""
STATUSES: Mapping[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowTracker(Tracker):
    """Tracker of a run in MLflow: `tracking.project` is its experiment, the config its parameters, and sample responses
    are artifacts samples/step-N.jsonl.

    The history of a metric can only grow, so of a run that is resumed the values stay that the server has.
    """

    @classmethod
    def check(cls) -> None:
        """Raises ConfigError where the package is missing, or cannot use the store of MLFLOW_TRACKING_URI."""
        try:
            mlflow = importlib.import_module("mlflow")
        except ImportError as error:
            raise ConfigError(f"mlflow: {error}; pip install 'rlhf-cluster[mlflow]'") from None
        try:
            mlflow.MlflowClient()
        except Exception as error:  # noqa: BLE001 - of any store
            # With mlflow-skinny, its default, a database in the working directory, cannot be opened.
            text = " ".join(str(error).split())
            store = without_credentials(f"{mlflow.get_tracking_uri()}: {text}")
            raise ConfigError(
                f"mlflow cannot use its store {store}. MLFLOW_TRACKING_URI names the server, such as http://HOST:5000"
            ) from None

    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        if resumed_id:
            self._id = resumed_id
            self._client.update_run(self._id, status="RUNNING")
            marked = self._client.get_metric_history(self._id, MARKER)
            return Started(self._id, max((each.step for each in marked), default=-1))
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        texts = dict(_flat({"algorithm": run.algorithm, **config}))
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        for some in _cut([(name, value) for name, value in texts.items() if value], MAX_PARAMS):
            params = [self._entities.Param(_allowed(name), value[:MAX_VALUE]) for name, value in some]
            self._client.log_batch(self._id, params=params)
        for name, value in run.identity.items():
            self._client.set_tag(self._id, f"identity.{name}", str(value))
        return Started(self._id)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, {**metrics, MARKER: float(step)})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        lines = "".join(f"{json_text(sample.fields)}\n" for sample in samples)
        self._client.log_text(self._id, lines, f"samples/step-{step}.jsonl")

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        for name, value in summary.items():
            self._client.set_tag(self._id, f"summary.{_allowed(name)}", str(value))
        self._client.set_terminated(self._id, STATUSES[status])

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        for some in _cut(metrics.items(), MAX_METRICS):
            values = [self._entities.Metric(_allowed(name), value, now_ms, step) for name, value in some]
            self._client.log_batch(self._id, metrics=values)


def _allowed(name: str) -> str:
    """Returns a name with characters that MLflow refuses replaced by _."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted key and text of each value in nested tables."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _cut(items: Iterable[tuple[str, Any]], size: int) -> Iterator[list[tuple[str, Any]]]:
    """Yields the items in lists of at most `size`."""
    rest = iter(items)
    while some := list(itertools.islice(rest, size)):
        yield some
