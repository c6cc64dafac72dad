"""An OpenTelemetry collector on loopback, over gRPC or HTTP, that keeps the spans that it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """A span as the collector got it, with the attributes of its resource. Times are Unix times in seconds."""

    name: str
    kind: str
    trace: bytes
    id: bytes
    parent: bytes
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """The spans that have arrived, and the address, as OTEL_EXPORTER_OTLP_ENDPOINT. While `is_reading` is not set, the
    gRPC collector answers no request, for 10 s at most."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    is_reading: threading.Event = field(default_factory=threading.Event)

    def take(self, request: Any) -> None:
        """Keeps the spans of an ExportTraceServiceRequest."""
        for group in request.resource_spans:
            resource = values(group.resource.attributes)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                kind = type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
                ids = span.trace_id, span.span_id, span.parent_span_id
                self.spans.append(Span(span.name, kind, *ids, *times, values(span.attributes), resource))


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Context manager of a collector that serves gRPC."""
    collector = Collector()
    collector.is_reading.set()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.is_reading.wait(10)
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait(10)


@contextmanager
def http_collector() -> Iterator[Collector]:
    """Context manager of a collector that serves HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
