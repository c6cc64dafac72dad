"""Files of a run: whole, readable by others, equal for equal runs, and loud about a full disk."""

import contextlib
import json
import math
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
from tensorboardX.record_writer import masked_crc32c

from controller.role_groups.dataflow import CallRecord
from controller.tracking import recorder as recording
from controller.tracking import run_directory
from controller.tracking import timeline as timelines
from controller.tracking.contents import RUN_FILE
from controller.tracking.figures import MAX_STRETCHES, Curve, Figures
from controller.tracking.metrics import MetricsWriter, Sample, SamplesWriter, each_sample, read_metrics
from controller.tracking.progress import Progress, Status, display, step_line
from controller.tracking.recorder import Recorder
from controller.tracking.report import write_report
from controller.tracking.report_page import before_and_after, stage_means
from controller.tracking.run_directory import RunDirectory, json_text
from controller.tracking.tensorboard import EventFile, crc32c
from controller.tracking.timeline import Timeline, Track, read_events
from rlhf.errors import ConfigError, InvalidRequest, RlhfError

NOON = 1_767_268_800.0
METRICS = {"reward/mean": 0.1 + 0.2, "kl/mean": 1e-9, "actor/loss": -2.0, "mem/actor_bytes": 123456789}
NEEDS_DEV_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def log(run_dir: Path, *steps: dict[str, float]) -> None:
    with contextlib.closing(MetricsWriter(run_dir)) as writer:
        for step, metrics in enumerate(steps):
            writer.log(step, metrics)


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^metric 'mine' has to be a number \(given: 'text'\)$"):
        log(tmp_path, {"mine": "text"})  # type: ignore[dict-item]


def open_files(directory: Path) -> list[str]:
    """Paths of the files below a directory that this process has open."""
    return [each.path for each in psutil.Process().open_files() if Path(each.path).is_relative_to(directory)]


class TestRunDirectory:
    def test_two_made_in_the_same_second_differ(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run_directory.time, "strftime", lambda form: "20260101-120000")
        paths = [RunDirectory.create(tmp_path / "runs", "demo").path for _ in range(3)]
        assert len({*paths}) == 3
        assert all(re.fullmatch(r"demo-\d{8}-\d{6}(-\d)?", path.name) and path.is_dir() for path in paths)

    @pytest.mark.parametrize(("algorithm", "shown"), [("ppo", "ppo"), ("<lambda> a/b", "_lambda_a_b")])
    def test_it_is_named_after_the_algorithm(self, tmp_path: Path, algorithm: str, shown: str) -> None:
        path = RunDirectory.create(tmp_path, "demo", algorithm).path
        assert re.fullmatch(rf"demo-{shown}-\d{{8}}-\d{{6}}", path.name)

    def test_a_parent_that_cannot_be_written_to_is_a_config_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=rf"run directory {tmp_path}/file/runs: not a directory"):
            RunDirectory.create(tmp_path / "file" / "runs", "demo")

    def test_too_little_free_space_is_a_config_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            run_directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=15.5 * 2**20)
        )
        with pytest.raises(ConfigError, match=r"15\.5 MiB free, at least 16 MiB are needed"):
            RunDirectory.create(tmp_path, "demo")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["", "..", "a/b"])
    def test_a_name_that_is_no_path_component_is_a_config_error(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match="run name"):
            RunDirectory.create(tmp_path, name)

    @NEEDS_DEV_FULL
    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path: Path) -> None:
        run = RunDirectory(tmp_path)
        run.write_json("summary.json", {"steps": 1})
        (tmp_path / ".summary.json.tmp").symlink_to("/dev/full")
        with pytest.raises(RlhfError, match=r"no space left on device while writing summary\.json"):
            run.write_json("summary.json", {"steps": 2})
        assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
        assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]

    def test_json_is_strict_and_floats_that_are_not_finite_read_back(self) -> None:
        def refuse(constant: str) -> float:
            raise AssertionError(f"{constant} is not JSON")

        text = json_text({"x": [math.nan, math.inf, -math.inf, 0.1]})
        back = [float(value) for value in json.loads(text, parse_constant=refuse)["x"]]
        assert math.isnan(back[0])
        assert back[1:] == [math.inf, -math.inf, 0.1]


class TestDeletedDirectory:
    @pytest.mark.parametrize("deleted", ["metrics.jsonl", "."])
    def test_a_run_whose_files_were_deleted_is_told_by_its_next_write(
        self, tmp_path: Path, deleted: str
    ) -> None:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        with contextlib.closing(MetricsWriter(run_dir)) as writer:
            writer.log(0, METRICS)
            path = run_dir / deleted
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            run_dir.mkdir(exist_ok=True)
            with pytest.raises(RlhfError, match=r"run: metrics\.jsonl was deleted or replaced while"):
                writer.log(1, METRICS)


