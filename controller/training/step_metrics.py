"""Computes the metrics of a step: times, tokens, transfers and memory, beside those of the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import CallRecord, mean_metrics
from controller.role_groups.joint_calls import SYNC
from controller.role_groups.weights import PARTS
from controller.tracking.transfer import transfer_metrics
from controller.training.columns import count_tokens
from controller.training.episodes import episode_metrics
from controller.training.evaluation import mean_of_scored, row_scores
from controller.training.parity import parity_metrics
from controller.training.step import Step

COUNTED = ("prompt_ids", "response_ids")
"""Names of the columns whose tokens are counted for tokens per second."""


class StepMetrics:
    """Computes the metrics of each step and the totals of a run.

    Attributes:
        steps: Number of finished steps.
        tokens: Number of tokens of all steps, prompts included.
        seconds: Duration of all steps in seconds, without evaluations.
        sources: Service whose weights another service computes with, by the other.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.sources = {receiver: source for source, receiver in cluster.config.receivers.items()}
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0

    def of(self, step: Step, seconds: float, left_out: dict[str, int]) -> dict[str, float]:
        """Returns the metrics of a finished step, by name, and adds the step to the totals. The metrics of a service
        that computes with the weights of another have the name of the other.

        Args:
            step: The finished step.
            seconds: Duration of the step in seconds.
            left_out: Metrics with the number of rows left out so far; see `Feed.left_out`.
        """
        calls: dict[tuple[str, str], list[CallRecord]] = {}
        stages: dict[str, float] = {}
        for record in step.records:
            if record.method in PARTS:
                continue
            name = self.sources.get(record.service, record.service)
            calls.setdefault((name, record.method), []).append(record)
            key = f"time/{self._stage(record)}_s"
            seconds_of = record.metrics.get("weights_seconds", record.seconds)
            stages[key] = stages.get(key, 0.0) + seconds_of
        metrics = step.metrics | step.context.noted | left_out
        for (service, method), records in calls.items():
            if method == SYNC:
                continue
            metrics |= {f"{service}/{name}": value for name, value in mean_metrics(records).items()}
        batch = step.batch.result(step.batch.columns)
        tokens = sum(count_tokens(batch, name) for name in COUNTED)
        responses = count_tokens(batch, "response_ids")
        self.tokens, self.seconds, self.steps = self.tokens + tokens, self.seconds + seconds, step.number
        metrics |= {
            "transfer/controller_bytes": float(step.context.controller_bytes),
            "transfer/batch_bytes": float(batch.nbytes),
            "time/step_s": seconds,
            **self._cluster.device_use().metrics(),
        }
        if "reward/mean" not in metrics and "rewards" in batch.columns:
            metrics["reward/mean"] = mean_of_scored(row_scores(step.batch))
        if "response_ids" in batch.columns:
            metrics["response/length_mean"] = responses / max(batch.rows, 1)
            metrics |= episode_metrics(batch)
            metrics["time/tokens_per_s"] = tokens / seconds
        memory = {f"mem/{name}_bytes": float(value) for name, value in self._cluster.memory().items()}
        gauges = {f"rank/{name}": value for name, value in self._cluster.gauges().items()}
        return (
            metrics | parity_metrics(step.records) | transfer_metrics(step.records) | stages | memory | gauges
        )

    def state(self) -> dict[str, float]:
        """Returns the totals by name."""
        return {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Sets the totals to those that `state` returned."""
        self.steps, self.tokens, self.seconds = (stored[name] for name in ("steps", "tokens", "seconds"))

    def _stage(self, record: CallRecord) -> str:
        """Returns the name of a call's stage: its method, with the name of the service before it where that is not
        named like its role."""
        role = self._cluster.group(record.service).description.role
        return record.method if record.service == role else f"{record.service}_{record.method}"
