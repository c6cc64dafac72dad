"""Trackers and Prometheus during a run, export of checkpoints, stacks and traces of services."""

from __future__ import annotations

import csv
import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from python_path import python_path
from unit.test_metrics_docs import documented
from unit.trace_collector import grpc_collector

from controller import job
from controller.checkpoints.store import CheckpointStore
from controller.config.config import Config
from controller.export import export
from controller.tracking.metrics import read_metrics
from controller.tracking.trackers import TRACKERS_FILE
from deploy.profiling import request_traces
from integration.harness import (
    TIMEOUT_S,
    Cluster,
    Processes,
    Service,
    free_ports,
    is_listening,
    wait_for_line,
    wait_until,
)
from integration.resuming import RUN_TIMEOUT_S, Results, resumable, with_tables
from integration.test_server import training_rows
from rlhf.errors import ConfigError, InvalidRequest

pytestmark = pytest.mark.timeout(240)

STEPS = 8


@pytest.fixture(scope="module")
def services(cluster: Cluster) -> Config:
    """The config of a run of PPO on services that are up."""
    config = cluster.select(**{role: role for role in ("actor", "critic", "reference", "reward")})
    return with_tables(config, run={"steps": STEPS, "evaluate_every": 2})


@pytest.fixture(scope="module")
def finished(services: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing follows, with a checkpoint after its last step."""
    tables = {"run": {"directory": tmp_path_factory.mktemp("finished")}, "checkpoint": {"every": 2}}
    return job.run(with_tables(services, **tables), "ppo").directory


def test_a_tracker_of_an_installed_package_gets_each_step_of_a_killed_run_once(
    services: Config, finished: Path, plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(plugins))
    (port,) = free_ports(1)
    tracking = {"trackers": ["csv"], "prometheus_port": port, "opentelemetry": True}
    config = with_tables(services, tracking=tracking, checkpoint={"every": 2})
    with grpc_collector() as collector, resumable(config, tmp_path) as run:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        process = run.start()

        def has_begun() -> bool:
            assert process.poll() is None, process.communicate()
            return is_listening(f"127.0.0.1:{port}") and scraped(port).get(("rlhf_step",), 0) >= 1

        wait_until(has_begun, RUN_TIMEOUT_S, "a step")
        seen = scraped(port)
        assert seen["rlhf_ranks_responding", "actor"] == seen["rlhf_ranks", "actor"] == 2
        assert seen["rlhf_memory_bytes", "actor"] > 1e6
        assert seen["rlhf_rows_total",] >= 32
        assert seen["rlhf_call_seconds_count", "update_actor", "actor"] >= 1
        assert seen["rlhf_call_seconds_sum", "update_actor", "actor"] > 0
        assert seen["rlhf_metric", "time/step_s"] > 0
        assert seen["rlhf_tracker_records_total", "failed", "csv"] == 0
        run.kill_after(process, 2)
        out, _ = run.finish(run.resume())
        assert "tracker csv" not in out
        assert Results.of(run.run_dir) == Results.of(finished)
        with (run.run_dir / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == list(range(STEPS + 1))
        kept = read_metrics(run.run_dir)
        assert [float(row["reward/mean"] or 0) for row in rows] == [
            line.get("reward/mean", 0) for line in kept
        ]
        counts = json.loads((run.run_dir / TRACKERS_FILE).read_text())["csv"]
        assert (counts["failed"], counts["dropped"]) == (0, 0)
        last = [span for span in collector.spans if span.attributes["rlhf.step"] == STEPS]
        assert [span.name for span in last if not span.parent] == ["step", "evaluation"]
        updates = [span for span in last if span.name == "actor.update_actor"]
        assert sorted((span.kind, span.attributes.get("rlhf.rank")) for span in updates) == [
            ("CLIENT", None),
            ("SERVER", 0),
            ("SERVER", 1),
        ]
    assert not is_listening(f"127.0.0.1:{port}")


def test_an_endpoint_in_use_is_refused_before_anything_starts(services: Config, tmp_path: Path) -> None:
    port = int(services.services["actor"].address.rpartition(":")[2])
    config = with_tables(services, run={"directory": tmp_path}, tracking={"prometheus_port": port})
    with pytest.raises(ConfigError, match=rf"tracking.prometheus_port: 127.0.0.1:{port}: .*in use"):
        job.run(config, "ppo")
    assert not list(tmp_path.iterdir())


def test_the_export_of_the_last_checkpoint_is_that_of_the_run(finished: Path, tmp_path: Path) -> None:
    place = CheckpointStore(finished).place(STEPS)
    sha256 = export(place, tmp_path / "model")
    assert sha256 == json.loads((finished / "summary.json").read_text())["actor_sha256"]
    assert contents(tmp_path / "model") == contents(finished / "actor")


def test_an_export_starts_its_service(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (port,) = free_ports(1)
    place, out = CheckpointStore(finished).place(STEPS), tmp_path / "models" / "last"
    options = ("--set", f"services.actor.address=127.0.0.1:{port}", "--out", str(out), "--launch")
    process = Processes().start("rlhf-controller", "export", str(place), *options)
    said, err = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, err
    sha256 = json.loads((finished / "summary.json").read_text())["actor_sha256"]
    assert said == f"model: {out}\nsha256: {sha256}\n"
    assert contents(out) == contents(finished / "actor")
    assert not is_listening(f"127.0.0.1:{port}")


def test_an_export_in_another_type_and_of_an_earlier_step(finished: Path, tmp_path: Path) -> None:
    place = CheckpointStore(finished).place(STEPS - 2)
    exact, rounded = (export(place, tmp_path / name, dtype=name) for name in ("float32", "bfloat16"))
    assert exact not in (rounded, json.loads((finished / "summary.json").read_text())["actor_sha256"])
    dtype = json.loads((tmp_path / "bfloat16" / "config.json").read_text())
    assert "bfloat16" in (dtype.get("dtype"), dtype.get("torch_dtype"))
    with pytest.raises(InvalidRequest, match="dtype: 'float16' is neither float32 nor bfloat16"):
        export(place, tmp_path / "wrong", dtype="float16")


def test_an_export_of_what_is_not_there_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no weights of a service 'reward'; it has: actor, critic"):
        export(CheckpointStore(finished).place(STEPS - 2), tmp_path / "model", service="reward")
    with pytest.raises(ConfigError, match="is neither a complete checkpoint"):
        export(finished / "checkpoints" / "step-7", tmp_path / "model")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """The samples of a scrape, by name and the values of the labels, which are sorted by their names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_ranks_trace_their_next_calls_beside_a_session(actor: Service, tmp_path: Path) -> None:
    address = actor.addresses[0]
    rows = training_rows().select(["prompt_ids", "response_ids"])
    actor.call("compute_log_prob", rows, temperature=1.0)
    asked = request_traces("actor", address, tmp_path / "traces", 2)
    assert [where for where, _ in asked] == actor.addresses
    for _ in range(2):
        assert not any(Path(path).exists() for _, path in asked)
        actor.call("compute_log_prob", rows, temperature=1.0)
    for _, path in asked:
        events = json.loads(Path(path).read_text())["traceEvents"]
        assert any("aten::" in event.get("name", "") for event in events)
    with pytest.raises(InvalidRequest, match=r"Profile: .*is not below one of the directories"):
        request_traces("actor", address, Path("/elsewhere/traces"), 2)


def test_a_service_without_torch_has_nothing_to_trace(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"Profile: .*nothing to profile"):
        request_traces("reward", cluster.config.services["reward"].address, tmp_path, 2)


def test_stacks_of_ranks_are_shown_and_the_ranks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    processes, path = Processes(), tmp_path / "two.toml"
    one, two = free_ports(2)
    path.write_text(
        f"""[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
[services.one]
role = "reward"
address = "127.0.0.1:{one}"
[services.two]
role = "reward"
address = "127.0.0.1:{two}"
"""
    )

    def deploy(*arguments: str) -> tuple[int, str]:
        process = processes.start("python", "-m", "deploy", *arguments, cwd=tmp_path)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out + err

    assert deploy("stacks", "two.toml") == (1, "error: two.toml: nothing is up\n")
    up = processes.start("python", "-m", "deploy", "up", "two.toml", cwd=tmp_path)
    try:
        wait_for_line(up, "ready\n")
        code, out = deploy("stacks", "two.toml", "one")
        assert code == 0, out
        assert out.startswith("one rank 0, pid ")
        assert f"in {tmp_path}/runs/logs/two/one.log:" in out
        assert "(most recent call first):" in out
        assert re.search(r"services/runtime/server.py., line \d+ in serve", out)
        assert "Task Task-1 (most recent await last):" in out
        code, out = deploy("stacks", "two.toml")
        assert [line.split(",")[0] for line in out.splitlines() if ", pid " in line] == [
            "one rank 0",
            "two rank 0",
        ]
        assert deploy("stacks", "two.toml", "three") == (
            2,
            "error: no ranks of a service 'three' run here; there are: one, two\n",
        )
        assert deploy("status", "two.toml")[0] == 0
        up.terminate()
        assert up.wait(TIMEOUT_S) == 0
    finally:
        processes.kill()


def test_the_controller_prints_its_stacks(services: Config, tmp_path: Path) -> None:
    config = with_tables(services, run={"steps": 200})
    with resumable(config, tmp_path) as run:
        process = run.start()

        def has_begun() -> bool:
            assert process.poll() is None, process.communicate()
            return bool(list(tmp_path.glob("runs/*/metrics.jsonl"))) and run.steps_done >= 1

        wait_until(has_begun, RUN_TIMEOUT_S, "a step")
        process.send_signal(signal.SIGUSR1)
        before = run.steps_done
        wait_until(lambda: run.steps_done > before + 1, RUN_TIMEOUT_S, "further steps")
        process.send_signal(signal.SIGINT)
        _, err = run.finish(process, 130)
        assert "(most recent call first):" in err
        assert 'controller/job.py", line' in err


def test_the_page_of_metrics_has_those_of_a_run(finished: Path) -> None:
    names = {name for line in read_metrics(finished) for name in line} - {"step"}
    assert len(names) > 40
    assert [name for name in sorted(names) if not documented().fullmatch(name)] == []