class TestRecorder:
    def test_all_is_there_while_the_run_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recording, "REPORT_EVERY_S", 0.0)
        recorder = Recorder(RunDirectory(tmp_path), Progress(Console(file=StringIO())), {"seed": 3})
        recorder.samples(0, [Sample("1+1=", "3", "2", 0.0)])
        recorder.step(0, {"evaluation/accuracy": 0.25})
        recorder.calls(1, [CallRecord("actor", "update_actor", NOON, NOON + 1, {}, 1, ())])
        recorder.step(1, METRICS)
        # As a kill would leave it: nothing is closed.
        assert len(read_metrics(tmp_path)) == 2
        assert "update_actor" in [event["name"] for event in read_events(tmp_path / "timeline.json")]
        assert "running, after step 1" in (tmp_path / "report.html").read_text()
        write_report(tmp_path)
        assert "interrupted after step 1" in (tmp_path / "report.html").read_text()
        assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 3}

    def test_the_timeline_shows_when_a_service_was_offloaded(self, tmp_path: Path) -> None:
        recorder = Recorder(RunDirectory(tmp_path), Progress(Console(file=StringIO())))
        moves = [("offload", 1.0, 2.0), ("onload", 5.0, 6.0), ("onload", 7.0, 8.0)]
        records = [CallRecord("critic", name, NOON + a, NOON + b, {}, 1, ()) for name, a, b in moves]
        recorder.calls(3, records[:1])
        recorder.calls(4, records[1:])
        events = [each for each in read_events(tmp_path / "timeline.json") if each["name"] == "offloaded"]
        assert [(each["cat"], each["dur"], each["args"]) for each in events] == [
            ("device memory", 3_000_000, {"step": 4})
        ]

    @pytest.mark.parametrize("blocked", ["samples.jsonl", "tensorboard", "timeline.json", "run.json"])
    def test_a_file_that_cannot_be_opened_leaves_none_open(self, blocked: str, tmp_path: Path) -> None:
        """Also while the error is kept, whose frames have the writers."""
        if blocked in ("tensorboard", "timeline.json"):
            (tmp_path / blocked).touch()
        else:
            (tmp_path / blocked).mkdir()
        with pytest.raises(RlhfError, match=blocked) as raised:
            Recorder(RunDirectory(tmp_path), Progress(Console(file=StringIO())))
        assert (open_files(tmp_path), raised.type) == ([], RlhfError)

    @pytest.mark.parametrize(
        "kind",
        [EventFile, MetricsWriter, lambda path: Timeline(path, NOON)],
        ids=["events", "metrics", "timeline"],
    )
    def test_a_first_record_that_cannot_be_written_leaves_no_file_open(
        self, kind: Callable[[Path], object], tmp_path: Path
    ) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(RlhfError, match="file too large while writing") as raised:
                kind(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (open_files(tmp_path), raised.type) == ([], RlhfError)

    def test_the_report_of_the_files_is_that_of_the_run(self, tmp_path: Path) -> None:
        with Recorder(RunDirectory(tmp_path), Progress(Console(file=StringIO()))) as recorder:
            for step in range(12):
                recorder.step(step, step_metrics(step))
                recorder.samples(step, [Sample("1+1=", str(step), "2", 0.0)])
        at_the_end = (tmp_path / "report.html").read_text()
        assert write_report(tmp_path).read_text() == at_the_end

    def test_a_run_whose_directory_was_deleted_does_not_end_well(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        recorder = Recorder(RunDirectory(run_dir), Progress(Console(file=StringIO())))
        recorder.step(0, METRICS)
        shutil.rmtree(run_dir)
        # A service that exports its weights makes the directory anew.
        run_dir.mkdir()
        with pytest.raises(RlhfError, match="was deleted or replaced"):
            recorder.__exit__(None, None, None)
        with pytest.raises(RlhfError, match="was deleted or replaced"):
            recorder.summary({"steps": 1})


class TestMetrics:
    @given(st.dictionaries(st.text(min_size=1).map(lambda key: f"x/{key}"), st.floats()))
    def test_numbers_come_back_bit_for_bit(self, metrics: dict[str, float]) -> None:
        line = json.loads(json_text({key: float(value) for key, value in metrics.items()}))
        assert {key: repr(float(value)) for key, value in line.items()} == {
            key: repr(value) for key, value in metrics.items()
        }

    def test_a_file_reads_back(self, tmp_path: Path) -> None:
        log(tmp_path, {"evaluation/accuracy": 0.25}, METRICS)
        assert read_metrics(tmp_path) == [{"step": 0, "evaluation/accuracy": 0.25}, {"step": 1, **METRICS}]

    def test_equal_numbers_give_equal_text(self, tmp_path: Path) -> None:
        for name, metrics in (("a", METRICS), ("b", dict(reversed(METRICS.items())))):
            (tmp_path / name).mkdir()
            log(tmp_path / name, metrics)
        assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()

    def test_a_line_is_step_first_then_sorted_keys(self, tmp_path: Path) -> None:
        log(tmp_path, {"time/step_s": 2, "kl/mean": 0.5, "a": math.nan})
        assert (tmp_path / "metrics.jsonl").read_text() == (
            '{"step": 0, "a": "NaN", "kl/mean": 0.5, "time/step_s": 2.0}\n'
        )

    def test_a_line_is_on_the_disk_before_close(self, tmp_path: Path) -> None:
        with contextlib.closing(MetricsWriter(tmp_path)) as writer:
            writer.log(1, METRICS)
            assert read_metrics(tmp_path) == [{"step": 1, **METRICS}]
            assert len(list(event_records(tmp_path))) == 2

    def test_a_line_cut_off_by_a_killed_writer_is_left_out(self, tmp_path: Path) -> None:
        log(tmp_path, METRICS, METRICS)
        with open(tmp_path / "metrics.jsonl", "r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 5)
        assert read_metrics(tmp_path) == [{"step": 0, **METRICS}]

    def test_a_damaged_line_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nrubbish\n{"step": 2}\n')
        with pytest.raises(RlhfError, match=r"metrics\.jsonl line 2: not JSON"):
            read_metrics(tmp_path)

    @pytest.mark.parametrize(("step", "metrics"), [(-1, {}), (0, {"step": 1.0})])
    def test_a_step_that_cannot_be_is_refused(
        self, tmp_path: Path, step: int, metrics: dict[str, float]
    ) -> None:
        with contextlib.closing(MetricsWriter(tmp_path)) as writer, pytest.raises(ValueError):
            writer.log(step, metrics)

    @NEEDS_DEV_FULL
    def test_a_full_disk_is_an_error_of_the_very_line(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with contextlib.closing(MetricsWriter(tmp_path)) as writer, pytest.raises(RlhfError) as caught:
            writer.log(1, METRICS)
        assert str(caught.value) == (
            f"run directory {tmp_path}: no space left on device while writing metrics.jsonl"
        )

    def test_a_disk_that_fills_while_a_run_goes_on_is_an_error(self, tmp_path: Path) -> None:
        """The limit on the size of files stands in for the disk; it fails in the middle of a line."""
        code = (
            "import resource, signal, sys; from pathlib import Path\n"
            "from controller.tracking.metrics import MetricsWriter\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "writer = MetricsWriter(Path(sys.argv[1]))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
            "[writer.log(step, {'loss': step / 7}) for step in range(1000)]\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        assert f"run directory {tmp_path}: file too large while writing" in done.stderr
        lines = read_metrics(tmp_path)
        assert [line["step"] for line in lines] == list(range(len(lines)))
        assert len(lines) > 10

    def test_samples_read_back(self, tmp_path: Path) -> None:
        rows = [Sample("1+1=", "2\n", "2", 1.0), Sample("é<&>\x00", "\U0001f600", "", -0.5, "aime")]
        with contextlib.closing(SamplesWriter(tmp_path)) as writer:
            writer.log(0, rows[:1])
            writer.log(10, rows)
        assert list(each_sample(tmp_path)) == [(0, rows[0]), (10, rows[0]), (10, rows[1])]

    @NEEDS_DEV_FULL
    def test_a_full_disk_is_an_error_of_the_samples_too(self, tmp_path: Path) -> None:
        (tmp_path / "samples.jsonl").symlink_to("/dev/full")
        with (
            contextlib.closing(SamplesWriter(tmp_path)) as writer,
            pytest.raises(RlhfError, match="no space"),
        ):
            writer.log(0, [Sample("p", "r", "g", 1.0)])


def event_records(run_dir: Path) -> Iterator[bytes]:
    """The records of the one event file, their checksums checked with tensorboardX."""
    (path,) = (run_dir / "tensorboard").glob("events.out.tfevents.*")
    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
        assert int.from_bytes(data[12 + size : 16 + size], "little") == masked_crc32c(data[12 : 12 + size])
        yield data[12 : 12 + size]
        data = data[16 + size :]


class TestTensorBoard:
    def test_events_parse_as_the_messages_of_tensorboardx(self, tmp_path: Path) -> None:
        log(tmp_path, {}, *({"reward/mean": step / 8, "größe": 1e300} for step in range(300)))
        header, empty, *events = [Event.FromString(data) for data in event_records(tmp_path)]
        assert header.file_version == "brain.Event:2"
        assert (empty.step, list(empty.summary.value)) == (0, [])
        assert [event.step for event in events] == list(range(1, 301))
        assert [{value.tag: value.simple_value for value in event.summary.value} for event in events] == [
            {"reward/mean": step / 8, "größe": math.inf} for step in range(300)
        ]
        assert all(header.wall_time <= event.wall_time <= header.wall_time + 60 for event in events)

    def test_crc32c_of_the_check_string(self) -> None:
        assert crc32c(b"123456789") == 0xE3069283

    def test_a_writer_starts_no_thread(self, tmp_path: Path) -> None:
        before = threading.enumerate()
        with contextlib.closing(MetricsWriter(tmp_path)) as writer:
            writer.log(0, METRICS)
            assert threading.enumerate() == before

    def test_the_writer_loads_no_torch(self) -> None:
        code = "import sys, controller.tracking.metrics; sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


Trace = list[dict[str, Any]]


def written(timeline: Timeline, path: Path) -> Trace:
    timeline.close()
    trace = json.loads((path / "timeline.json").read_text())
    assert read_events(path / "timeline.json") == trace
    return trace


def complete_events(trace: Trace) -> Trace:
    return [event for event in trace if event["ph"] == "X"]


def names(trace: Trace, kind: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace
        if event["ph"] == "M" and event["name"] == kind
    }


class TestTimeline:
    def test_an_event_has_the_fields_perfetto_needs(self, tmp_path: Path) -> None:
        timeline = Timeline(tmp_path, NOON)
        timeline.add(("actor", "rank 0 queue"), "wait", NOON, NOON + 0.5)
        timeline.add(("actor", "rank 0 compute"), "update_actor", NOON + 0.5, NOON + 2.25, {"call": "c7"})
        timeline.add(("critic", "rank 0 compute"), "update_critic", NOON + 0.25, NOON + 1, {"loss": math.nan})
        trace = written(timeline, tmp_path)
        assert set(names(trace, "process_name").values()) == {"actor", "critic"}
        threads = names(trace, "thread_name")
        assert {
            event["name"]: (threads[event["pid"], event["tid"]], event["ts"], event["dur"], event["args"])
            for event in complete_events(trace)
        } == {
            "wait": ("rank 0 queue", 0, 500_000, {}),
            "update_actor": ("rank 0 compute", 500_000, 1_750_000, {"call": "c7"}),
            "update_critic": ("rank 0 compute", 250_000, 750_000, {"loss": "NaN"}),
        }
        assert trace[0]["args"] == {"unix_s": NOON}

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([("a", "x"), ("a", "y"), ("b", "x")]), st.integers(0, 9), st.integers(0, 9)
            )
        ),
        st.integers(1, 5),
    )
    def test_every_event_is_kept_and_none_overlaps_another_in_part(
        self, tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[Track, int, int]], together: int
    ) -> None:
        directory = tmp_path_factory.mktemp("timeline")
        timeline = Timeline(directory, NOON)
        for number, (track, start, length) in enumerate(spans):
            timeline.add(track, str(number), NOON + start, NOON + start + length)
            if number % together == 0:
                timeline.flush()
        trace = written(timeline, directory)
        events = complete_events(trace)
        assert sorted(int(event["name"]) for event in events) == list(range(len(spans)))
        processes, threads = names(trace, "process_name"), names(trace, "thread_name")
        for event in events:
            process, thread = spans[int(event["name"])][0]
            assert processes[event["pid"], 0] == process
            assert re.fullmatch(rf"{thread}( \(\d+\))?", threads[event["pid"], event["tid"]])
        for one in events:
            for other in events:
                if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                    start, end = other["ts"], other["ts"] + other["dur"]
                    assert not one["ts"] < start < one["ts"] + one["dur"] < end

    def test_events_apart_or_nested_share_a_thread(self, tmp_path: Path) -> None:
        timeline = Timeline(tmp_path, NOON)
        for start, end in ((0, 10), (2, 5), (5, 10), (10, 12)):
            timeline.add(("actor", "rank 0"), "call", NOON + start, NOON + end)
        assert set(names(written(timeline, tmp_path), "thread_name").values()) == {"rank 0"}

    def test_files_are_bounded_and_the_last_events_are_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(timelines, "MAX_BYTES", 4000)
        timeline = Timeline(tmp_path, NOON)
        for number in range(200):
            timeline.add(("actor", "rank 0"), str(number), NOON + number, NOON + number + 1)
            timeline.flush()
        last = complete_events(written(timeline, tmp_path))
        earlier = complete_events(read_events(tmp_path / "timeline-earlier.json"))
        found = [int(event["name"]) for event in [*earlier, *last]]
        assert found == list(range(found[0], 200))
        assert len(found) > 20
        assert all(path.stat().st_size < 5000 for path in tmp_path.iterdir())
        assert set(names(last, "thread_name")) == set(names(earlier, "thread_name"))

    def test_it_holds_no_event_that_was_written(self, tmp_path: Path) -> None:
        timeline = Timeline(tmp_path, NOON)
        tracemalloc.start()
        for number in range(2000):
            timeline.add(("actor", "rank 0"), "call", NOON + number, NOON + number + 1, {"step": number})
            timeline.flush()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held < 50_000

    def test_one_whose_writer_was_killed_has_all_that_was_written(self, tmp_path: Path) -> None:
        timeline = Timeline(tmp_path, NOON)
        for number in range(3):
            timeline.add(("actor", "rank 0"), str(number), NOON + number, NOON + number + 1)
            timeline.flush()
        path = tmp_path / "timeline.json"
        assert [event["name"] for event in complete_events(read_events(path))] == ["0", "1", "2"]
        path.write_bytes(path.read_bytes()[:-9])
        assert [event["name"] for event in complete_events(read_events(path))] == ["0", "1"]

    def test_a_clock_that_was_set_back_gives_an_event_without_length(self, tmp_path: Path) -> None:
        timeline = Timeline(tmp_path, NOON)
        timeline.add(("actor", "rank 0"), "call", NOON, NOON - 3)
        assert complete_events(written(timeline, tmp_path))[0]["dur"] == 0


class TestProgress:
    def test_without_a_terminal_each_step_is_one_plain_line(self) -> None:
        out = StringIO()
        with Progress(Console(file=out, width=40)) as progress:
            progress.begin(60)
            progress.stage({"actor.generate_sequences": "3/8"})
            progress.step(0, {"evaluation/accuracy": 0.25})
            progress.step(
                1,
                {"reward/mean": 0.5, "kl/mean": 0.0012, "time/tokens_per_s": 12345.0, "time/step_s": 2.345},
            )
            progress.message("[run] saved")
        assert out.getvalue().splitlines() == [
            "step 0/60  held-out 25.0 %",
            "step 1/60  reward 0.500  kl 0.0012  12,345 tokens/s  2.35 s",
            "[run] saved",
        ]

    @pytest.mark.parametrize(
        ("metrics", "line"),
        [
            ({"actor/loss": 0.5185, "time/step_s": 0.3}, "step 1/2  loss 0.518  0.30 s"),
            ({"actor/loss": -0.003, "dpo/loss": 0.6728}, "step 1/2  loss 0.673"),
            ({"reward/loss": 0.6986}, "step 1/2  loss 0.699"),
            ({"reward/mean": 0.5, "actor/loss": -2.0}, "step 1/2  reward 0.500"),
            ({"reward/mean": 0.5, "actor/ref_kl": 0.002}, "step 1/2  reward 0.500  kl 0.002"),
            ({"kl/mean": 0.1, "actor/ref_kl": 0.2, "actor/loss": -2.0}, "step 1/2  kl 0.1"),
        ],
        ids=["sft", "dpo", "reward_model", "no reference", "kl in the loss", "distill"],
    )
    def test_a_step_shows_the_kl_or_without_rewards_the_loss(
        self, metrics: dict[str, float], line: str
    ) -> None:
        assert step_line(1, 2, metrics) == line

    def test_an_evaluation_shows_no_number_of_steps(self) -> None:
        out, screen = StringIO(), StringIO()
        terminal = Console(file=screen, force_terminal=True, width=100)
        for console in (Console(file=out), terminal):
            with Progress(console, has_steps=False) as progress:
                progress.begin(50)
                progress.step(0, {"evaluation/accuracy": 0.25})
        assert out.getvalue() == "held-out 25.0 %\n"
        assert "held-out 25.0 %" in screen.getvalue()
        assert "0/50" not in screen.getvalue()

    def test_a_step_without_numbers_has_a_line_too(self) -> None:
        assert step_line(2, 3, {}) == "step 2/3"

    def test_the_display_shows_all_that_is_known(self) -> None:
        console = Console(file=StringIO(), width=120, record=True)
        metrics = {"reward/mean": 0.5, "evaluation/accuracy": 0.6, "time/tokens_per_s": 900.0}
        running = {"actor.update_actor": "", "critic.update_critic": "2/4"}
        memory = {"actor": 3.0 * 2**20}
        console.print(display(Status(60, 12, 24.0, metrics, {"evaluation/accuracy": 0.25}, running, memory)))
        text = console.export_text()
        for part in (
            "step 12/60",
            "24.0 s, about 1 min 36 s left",
            "reward 0.500",
            "held-out 25.0 % → 60.0 %",
            "900 tokens/s",
            "actor.update_actor  ·  critic.update_critic 2/4",
            "actor 3.0 MiB",
        ):
            assert part in text

    @pytest.mark.parametrize("how", ["raise ValueError", "os.kill(os.getpid(), signal.SIGINT)", "pass"])
    def test_the_terminal_is_restored(self, how: str) -> None:
        code = (
            "import os, signal, threading\n"
            "from controller.tracking.progress import Progress\n"
            "with Progress() as progress:\n"
            "    progress.begin(3)\n"
            "    update = lambda: [progress.stage({'actor.x': str(n)}) for n in range(1000)]\n"
            "    threading.Thread(target=update).start()\n"
            "    progress.step(1, {'reward/mean': 0.5})\n"
            "    progress.message('saved')\n"
            f"    {how}\n"
        )
        shown = on_terminal([sys.executable, "-c", code])
        hidden, restored = shown.rfind("\x1b[?25l"), shown.rfind("\x1b[?25h")
        assert 0 <= hidden < restored
        assert "step 1/3" in shown
        assert "saved" in shown

    def test_a_run_goes_on_where_the_reader_of_its_output_has_ended(self) -> None:
        code = (
            "import sys\n"
            "from controller.tracking.progress import Progress\n"
            "with Progress() as progress:\n"
            "    progress.message('first')\n"
            "    sys.stdin.readline()\n"
            "    progress.message('second')\n"
            "    progress.step(1, {'reward/mean': 0.5})\n"
            "print('third')\n"
            "sys.stderr.write('ended')\n"
        )
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        ) as run:
            assert run.stdin
            assert run.stdout
            assert run.stderr
            assert run.stdout.readline() == "first\n"
            run.stdout.close()
            run.stdin.write("\n")
            run.stdin.close()
            assert run.stderr.read() == "ended"
        assert run.returncode == 0

    def test_threads_may_update_it_together(self) -> None:
        out = StringIO()
        with Progress(Console(file=out, force_terminal=True, width=100)) as progress:
            progress.begin(10)

            def update(service: str) -> None:
                for number in range(200):
                    progress.stage({f"{service}.call": str(number)})
                    progress.memory(service, number)
                    progress.step(number % 10, {f"x/{service}{number}": 1.0})

            threads = [
                threading.Thread(target=update, args=(name,)) for name in ("actor", "critic", "reward")
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=30)
            assert not any(thread.is_alive() for thread in threads)
        assert "actor 199 B" in out.getvalue()


