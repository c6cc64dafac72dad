"""Trackers get all that a run records and change no run: one that is slow, fails or is missing is passed over."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from rich.console import Console

from controller import recording
from controller.config.tracking import TrackingTable
from controller.role_groups.dataflow import CallRecord
from controller.tracking import trackers as trackers_module
from controller.tracking.marks import cut_files, mark_files
from controller.tracking.metrics import Sample
from controller.tracking.observer import Observer
from controller.tracking.progress import Progress
from controller.tracking.recorder import Recorder
from controller.tracking.run_directory import RunDirectory
from controller.tracking.tracker import Started, Status, TrackedRun, Tracker
from controller.tracking.trackers import TRACKERS_FILE, Trackers, find_trackers
from rlhf.errors import ConfigError, RlhfError
from settings.strict import validate

TIMEOUT_S = 60.0
SAMPLE = Sample("1+1=", "2", "2", 1.0)
CONFIG = {"run": {"seed": 3, "steps": 9}, "services": {"actor": {"ranks": 2}}}


class Remembering(Tracker):
    """Keeps what it is given, like a server that outlives runs."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    held: ClassVar[int] = -1

    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        self.calls.append(("start", run.name, config["run"]["seed"], resumed_id))
        return Started(resumed_id or "first", type(self).held)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append((step, dict(metrics)))
        type(self).held = step

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.calls.append((step, *samples))

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self.calls.append(("end", status, dict(summary)))


class Refusing(Tracker):
    """Fails at each step."""

    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        return Started("refusing")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError(f"step {step}:\nno route to host")

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        pass


class Unchecked(Refusing):
    @classmethod
    def check(cls) -> None:
        raise KeyError("TOKEN")


class Endless(Tracker):
    """Lacks a method that every tracker has."""

    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        return Started("endless")

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Stuck(Refusing):
    """Waits in its first step for as long as the test says."""

    free = threading.Event()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.free.wait(TIMEOUT_S)


class NotConstructed(Refusing):
    def __init__(self) -> None:
        raise RuntimeError("no module of its own")


class NotStarting(Refusing):
    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        raise RuntimeError("no account")


@pytest.fixture
def remembering() -> type[Remembering]:
    Remembering.calls.clear()
    Remembering.held = -1
    return Remembering


def tracked(
    run_dir: Path, kinds: Mapping[str, type[Tracker]], said: list[str], done: int | None = None
) -> Trackers:
    run = TrackedRun(run_dir.name, run_dir, "project", "ppo", {"seed": 3})
    return Trackers(kinds, RunDirectory(run_dir), run, CONFIG, done, said.append)


def record(run_dir: Path, trackers: Trackers, steps: Sequence[int], summary: bool = True) -> None:
    """Records these steps as a run does, with samples after every third."""
    progress = Progress(Console(file=StringIO()))
    with trackers, Recorder(RunDirectory(run_dir), progress, observers=[trackers]) as recorder:
        for step in steps:
            if step % 3 == 0:
                recorder.samples(step, [SAMPLE])
            recorder.step(step, {"reward/mean": step / 8, "actor/loss": float("nan")})
        if summary:
            recorder.summary({"steps": steps[-1], "actor_sha256": "abc"})


def test_a_tracker_gets_all_that_the_run_records(tmp_path: Path, remembering: type[Remembering]) -> None:
    said: list[str] = []
    record(tmp_path, tracked(tmp_path, {"mine": remembering}, said), range(2))
    start, sample, first, second, end = remembering.calls
    assert start == ("start", tmp_path.name, 3, "")
    assert sample == (0, SAMPLE)
    assert (first[0], second[0]) == (0, 1)
    assert second[1]["reward/mean"] == 0.125
    assert end == ("end", "finished", {"steps": 1, "actor_sha256": "abc"})
    kept = json.loads((tmp_path / TRACKERS_FILE).read_text())
    assert kept == {"mine": {"id": "first", "delivered": 3, "failed": 0, "dropped": 0}}
    assert said == []


