"""Serves the state of a run to Prometheus, as `/metrics` of the controller; docs/tracking.md lists what it has."""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from controller.config.tracking import TrackingTable
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import CallRecord
from controller.tracking.observer import Observer
from controller.tracking.trackers import Delivery
from rlhf.errors import ConfigError

CLOSE_S = 5.0
IDLE_S = 10.0
"""Seconds after which a connection that sends no request is closed."""
MOST_CONNECTIONS = 16
"""Most connections at a time."""


class MetricsEndpoint(Observer):
    """Context manager that serves `/metrics` from a thread of its own: the metrics of the last step, counts of steps,
    rows and calls, and what the ranks stream at the time of the scrape.

    Args:
        host, port: Address that it listens on.

    Raises:
        ConfigError: The address is in use, is none of this host, or is no address.
    """

    def __init__(self, host: str, port: int) -> None:
        client = importlib.import_module("prometheus_client")
        self._families = importlib.import_module("prometheus_client.core")
        self._registry = client.CollectorRegistry()
        self._metrics = client.Gauge(
            "rlhf_metric", "Value in the last step that has it.", ["name"], registry=self._registry
        )
        self._step = client.Gauge("rlhf_step", "Number of the last finished step.", registry=self._registry)
        self._ended = client.Gauge(
            "rlhf_step_timestamp_seconds",
            "Unix time at which the last step was recorded.",
            registry=self._registry,
        )
        self._rows = client.Counter(
            "rlhf_rows", "Rows that this process has trained on.", registry=self._registry
        )
        self._calls = client.Summary(
            "rlhf_call_seconds",
            "Duration of calls in steps that have ended, from the first rank's start to the last rank's response.",
            ["service", "method"],
            registry=self._registry,
        )
        client.ProcessCollector(registry=self._registry)
        try:
            self._server = _server_at(host, port, client.make_wsgi_app(self._registry))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"tracking.prometheus_port: {host}:{port}: {reason}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    @staticmethod
    @contextlib.contextmanager
    def of(table: TrackingTable) -> Iterator[MetricsEndpoint | None]:
        """Context manager that serves at the address of a table; None where it has none."""
        if table.prometheus_port is None:
            yield None
            return
        with MetricsEndpoint(table.prometheus_host, table.prometheus_port) as endpoint:
            yield endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)

    def watch(self, cluster: Cluster, deliveries: Callable[[], Mapping[str, Delivery]]) -> None:
        """Adds what is read at each scrape: the state of the services of a connected cluster, and the counts of its
        trackers."""
        self._registry.register(_Live(self._families, cluster, deliveries))

    def calls(self, step: int, records: Iterable[CallRecord], rows: int) -> None:
        self._rows.inc(rows)
        for record in records:
            self._calls.labels(record.service, record.method).observe(record.seconds)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics.labels(name).set(value)
        self._step.set(step)
        self._ended.set(time.time())


class _Live:
    """Collector of what the ranks stream, read at each scrape."""

    def __init__(
        self, families: Any, cluster: Cluster, deliveries: Callable[[], Mapping[str, Delivery]]
    ) -> None:
        self._families, self._cluster, self._deliveries = families, cluster, deliveries

    def collect(self) -> Iterator[Any]:
        """Yields the families of metrics, as prometheus_client asks for them."""
        cluster, gauge = self._cluster, self._families.GaugeMetricFamily
        by_service = ["service"]
        ranks = gauge("rlhf_ranks", "Ranks of a service.", labels=by_service)
        responding = gauge("rlhf_ranks_responding", "Ranks whose status arrives.", labels=by_service)
        statuses = cluster.responding()
        for name, described in cluster.descriptions.items():
            ranks.add_metric([name], len(described.ranks))
            responding.add_metric([name], statuses.get(name, 0))
        memory = gauge("rlhf_memory_bytes", "Resident and device memory of a service.", labels=by_service)
        for name, nbytes in cluster.memory().items():
            memory.add_metric([name], nbytes)
        running = gauge("rlhf_running_calls", "Calls that a service runs.", labels=by_service)
        for name, count in Counter(call.partition(".")[0] for call in cluster.running()).items():
            running.add_metric([name], count)
        gauges = gauge("rlhf_rank_gauge", "Gauge summed over the ranks.", labels=["service", "name"])
        for key, value in cluster.gauges().items():
            gauges.add_metric(key.split("/", 1), value)
        records = self._families.CounterMetricFamily(
            "rlhf_tracker_records", "Records of a tracker.", labels=["tracker", "outcome"]
        )
        for name, delivery in self._deliveries().items():
            for outcome, count in vars(delivery).items():
                records.add_metric([name, outcome], count)
        yield from (ranks, responding, memory, running, gauges, records)


class _Handler(WSGIRequestHandler):
    """Answers one request, and closes a connection that sends none within `IDLE_S`."""

    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a scrape is no event."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each connection on a thread, at most `MOST_CONNECTIONS` at a time; further ones are closed."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of a connection, such as its timeout."""


def _server_at(host: str, port: int, app: Any) -> _Server:
    """Returns a server that listens. Raises OSError where it cannot."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class Server(_Server):
        address_family = family

    server = Server(address, _Handler)
    server.set_app(app)
    return server