def on_terminal(command: list[str]) -> str:
    """Output of a command on a terminal of its own."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    deadline = threading.Timer(60, child.send_signal, [signal.SIGKILL])
    deadline.start()
    shown = b""
    # Linux says that the other end is gone with EIO.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            shown += data
    child.wait()
    deadline.cancel()
    os.close(ours)
    return shown.decode(errors="replace")


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A run of ten steps with all metrics."""
    run = RunDirectory.create(tmp_path, "demo")
    log(run.path, *(step_metrics(step) for step in range(11)))
    with contextlib.closing(SamplesWriter(run.path)) as writer:
        writer.log(0, [Sample("2+2=", "<script>alert(1)</script>\x00", "4", 0.0)])
        writer.log(10, [Sample("2+2=", "4", "4", 1.0)])
    run.write_text("config.toml", '[run]\nname = "<demo>"\n')
    run.write_json(
        "summary.json",
        {
            "accuracy_before": 0.242,
            "accuracy_after": 0.617,
            "steps": 10,
            "tokens_per_s": 2411.0,
            "wall_s": 141.2,
            "actor_sha256": "9f" * 32,
            "seed": 7,
        },
    )
    return run.path


def step_metrics(step: int) -> dict[str, float]:
    evaluation = {"evaluation/accuracy": 0.2 + step / 25} if step % 5 == 0 else {}
    if step == 0:
        return evaluation
    return evaluation | {
        "reward/mean": 0.2 + step / 30,
        "kl/mean": step / 1000,
        "actor/entropy": 1 / step,
        "response/length_mean": 3.0,
        "time/step_s": 2.0,
        "time/generate_sequences_s": 0.5,
        "time/update_actor_s": 1.0,
        "time/tokens_per_s": 2000.0 + step,
        "mem/actor_bytes": 2.0**20 * step,
        "transfer/controller_bytes": 100.0,
        "transfer/batch_bytes": 1000.0,
    }