def test_observers_get_the_calls_of_an_evaluation_which_come_one_by_one(tmp_path: Path) -> None:
    class Counting(Observer):
        seen: ClassVar[list[str]] = []

        def calls(self, step: int, records: Iterable[CallRecord], rows: int) -> None:
            self.seen.extend(record.method for record in records)

    recorder = Recorder(
        RunDirectory(tmp_path), Progress(Console(file=StringIO())), observers=[Counting(), Counting()]
    )
    call = CallRecord("actor", "generate_sequences", 1.0, 2.0, {}, 1, ())
    recorder.calls(1, iter([call]))
    assert Counting.seen == ["generate_sequences"] * 2


@pytest.mark.parametrize(("held", "sent"), [(6, [7, 8]), (4, [5, 6, 7, 8]), (2, [3, 4, 5, 6, 7, 8])])
def test_a_resumed_run_sends_what_the_tracker_lacks_and_nothing_twice(
    held: int, sent: list[int], tmp_path: Path, remembering: type[Remembering]
) -> None:
    """The run was at step 6 and goes on from its checkpoint after step 4. The tracker lost what came after `held`."""
    record(tmp_path, tracked(tmp_path, {"mine": remembering}, []), range(5), summary=False)
    marks = mark_files(tmp_path)
    record(tmp_path, tracked(tmp_path, {}, []), range(5, 7), summary=False)
    cut_files(tmp_path, marks)
    remembering.calls.clear()
    remembering.held = held
    record(tmp_path, tracked(tmp_path, {"mine": remembering}, [], done=4), range(5, 9))
    assert remembering.calls[0] == ("start", tmp_path.name, 3, "first")
    metrics = [call for call in remembering.calls[1:] if isinstance(call[1], dict)]
    assert [step for step, _ in metrics] == sent
    assert [values["reward/mean"] for _, values in metrics] == [step / 8 for step in sent]
    samples = [call[0] for call in remembering.calls if call[1:] == (SAMPLE,)]
    assert samples == [step for step in (3, 6) if step in sent]


def test_a_tracker_that_is_added_when_a_run_is_resumed_gets_all_steps(
    tmp_path: Path, remembering: type[Remembering]
) -> None:
    record(tmp_path, tracked(tmp_path, {}, []), range(3), summary=False)
    record(tmp_path, tracked(tmp_path, {"mine": remembering}, [], done=2), range(3, 5))
    assert [call[0] for call in remembering.calls if isinstance(call[1], dict)] == [0, 1, 2, 3, 4]


def test_failures_are_shown_once_and_counted(tmp_path: Path, remembering: type[Remembering]) -> None:
    said: list[str] = []
    kinds = {"bad": Refusing, "none": NotStarting, "unmade": NotConstructed, "good": remembering}
    record(tmp_path, tracked(tmp_path, kinds, said), range(1, 5), summary=False)
    assert sorted(line for line in said if "delivered" not in line) == [
        "tracker bad: failed at step 1: OSError: step 1: no route to host; the run continues, and further failures are "
        "only counted",
        "tracker none: failed at its start: RuntimeError: no account; the run continues, and further failures are only "
        "counted",
        "tracker unmade: failed at its start: RuntimeError: no module of its own; the run continues, and further "
        "failures are only counted",
    ]
    assert "tracker bad: 1 records were delivered, 4 failed, 0 were dropped" in said
    kept = json.loads((tmp_path / TRACKERS_FILE).read_text())
    assert {name: entry["failed"] for name, entry in kept.items()} == {
        "bad": 4,
        "none": 6,
        "unmade": 6,
        "good": 0,
    }
    assert len([call for call in remembering.calls if isinstance(call[1], dict)]) == 4


