"""Sends the calls of a run to an OpenTelemetry collector as traces; docs/tracking.md describes their spans."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from controller.config.tracking import TrackingTable
from controller.role_groups.dataflow import CallRecord
from controller.tracking.observer import Observer
from controller.tracking.tracker import TrackedRun, without_credentials
from rlhf.errors import ConfigError

EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""Modules of the exporters by protocol, as the environment variables of OpenTelemetry name them."""
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
QUEUE_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE"
MAX_QUEUED_SPANS = 1 << 16
"""Spans that wait for the collector at most, unless `QUEUE_VARIABLE` is set: those of six steps of ten calls to 1,024
ranks. Further ones drop the oldest."""
CONTROLLER = "controller"
MEASURED = (
    *("queue_s", "fetch_s", "compute_s", "store_s", "fetched_bytes", "inline_bytes", "stored_bytes"),
    "peak_device_bytes",
)
"""Fields of the timing of a call on a rank that are attributes of its span."""


def check_traces(table: TrackingTable) -> None:
    """Raises ConfigError if traces are asked for and cannot be sent: a package is missing, or an environment variable
    has a value that the exporter does not take."""
    if table.opentelemetry:
        _exporter().shutdown()


class Traces(Observer):
    """Context manager that sends a trace of each step and each evaluation, from a thread of the OpenTelemetry SDK. On
    exit it waits up to 30 s for the collector. A collector that is slow or lost changes nothing about the run.

    Args:
        run: Facts of the run.
        say: Called with a line of text for each kind of failure, at its first occurrence, from any thread.

    Raises:
        ConfigError: As by `check_traces`.
    """

    def __init__(self, run: TrackedRun, say: Callable[[str], None]) -> None:
        exporter, sdk = _exporter(), importlib.import_module("opentelemetry.sdk.trace.export")
        size = None if QUEUE_VARIABLE in os.environ else MAX_QUEUED_SPANS
        self._api = importlib.import_module("opentelemetry.trace")
        self._processor = sdk.BatchSpanProcessor(exporter, max_queue_size=size)
        self._common = {
            "service.namespace": run.project,
            "rlhf.run": run.name,
            "rlhf.algorithm": run.algorithm,
        }
        self._tracers: dict[str, Any] = {}
        self._log = _Log(say)

    def __enter__(self) -> Self:
        self._log.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processor.shutdown()
        self._log.detach()

    def calls(self, step: int, records: Iterable[CallRecord], rows: int) -> None:
        sent = [(record, chunk) for each in records for chunk, record in enumerate(each.sent)]
        if not sent:
            return
        start, end = min(call.started_s for call, _ in sent), max(call.ended_s for call, _ in sent)
        facts = {"rlhf.step": step, "rlhf.rows": rows}
        root = self._span("step" if rows else "evaluation", CONTROLLER, None, start, end, facts)
        for record, chunk in sent:
            self._call(record, chunk, step, root)

    def _call(self, record: CallRecord, chunk: int, step: int, root: Any) -> None:
        """Makes the span of a call, and in it one of each rank from the start of its execution to its response."""
        facts = {"rlhf.step": step, "rlhf.service": record.service, "rlhf.chunk": chunk}
        version = {"rlhf.policy_version": record.policy_version}
        called = f"{record.service}.{record.method}"
        span = self._span(
            called, CONTROLLER, root, record.started_s, record.ended_s, facts | version, "CLIENT"
        )
        for rank, response in enumerate(record.responses):
            timing = response.outcome.timing
            start = timing.arrived_unix_s + timing.queue_s
            if timing.arrived_unix_s:
                end = start + timing.fetch_s + timing.compute_s + timing.store_s
                measured = {f"rlhf.{name}": getattr(timing, name) for name in MEASURED}
                self._span(
                    called,
                    record.service,
                    span,
                    start,
                    end,
                    {**facts, "rlhf.rank": rank, **measured},
                    "SERVER",
                )

    def _span(
        self,
        name: str,
        service: str,
        parent: Any,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Any],
        kind: str = "INTERNAL",
    ) -> Any:
        """Makes and returns a span of a service within `parent`. Times are Unix times in seconds."""
        start_ns, end_ns = round(start_s * 1e9), round(max(start_s, end_s) * 1e9)
        context = None if parent is None else self._api.set_span_in_context(parent)
        span = self._tracer(service).start_span(
            name, context, getattr(self._api.SpanKind, kind), attributes, start_time=start_ns
        )
        span.end(end_ns)
        return span

    def _tracer(self, service: str) -> Any:
        """Returns the tracer of a service, which viewers show under a name of its own."""
        if service not in self._tracers:
            resource = importlib.import_module("opentelemetry.sdk.resources").Resource
            provider = importlib.import_module("opentelemetry.sdk.trace").TracerProvider(
                resource=resource.create({**self._common, "service.name": f"rlhf-{service}"}),
                shutdown_on_exit=False,
                id_generator=_Ids(),
            )
            provider.add_span_processor(self._processor)
            self._tracers[service] = provider.get_tracer("rlhf-cluster")
        return self._tracers[service]


class _Ids:
    """Random ids of traces and spans. Those of the SDK are drawn from Python's global generator, which belongs to the
    run."""

    def generate_span_id(self) -> int:
        return 1 + secrets.randbelow((1 << 64) - 1)

    def generate_trace_id(self) -> int:
        return 1 + secrets.randbelow((1 << 128) - 1)

    def is_trace_id_random(self) -> bool:
        return True


class _Log(logging.Handler):
    """Passes what the SDK logs to `say` instead of the terminal: each kind of warning or error once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say, self._said = say, set[str]()
        self._logger = logging.getLogger("opentelemetry")

    def attach(self) -> None:
        self._propagated, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg not in self._said:
            self._said.add(record.msg)
            text = without_credentials(" ".join(record.getMessage().split())).rstrip(".")
            self._say(f"opentelemetry: {text}; the run continues, and this is not shown again")


def _exporter() -> Any:
    """Returns an exporter that the environment variables of OpenTelemetry configure. Raises ConfigError where that is
    not possible."""
    given = next((name for name in PROTOCOL_VARIABLES if os.environ.get(name)), "")
    protocol = os.environ[given] if given else "grpc"
    if protocol not in EXPORTERS:
        raise ConfigError(f"tracking.opentelemetry: {given} is {protocol!r}; allowed: {', '.join(EXPORTERS)}")
    try:
        importlib.import_module("opentelemetry.sdk.trace")
        return importlib.import_module(EXPORTERS[protocol]).OTLPSpanExporter()
    except ImportError as error:
        hint = "pip install 'rlhf-cluster[opentelemetry]'"
        raise ConfigError(f"tracking.opentelemetry: {error}; {hint}") from None
    except Exception as error:  # noqa: BLE001 - the exporter checks each variable in a way of its own
        raise ConfigError(f"tracking.opentelemetry: {type(error).__name__}: {error}") from None