def page(run_dir: Path) -> ElementTree.Element:
    """The report, parsed as the XML that it promises to be."""
    return ElementTree.fromstring(write_report(run_dir).read_text().removeprefix("<!DOCTYPE html>"))


def text_of(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def cards(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {str(section.findtext("h2")): section for section in root.iter("section")}


class TestReport:
    def test_a_finished_run_has_every_section(self, finished_run: Path) -> None:
        root = page(finished_run)
        assert list(cards(root)) == [
            "Learning curve",
            "KL to the reference",
            "Entropy",
            "Response length",
            "Throughput",
            "Stage times",
            "Memory of the services",
            "Bytes through the controller",
            "Sample responses",
            "Configuration",
        ]
        tiles = {
            tile.findtext("dt"): tile.findtext("dd")
            for tile in root.iter("div")
            if tile.find("dt") is not None
        }
        assert tiles == {
            "Held-out accuracy before": "24.2 %",
            "Held-out accuracy after": "61.7 %",
            "Steps": "10",
            "Tokens per second": "2,411",
            "Wall time": "2 min 21 s",
            "Seed": "7",
            "SHA-256 of the final actor": "9f" * 32,
        }
        assert "complete" in text_of(root)

    def test_losses_and_the_kl_in_the_loss_have_curves(self, tmp_path: Path) -> None:
        run = RunDirectory.create(tmp_path, "pairs")
        names: list[str] = ["actor/ref_kl", "actor/loss", "dpo/loss", "dpo/accuracy"]
        log(run.path, *(dict.fromkeys(names, step / 10) for step in range(5)))
        assert list(cards(page(run.path)))[:4] == [
            "KL to the reference, in the loss",
            "Actor loss",
            "DPO loss",
            "DPO training pairs in the right order",
        ]

    def test_it_loads_nothing(self, finished_run: Path) -> None:
        class Loads(HTMLParser):
            found: list[str] = []

            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                self.found += [tag] * (tag in ("script", "link", "img", "iframe", "object"))
                self.found += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]

        html = write_report(finished_run).read_text()
        parser = Loads()
        parser.feed(html)
        assert parser.found == []
        assert not re.search(r"https?:|url\(|@import", html)

    def test_points_of_the_learning_curve_have_hover_titles(self, finished_run: Path) -> None:
        titles = [element.text for element in cards(page(finished_run))["Learning curve"].iter("title")]
        assert "held-out accuracy, step 10: 0.6" in titles
        assert "mean training reward, step 1: 0.2333" in titles

    def test_rewards_of_another_scale_get_a_chart_of_their_own(self, finished_run: Path) -> None:
        with contextlib.closing(MetricsWriter(finished_run)) as writer:
            writer.log(11, {"reward/mean": -40.0})
        titles = list(cards(page(finished_run)))
        assert titles[:2] == ["Learning curve: held-out accuracy", "Learning curve: training reward"]

    def test_what_the_policy_wrote_is_text_not_markup(self, finished_run: Path) -> None:
        table = cards(page(finished_run))["Sample responses"]
        assert "<script>alert(1)</script>\N{REPLACEMENT CHARACTER}" in text_of(table)

    def test_shares_of_transfers_and_memory_are_said(self, finished_run: Path) -> None:
        sections = cards(page(finished_run))
        assert "100 B, or 10.0 % of the batch" in text_of(sections["Bytes through the controller"])
        assert "actor: 10.0 MiB" in text_of(sections["Memory of the services"])
        assert "update_actor: 1.000 s, 50.0 %" in text_of(sections["Stage times"])

    def test_an_interrupted_run_has_a_report_as_far_as_it_got(self, finished_run: Path) -> None:
        (finished_run / "summary.json").unlink()
        with open(finished_run / "metrics.jsonl", "ab") as file:
            file.write(b'{"step": 11, "rew')
        root = page(finished_run)
        assert "interrupted after step 10" in text_of(root)
        assert "Held-out accuracy after 60.0 %" in text_of(root)
        assert "Learning curve" in cards(root)

    def test_a_reward_that_is_no_share_is_shown_as_a_mean_and_not_in_percent(self, tmp_path: Path) -> None:
        log(tmp_path, {"evaluation/reward": -25.5}, {"reward/mean": -30.0, "evaluation/reward": 3.25})
        root = page(tmp_path)
        assert "Held-out mean reward before -25.5 Held-out mean reward after 3.25" in text_of(root)
        assert "accuracy" not in text_of(root)
        assert "Learning curve: held-out mean reward" in cards(root)

    def test_what_the_run_is_is_told(self, finished_run: Path) -> None:
        actor = {"cpu": "AMD EPYC", "cpu_capability": "AVX2", "torch": "2.13.0", "began_from": "models/a"}
        known = {"algorithm": "ppo", "command_line": "rlhf-controller --algo ppo", "version": "0.1.0"}
        RunDirectory(finished_run).write_json(
            RUN_FILE, {**known, "commit": "ab12", "services": {"actor": actor}}
        )
        text = text_of(cards(page(finished_run))["The run"])
        assert "Algorithm ppo Command line rlhf-controller --algo ppo Version 0.1.0 ab12" in text
        assert "cpu AMD EPYC, cpu capability AVX2, torch 2.13.0, began from models/a" in text

    def test_a_directory_that_is_not_there_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(RlhfError, match="gone: no such directory"):
            write_report(tmp_path / "gone")
        (model := tmp_path / "model").mkdir()
        (model / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"model: it has neither metrics\.jsonl nor config\.toml"):
            write_report(model)
        assert not (model / "report.html").exists()

    def test_memory_does_not_grow_with_the_steps(self) -> None:
        """Nor while the first stretches of a curve fill."""

        def held(steps: int) -> int:
            tracemalloc.start()
            figures = Figures()
            for step in range(steps):
                figures.add(step, step_metrics(step))
            nbytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return nbytes

        early = held(10)
        assert early < 1_000_000
        assert held(4 * MAX_STRETCHES) - early < 50_000

    def test_a_curve_keeps_its_outline(self) -> None:
        curve, values = Curve(), [math.sin(step / 50) * step for step in range(5000)]
        values[1234] = math.nan
        for step, value in enumerate(values):
            curve.add(step, value)
        points = curve.points
        assert len(points) <= 3 * 2 * MAX_STRETCHES
        assert [step for step, _ in points] == sorted({step for step, _ in points})
        assert all(values[int(step)] == value for step, value in points if step != 1234)
        shown = [value for _, value in points if math.isfinite(value)]
        assert (min(shown), max(shown)) == (min(values), max(v for v in values if math.isfinite(v)))
        assert 1234 in [step for step, _ in points]

    def test_a_curve_of_few_points_has_them_all(self) -> None:
        curve = Curve()
        for step in range(300):
            curve.add(step, step % 7)
        assert curve.points == [(step, step % 7) for step in range(300)]

    def test_a_run_that_did_no_step_has_a_report(self, tmp_path: Path) -> None:
        (tmp_path / "config.toml").write_text("")
        root = page(tmp_path)
        assert "No step was completed." in text_of(root)
        assert not cards(root)

    @pytest.mark.parametrize(
        ("content", "why"), [(b"{", "not JSON"), (b"\xff", "not JSON"), (b"[]", "not a JSON")]
    )
    def test_a_damaged_summary_is_an_error_that_names_it(
        self, content: bytes, why: str, finished_run: Path
    ) -> None:
        (finished_run / "summary.json").write_bytes(content)
        with pytest.raises(RlhfError, match=rf"summary\.json: {why}"):
            write_report(finished_run)

    def test_stages_are_the_calls_not_the_step_nor_the_speed(self) -> None:
        figures = Figures()
        for step in range(3):
            figures.add(step, step_metrics(step))
        assert stage_means(figures) == {"update_actor": 1.0, "generate_sequences": 0.5}

    def test_samples_before_and_after_belong_to_one_prompt(self) -> None:
        figures = Figures()
        for step, prompts in ((0, "ab"), (5, "ab"), (9, "bac")):
            figures.add_samples(step, [Sample(prompt, f"{prompt}{step}", "", 0.0) for prompt in prompts])
        steps, pairs = before_and_after(figures.samples)
        assert steps == [0, 9]
        assert [(first.response, last.response) for first, last in pairs] == [("b0", "b9"), ("a0", "a9")]

    def test_samples_before_and_after_belong_to_one_source(self) -> None:
        samples = {step: [Sample("p", f"{name}{step}", "", 0.0, name) for name in "ab"] for step in (0, 9)}
        _, pairs = before_and_after(samples)
        assert [(first.response, last.response) for first, last in pairs] == [("a0", "a9"), ("b0", "b9")]