def test_a_tracker_whose_start_fails_is_started_again_and_gets_all_steps(
    tmp_path: Path, remembering: type[Remembering], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    class StartsLate(remembering):  # type: ignore[misc, valid-type]
        def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
            attempts.append(1)
            if len(attempts) < 3:
                raise ConnectionError("no route to host")
            return super().start(run, config, resumed_id)

    monkeypatch.setattr(trackers_module, "RETRY_S", 0.0)
    record(tmp_path, tracked(tmp_path, {"late": StartsLate}, []), range(1, 6))
    assert [call[0] for call in remembering.calls if isinstance(call[1], dict)] == [1, 2, 3, 4, 5]
    assert len(attempts) == 3


def test_a_tracker_that_exits_is_counted_and_no_password_of_its_server_is_shown(tmp_path: Path) -> None:
    class Exiting(Refusing):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise SystemExit("no route to http://user:secret@host:5000/api")

    said: list[str] = []
    record(tmp_path, tracked(tmp_path, {"bad": Exiting}, said), range(1, 3), summary=False)
    assert "tracker bad: failed at step 1: SystemExit: no route to http://host:5000/api; the run" in said[0]
    assert json.loads((tmp_path / TRACKERS_FILE).read_text())["bad"]["failed"] == 2


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file_of_trackers_ends_no_run(
    content: str, tmp_path: Path, remembering: type[Remembering]
) -> None:
    (tmp_path / TRACKERS_FILE).write_text(content)
    said: list[str] = []
    record(tmp_path, tracked(tmp_path, {"mine": remembering}, said, done=0), range(1, 2))
    assert "trackers.json: not " in said[0]
    assert remembering.calls[0] == ("start", tmp_path.name, 3, "")


def test_an_error_of_mlflow_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mlflow(ModuleType):
        def get_tracking_uri(self) -> str:
            return "http://user:secret@host:5000"

        def MlflowClient(self) -> None:
            raise OSError(f"no route to {self.get_tracking_uri()}")

    monkeypatch.setitem(sys.modules, "mlflow", Mlflow("mlflow"))
    with pytest.raises(ConfigError, match="its store http://host:5000: no route to http://host:5000"):
        find_trackers(["mlflow"])


def test_a_stuck_tracker_holds_up_neither_the_run_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers_module, "END_S", 0.5)
    monkeypatch.setattr(trackers_module, "MAX_WAITING", 3)
    Stuck.free.clear()
    said: list[str] = []
    began = time.monotonic()
    record(tmp_path, tracked(tmp_path, {"stuck": Stuck}, said), range(1, 9), summary=False)
    taken = time.monotonic() - began
    Stuck.free.set()
    assert taken < TIMEOUT_S / 2
    assert "tracker stuck: is too slow, and records are dropped; the run continues, and" in said[0]
    assert "tracker stuck: did not end within 0.5 s; 3 records were waiting" in said
    assert json.loads((tmp_path / TRACKERS_FILE).read_text())["stuck"]["dropped"] >= 4


def test_a_tracker_ends_beside_a_stuck_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembering: type[Remembering]
) -> None:
    monkeypatch.setattr(trackers_module, "END_S", 0.5)
    Stuck.free.clear()
    said: list[str] = []
    record(
        tmp_path, tracked(tmp_path, {"stuck": Stuck, "mine": remembering}, said), range(1, 3), summary=False
    )
    Stuck.free.set()
    assert remembering.calls[-1][:2] == ("end", "finished")
    assert [line for line in said if "did not end" in line] == [
        "tracker stuck: did not end within 0.5 s; 2 records were waiting"
    ]


def test_trackers_are_told_the_end_before_the_collector_of_traces_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembering: type[Remembering]
) -> None:
    """The end of a run waits for both at the same time."""
    told: list[bool] = []

    class SlowTraces(Observer):
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Observer:
            return self

        def __exit__(self, *_: object) -> None:
            deadline = time.monotonic() + TIMEOUT_S / 2
            while remembering.calls[-1] != ("end", "failed", {}) and time.monotonic() < deadline:
                time.sleep(0.01)
            told.append(remembering.calls[-1] == ("end", "failed", {}))

    monkeypatch.setattr(recording, "Traces", SlowTraces)
    monkeypatch.setattr(recording, "find_trackers", lambda _: {"mine": remembering})
    plan = SimpleNamespace(
        identity=SimpleNamespace(algorithm="ppo"),
        algorithm=SimpleNamespace(resolved=lambda _: CONFIG),
        resumes=None,
    )
    config = SimpleNamespace(tracking=TrackingTable(opentelemetry=True))
    cluster = SimpleNamespace(running=dict, memory=dict)

    def run() -> None:
        directory, progress = RunDirectory(tmp_path), Progress(Console(file=StringIO()))
        with recording.recording(plan, config, cluster, directory, progress, {}, None):  # type: ignore[arg-type]
            raise RlhfError("lost")

    with pytest.raises(RlhfError, match="lost"):
        run()
    assert told == [True]


