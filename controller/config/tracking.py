"""Settings of where the metrics and traces of a run go, beside the files of its directory."""

from __future__ import annotations

from pydantic import Field, field_validator

from settings.strict import Strict


class TrackingTable(Strict):
    """Where the metrics and traces of a run go, beside `metrics.jsonl`, TensorBoard events and `timeline.json`, which
    every run writes; see docs/tracking.md."""

    trackers: list[str] = []
    """Names of the trackers that get the metrics, samples and summary of the run: `wandb`, `mlflow`, the name of an
    installed plug-in, or `module:object`. Their servers and keys are those of their own environment variables. A
    tracker that is slow or fails changes nothing about the run."""
    project: str = Field(default="rlhf-cluster", min_length=1)
    """Name of the project in wandb, of the experiment in MLflow."""
    opentelemetry: bool = False
    """Whether the calls of each step are sent to an OpenTelemetry collector as a trace. Its address and headers are
    those of the environment variables of OpenTelemetry, such as OTEL_EXPORTER_OTLP_ENDPOINT. A collector that is slow
    or lost changes nothing about the run."""
    prometheus_port: int | None = Field(default=None, ge=1, le=65535)
    """Port at which the controller serves `/metrics` for Prometheus, without encryption. Default: it serves none."""
    prometheus_host: str = Field(default="127.0.0.1", min_length=1)
    """Address of this host on which it listens. Beyond loopback, any client that can connect can read the metrics."""

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, trackers: list[str]) -> list[str]:
        twice = sorted({name for name in trackers if trackers.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: named more than once")
        return trackers
