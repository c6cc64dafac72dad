"""Traces of a run: a collector gets the calls of each step, and one that is lost changes nothing."""

from __future__ import annotations

import logging
import random
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from unit.trace_collector import Collector, grpc_collector, http_collector

from controller.config.tracking import TrackingTable
from controller.role_groups.dataflow import CallRecord
from controller.tracking.traces import Traces, check_traces
from controller.tracking.tracker import TrackedRun
from rlhf.errors import ConfigError
from rlhf.v1 import actor_pb2, common_pb2

NOON = 1_800_000_000.0
RUN = TrackedRun("run-1", Path("runs/run-1"), "sums", "ppo", {})
TABLE = TrackingTable(opentelemetry=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "COMPRESSION"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def on_rank(rank: int) -> actor_pb2.GenerateSequencesResponse:
    """The response of a rank whose call arrived at noon, waited for a second, and was executed in six."""
    timing = common_pb2.Timing(
        arrived_unix_s=NOON, queue_s=1, fetch_s=0.5, compute_s=5 + rank, store_s=0.5, fetched_bytes=100 + rank
    )
    return actor_pb2.GenerateSequencesResponse(outcome=common_pb2.Outcome(timing=timing))


def generated() -> CallRecord:
    responses = on_rank(0), on_rank(1)
    return CallRecord("actor", "generate_sequences", NOON + 1, NOON + 8.25, {}, 3, responses)


def traced(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, *records: CallRecord, rows: int = 16
) -> list[str]:
    """Sends the calls of step 4 to a collector. Returns the lines that are shown."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    said: list[str] = []
    with Traces(RUN, said.append) as traces:
        traces.calls(4, iter(records), rows)
    return said


@pytest.mark.parametrize(("protocol", "serve"), [("grpc", grpc_collector), ("http/protobuf", http_collector)])
def test_a_collector_gets_a_trace_of_the_step_with_its_calls_and_their_ranks(
    protocol: str, serve: Callable[[], AbstractContextManager[Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    scored = CallRecord("reward", "compute_reward", NOON + 8.5, NOON + 9, {}, 0, ())
    with serve() as collector:
        assert traced(collector, monkeypatch, generated(), scored) == []
    generate, first, second, score, step = sorted(
        collector.spans, key=lambda span: (span.name, span.kind, span.end_s)
    )
    assert {span.trace for span in collector.spans} == {step.trace}
    assert (step.name, step.kind, step.parent) == ("step", "INTERNAL", b"")
    assert (step.start_s, step.end_s) == (NOON + 1, NOON + 9)
    assert step.attributes == {"rlhf.step": 4, "rlhf.rows": 16}
    assert (generate.name, generate.kind, generate.parent) == ("actor.generate_sequences", "CLIENT", step.id)
    assert generate.attributes["rlhf.policy_version"] == 3
    assert (first.kind, first.parent, first.start_s, first.end_s) == (
        "SERVER",
        generate.id,
        NOON + 1,
        NOON + 7,
    )
    assert (second.kind, second.parent, second.start_s, second.end_s) == (
        "SERVER",
        generate.id,
        NOON + 1,
        NOON + 8,
    )
    assert second.attributes["rlhf.rank"] == 1
    assert (second.attributes["rlhf.queue_s"], second.attributes["rlhf.fetched_bytes"]) == (1, 101)
    assert (score.name, score.parent, score.start_s) == ("reward.compute_reward", step.id, NOON + 8.5)
    services = {span.name + span.kind: span.resource["service.name"] for span in (step, generate, first)}
    assert list(services.values()) == ["rlhf-controller", "rlhf-controller", "rlhf-actor"]
    assert step.resource["rlhf.run"] == "run-1"
    assert step.resource["service.namespace"] == "sums"


def test_each_chunk_of_a_call_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = generated(), generated()
    whole = CallRecord("actor", "generate_sequences", NOON + 1, NOON + 8.25, {}, 3, (), chunks=chunks)
    with grpc_collector() as collector:
        traced(collector, monkeypatch, whole)
    calls = [span for span in collector.spans if span.kind == "CLIENT"]
    assert sorted(span.attributes["rlhf.chunk"] for span in calls) == [0, 1]


def test_the_spans_of_a_large_step_wait_for_a_slow_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the SDK lets wait by default, 2,048."""
    said: list[str] = []
    with grpc_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        collector.is_reading.clear()
        with Traces(RUN, said.append) as traces:
            traces.calls(4, [generated()] * 1000, 16)
            collector.is_reading.set()
    assert said == []
    assert len(collector.spans) == 1 + 3 * 1000


def test_an_evaluation_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_collector() as collector:
        traced(collector, monkeypatch, generated(), rows=0)
    assert [span.name for span in collector.spans if not span.parent] == ["evaluation"]


def test_a_step_without_calls_has_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_collector() as collector:
        traced(collector, monkeypatch)
    assert collector.spans == []


@pytest.mark.parametrize(("protocol", "user"), [("grpc", ""), ("http/protobuf", "someone:secret@")])
def test_a_lost_collector_is_reported_once_by_the_run_alone(
    protocol: str, user: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lost = Collector(f"http://{user}127.0.0.1:{listener.getsockname()[1]}")
    before = logging.getLogger("opentelemetry").propagate, logging.getLogger("opentelemetry").handlers[:]
    said = traced(lost, monkeypatch, generated())
    assert len(said) == len({line[:40] for line in said}) >= 1
    assert all(line.startswith("opentelemetry: ") and "secret" not in line for line in said)
    assert "; the run continues" in said[-1]
    assert capfd.readouterr().err == ""
    assert (
        logging.getLogger("opentelemetry").propagate,
        logging.getLogger("opentelemetry").handlers,
    ) == before


def test_the_generator_of_the_run_is_not_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.getstate()
    with grpc_collector() as collector:
        traced(collector, monkeypatch, generated())
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "http/json",
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; allowed: grpc, http/",
        ),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "lz4", "lz4"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "soon"),
    ],
)
def test_what_the_exporter_cannot_use_is_an_error_before_anything_starts(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"^tracking.opentelemetry: .*{said}"):
        check_traces(TABLE)
    check_traces(TrackingTable())


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlhf-cluster\[opentelemetry\]'$"):
        check_traces(TABLE)
