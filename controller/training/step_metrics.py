"""Metrics of a step: times, tokens, transfers and memory, beside those of the algorithm."""

from __future__ import annotations

from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import CallRecord
from controller.tracking.transfer import transfer_metrics
from controller.training.columns import count_tokens
from controller.training.evaluation import mean_of_scored, row_scores
from controller.training.parity import parity_metrics
from controller.training.step import Step

COUNTED = ("prompt_ids", "response_ids")
"""Columns whose tokens count for tokens/s."""


class StepMetrics:
    """Computes the metrics of each step and the totals of a run.

    Attributes:
        steps: Steps finished.
        tokens: Tokens of all steps, prompts included.
        seconds: Duration of all steps, without evaluations.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0

    def of(self, step: Step, seconds: float, left_out: dict[str, int]) -> dict[str, float]:
        """Metrics of a finished step.

        Args:
            seconds: Duration of the step.
            left_out: Metrics of the rows left out so far.
        """
        calls: dict[tuple[str, str], list[CallRecord]] = {}
        stages: dict[str, float] = {}
        for record in step.records:
            calls.setdefault((record.service, record.method), []).append(record)
            key = f"time/{self._stage(record)}_s"
            stages[key] = stages.get(key, 0.0) + record.ended_s - record.started_s
        metrics = step.metrics | step.context.noted | left_out
        for (service, _), records in calls.items():
            metrics |= {f"{service}/{name}": value for name, value in _mean_metrics(records).items()}
        batch = step.batch.result(step.batch.columns)
        tokens = sum(count_tokens(batch, name) for name in COUNTED)
        responses = count_tokens(batch, "response_ids")
        self.tokens, self.seconds, self.steps = self.tokens + tokens, self.seconds + seconds, step.number
        metrics |= {
            "transfer/controller_bytes": float(step.context.controller_bytes),
            "transfer/batch_bytes": float(batch.nbytes),
            "time/step_s": seconds,
        }
        if "reward/mean" not in metrics and "rewards" in batch.columns:
            metrics["reward/mean"] = mean_of_scored(row_scores(step.batch))
        if "response_ids" in batch.columns:
            metrics["response/length_mean"] = responses / max(batch.rows, 1)
            metrics["time/tokens_per_s"] = tokens / seconds
        memory = {f"mem/{name}_bytes": float(value) for name, value in self._cluster.memory().items()}
        return metrics | parity_metrics(step.records) | transfer_metrics(step.records) | stages | memory

    def _stage(self, record: CallRecord) -> str:
        """The method; with the service's name before it where that is not the name of its role."""
        role = self._cluster.group(record.service).description.role
        return record.method if record.service == role else f"{record.service}_{record.method}"


def _mean_metrics(records: list[CallRecord]) -> dict[str, float]:
    """Means over the calls of one method."""
    names = dict.fromkeys(name for record in records for name in record.metrics)
    values = {name: [r.metrics[name] for r in records if name in r.metrics] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