@pytest.mark.parametrize(
    ("error", "status"), [(RlhfError("lost"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_a_tracker_is_told_how_the_run_ended(
    error: BaseException, status: str, tmp_path: Path, remembering: type[Remembering]
) -> None:
    def run() -> None:
        with tracked(tmp_path, {"mine": remembering}, []):
            raise error

    with pytest.raises(type(error)):
        run()
    assert remembering.calls[-1] == ("end", status, {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wandv", r"'wandv' is unknown; did you mean 'wandb'\?; known: mlflow, wandb, or module:object"),
        ("no.such:Thing", "'no.such:Thing' cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:Endless", "Endless' does not implement end"),
        (f"{__name__}:Unchecked", "Unchecked: its check failed: KeyError: 'TOKEN'"),
        ("controller.tracking.metrics:Sample", r"is no subclass of controller\.tracking\.tracker\.Tracker"),
    ],
)
def test_an_unknown_tracker_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"tracking.trackers: .*{said}"):
        find_trackers([name])


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_refused_with_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name}: .*; pip install 'rlhf-cluster\[{name}\]'"):
        find_trackers([name])


def test_a_tracker_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trackers: .*wandb: named more than once"):
        validate(TrackingTable, {"trackers": ["wandb", "mlflow", "wandb"]}, "run.toml")


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@needs("wandb")
@pytest.mark.timeout(180)
def test_wandb_offline_has_each_step_once_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackers_module, "END_S", TIMEOUT_S)
    kinds, said = find_trackers(["wandb"]), list[str]()
    record(tmp_path, tracked(tmp_path, kinds, said), range(5), summary=False)
    marks = mark_files(tmp_path)
    record(tmp_path, tracked(tmp_path, {}, []), range(5, 7), summary=False)  # lost by wandb
    cut_files(tmp_path, marks)
    record(tmp_path, tracked(tmp_path, kinds, said, done=4), range(5, 9))
    assert [line for line in said if "offline, in" not in line] == []
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert json.loads((tmp_path / TRACKERS_FILE).read_text())["wandb"]["id"] in path.name
    rows = wandb_rows(path)
    assert [row["_step"] for row in rows] == list(range(9))
    assert [row["reward/mean"] for row in rows] == [step / 8 for step in range(9)]
    assert [row["_step"] for row in rows if any(key.startswith("samples") for key in row)] == [0, 3, 6]


@needs("wandb")
def test_wandb_without_a_key_is_refused_without_asking_for_one(tmp_path: Path) -> None:
    code = "from controller.tracking.trackers import find_trackers; find_trackers(['wandb'])"
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "WANDB_MODE": "online"}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "ConfigError: tracking.trackers: wandb has no API key: set WANDB_API_KEY" in ran.stderr


@needs("mlflow")
@pytest.mark.timeout(180)
def test_mlflow_has_each_step_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "store"
    run_dir.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    with pytest.raises(ConfigError, match=r"tracking.trackers: mlflow cannot use its store file:"):
        find_trackers(["mlflow"])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(trackers_module, "END_S", TIMEOUT_S)
    kinds, said = find_trackers(["mlflow"]), list[str]()
    record(run_dir, tracked(run_dir, kinds, said), range(5), summary=False)
    marks = mark_files(run_dir)
    record(run_dir, tracked(run_dir, {}, []), range(5, 7), summary=False)  # lost by MLflow
    cut_files(run_dir, marks)
    record(run_dir, tracked(run_dir, kinds, said, done=4), range(5, 9))
    assert said == []
    client = importlib.import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in history] == [(step, step / 8) for step in range(9)]
    assert run.info.status == "FINISHED"
    assert run.data.params["services.actor.ranks"] == "2"
    assert run.data.tags["summary.actor_sha256"] == "abc"
    samples = [each.path for each in client.list_artifacts(run.info.run_id, "samples")]
    assert sorted(samples) == ["samples/step-0.jsonl", "samples/step-3.jsonl", "samples/step-6.jsonl"]


def wandb_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the history in a file of wandb: a log of LevelDB's format, in blocks of 32 KiB, behind a header of 7
    bytes."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, place, whole, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            found = messages.Record.FromString(whole)
            whole = b""
            if found.WhichOneof("record_type") == "history":
                items = found.history.item
                rows.append(
                    {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                )
    return rows
