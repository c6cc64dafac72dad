"""Checkpoints on the disk of the controller: what makes one complete, which are kept, how damage is found, and state
that comes back as it was."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.advantage.kl import AdaptiveKL, FixedKL
from controller.advantage.safe import Multiplier
from controller.algorithms import find_algorithm
from controller.checkpoints import saver
from controller.checkpoints.digests import Digest, digest_of, fingerprint
from controller.checkpoints.facts import (
    changed_learning_rates,
    check_config,
    check_contents,
    check_platform,
    contents_of,
)
from controller.checkpoints.journal import Journal
from controller.checkpoints.kept import KeptState
from controller.checkpoints.resume_point import ResumePoint
from controller.checkpoints.retention import best_of, to_remove
from controller.checkpoints.store import COMMIT, FILES, LATEST, CheckpointStore, Commit
from controller.checkpoints.termination import Termination
from controller.config.checkpoint import CheckpointTable
from controller.config.config import load
from controller.data import chat
from controller.identity import Identity
from controller.plan import with_new_keys
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.platform import platform_of
from controller.tracking.marks import Mark, check_marks, cut_files, mark_files
from controller.tracking.metrics import MetricsWriter, Sample, SamplesWriter, each_sample, read_metrics
from controller.tracking.run_directory import LOCK, RunDirectory
from controller.tracking.timeline import EARLIER_FILE, TIMELINE_FILE, Timeline, read_events
from rlhf.errors import ConfigError, CorruptWeights, RlhfError
from rlhf.v1.worker_pb2 import DescribeResponse

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
STATE = {"format": 1, "run": {}, "files": {}, "facts": {}}


def write(
    store: CheckpointStore, step: int, content: Mapping[str, Any] = MappingProxyType({}), **commit: Any
) -> Commit:
    """A complete checkpoint with the files of one service."""
    service = store.begin(step) / "actor"
    service.mkdir()
    (service / "rank-00000.safetensors").write_bytes(bytes(range(200)))
    (service / "manifest.json").write_text("{}")
    written = {f"actor/{path.name}": digest_of(path) for path in service.iterdir()}
    return store.commit(step, json.dumps({**STATE, "step": step, **content}), written, **commit)


class TestStore:
    def test_a_checkpoint_is_complete_by_its_commit_alone(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        assert store.commits() == []
        write(store, 5)
        (store.begin(10) / "actor").mkdir()
        (store.place(15)).mkdir()
        assert [commit.step for commit in store.commits()] == [5]
        store.clean()
        assert {path.name for path in store.path.iterdir()} == {"step-5", LATEST}
        assert (store.path / LATEST).read_text() == "step-5\n"

    def test_a_checkpoint_of_the_same_step_is_replaced(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        (store.place(5) / COMMIT).unlink()
        commit = write(store, 5, metric="reward/mean", value=0.5)
        assert store.commits() == [commit]
        assert store.verify(commit)["step"] == 5

    def test_a_stale_latest_does_not_hide_the_newest(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        write(store, 10)
        (store.path / LATEST).write_text("step-5\n")
        assert ResumePoint.find(tmp_path).step == 10
        (store.path / LATEST).unlink()
        assert ResumePoint.find(tmp_path).step == 10

    def test_a_removed_checkpoint_is_gone(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        write(store, 10)
        store.remove(5)
        assert [commit.step for commit in store.commits()] == [10]
        assert not store.place(5).exists()

    def test_checkpoints_that_a_run_removes_meanwhile_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for `rlhf-controller evaluate` beside a run that keeps the newest two."""
        store, read = CheckpointStore(tmp_path), CheckpointStore._read
        for step in (5, 10, 15):
            write(store, step)

        def removed_first(found: CheckpointStore, path: Path) -> Commit:
            store.remove(5)
            return read(found, path)

        monkeypatch.setattr(CheckpointStore, "_read", removed_first)
        assert {10, 15} == {commit.step for commit in CheckpointStore(tmp_path).commits()} - {5}
        assert ResumePoint.at(store.place(10)).step == 10

    def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, verify = CheckpointStore(tmp_path), CheckpointStore.verify
        write(store, 5)

        def removed_first(found: CheckpointStore, commit: Commit) -> Any:
            store.remove(5)
            return verify(found, commit)

        monkeypatch.setattr(CheckpointStore, "verify", removed_first)
        with pytest.raises(ConfigError, match="step-5 was removed while it was read"):
            ResumePoint.at(store.place(5))

    def test_what_is_given_in_place_of_a_checkpoint_is_named(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        write(store, 10)
        with pytest.raises(
            ConfigError, match=r"is a run; name one of its checkpoints, of which the newest is .*step-10$"
        ):
            ResumePoint.at(tmp_path)
        (tmp_path / "actor").mkdir()
        (tmp_path / "actor" / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"actor is a model directory, and no checkpoint"):
            ResumePoint.at(tmp_path / "actor")

    @pytest.mark.parametrize(
        "name", [COMMIT, FILES, "controller.json", "actor/manifest.json", "actor/rank-00000.safetensors"]
    )
    def test_every_flipped_bit_and_every_cut_is_found_and_names_the_file(
        self, name: str, tmp_path: Path
    ) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        path = store.place(5) / name
        whole = path.read_bytes()
        damaged = [whole[:size] for size in {0, 1, len(whole) // 2, len(whole) - 1}]
        for place in {0, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1}:
            for bit in range(8):
                flipped = bytearray(whole)
                flipped[place] ^= 1 << bit
                damaged.append(bytes(flipped))
        for content in damaged:
            path.write_bytes(content)
            with pytest.raises(RlhfError, match=str(path)) as caught:
                ResumePoint.find(tmp_path)
            assert "\n" not in str(caught.value)
            assert "remove step-5" in str(caught.value)
        path.write_bytes(whole)
        ResumePoint.find(tmp_path)

    def test_a_missing_and_a_strange_file_are_named(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        strange = store.place(5) / "actor" / "rank-00001.safetensors"
        strange.write_bytes(b"")
        with pytest.raises(RlhfError, match=r"rank-00001.*files.json does not list it"):
            ResumePoint.find(tmp_path)
        strange.unlink()
        (store.place(5) / "actor" / "manifest.json").unlink()
        with pytest.raises(RlhfError, match=r"manifest.json is damaged: no such file"):
            ResumePoint.find(tmp_path)

    def test_a_checkpoint_that_is_no_longer_the_newest_is_not_resumed(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        point = ResumePoint.find(tmp_path)
        point.check_newest()
        write(store, 10)
        with pytest.raises(
            ConfigError, match=r"was step-5 and is step-10 now, by another controller; resume again"
        ):
            point.check_newest()
        store.remove(10)
        point.check_newest()
        store.remove(5)
        with pytest.raises(ConfigError, match=r"is none now"):
            point.check_newest()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5, None])
    def test_a_checkpoint_is_the_newest_whatever_its_metric(
        self, value: float | None, tmp_path: Path
    ) -> None:
        """As where no held-out row of its evaluation could be scored."""
        write(CheckpointStore(tmp_path), 5, metric="evaluation/accuracy", value=value)
        ResumePoint.find(tmp_path).check_newest()

    def test_a_run_without_a_checkpoint_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no complete checkpoint .* checkpoint.every"):
            ResumePoint.find(tmp_path)
        with pytest.raises(ConfigError, match="no such directory"):
            ResumePoint.find(tmp_path / "run")

    def test_a_checkpoint_in_place_of_its_run_names_the_run(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        with pytest.raises(ConfigError, match=rf"step-5 is a checkpoint; resume its run, {tmp_path}$"):
            ResumePoint.find(store.place(5))

    def test_files_that_this_host_does_not_see_are_named(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        store.begin(5)
        with pytest.raises(
            RlhfError, match=r"actor/shard was written by a rank, and this host does not see it"
        ):
            store.commit(5, "{}", {"actor/shard": Digest(5, "")})

    def test_a_checkpoint_that_is_replaced_is_none_before_its_files_go(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = CheckpointStore(tmp_path)
        write(store, 5)
        had_commit = []
        rmtree = shutil.rmtree

        def watched(path: Path, *arguments: Any, **options: Any) -> None:
            if path == store.place(5):
                had_commit.append((path / COMMIT).exists())
            rmtree(path, *arguments, **options)

        monkeypatch.setattr(shutil, "rmtree", watched)
        write(store, 5)
        assert had_commit == [False]

    def test_a_failed_write_leaves_the_checkpoints_before(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        commit = write(store, 5)
        (store.begin(10) / FILES).mkdir()  # where a file is to be
        with pytest.raises(RlhfError, match=r"while writing files.json"):
            store.commit(10, "{}", {})
        assert store.commits() == [commit]


@given(
    values=st.lists(st.none() | st.floats(), min_size=1, max_size=8),
    keep=st.integers(1, 4),
    highest=st.booleans(),
)
def test_the_newest_and_the_best_are_kept(values: list[float | None], keep: int, highest: bool) -> None:
    commits = [Commit(10 * number, "", "m", value) for number, value in enumerate(values)]
    table = CheckpointTable(every=1, keep=keep, best="m", best_is="highest" if highest else "lowest")
    kept = {each.step for each in commits} - set(to_remove(commits[::-1], table))
    assert {each.step for each in commits[-keep:]} <= kept
    finite = [value for value in values if value is not None and math.isfinite(value)]
    best = best_of(commits, "m", highest=highest)
    if finite:
        assert best is not None
        assert best.value == (max if highest else min)(finite)
        assert best.step in kept
    assert len(kept) <= keep + 1


def test_without_best_only_the_newest_are_kept() -> None:
    commits = [Commit(step, "", "m", float(-step)) for step in (1, 2, 3, 4)]
    assert to_remove(commits, CheckpointTable(every=1, keep=2)) == [1, 2]
    assert to_remove(commits, CheckpointTable(every=1, keep=2, best="other")) == [1, 2]


class TestLock:
    def test_another_process_is_refused_until_the_first_ends(self, tmp_path: Path) -> None:
        command = (
            "import sys, time; from pathlib import Path; from controller.tracking.run_directory import RunDirectory\n"
            f"with RunDirectory(Path({str(tmp_path)!r})).locked(): print('held', flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with (
                pytest.raises(ConfigError, match=rf"process {other.pid} of host \S+ runs in it; .* end it"),
                RunDirectory(tmp_path).locked(),
            ):
                pass
            other.kill()
        with RunDirectory(tmp_path).locked():
            pass

    def test_a_file_is_locked_that_is_open_for_writing(self, tmp_path: Path) -> None:
        """NFS carries no other locks to other hosts."""
        with RunDirectory(tmp_path).locked():
            inode = (tmp_path / LOCK).stat().st_ino
            held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
            assert any(fields[3] == "WRITE" and fields[5].endswith(f":{inode}") for fields in held)

    def test_a_directory_without_files_of_use_is_removed_with_its_lock(self, tmp_path: Path) -> None:
        directory = RunDirectory.create(tmp_path, "run")
        with directory.locked():
            directory.write_text("config.toml", "")
        directory.remove_if_only({"config.toml"})
        assert not directory.path.exists()


class TestIdentity:
    def test_a_time_that_wrote_no_checkpoint_stays_listed(self) -> None:
        first = Identity.of("ppo", 0, 1)
        stored = first.with_services({}, {})
        crashed = Identity.of("ppo", 0, 2).resuming(stored, stored, 4).with_services({}, {})
        found = Identity.of("ppo", 0, 3).resuming(stored, crashed, 4)
        assert [each["step"] for each in found.resumed] == [4, 4]
        assert len(Identity.of("ppo", 0, 3).resuming(stored, {}, 4).resumed) == 1


class TestTable:
    def test_the_default_writes_none(self) -> None:
        assert not CheckpointTable().is_on
        assert CheckpointTable(at_end=True).is_on

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            (("checkpoint.best='evaluation/accuracy'",), "needs every"),
            (
                ("checkpoint.every=3", "checkpoint.best='evaluation/accuracy'", "run.steps=20"),
                "no step up to",
            ),
            (("checkpoint.every=-1",), "checkpoint.every"),
            (("checkpoint.keep=0",), "checkpoint.keep"),
            (("checkpoint.evry=1",), "checkpoint.evry"),
        ],
    )
    def test_an_impossible_one_is_refused(self, settings: tuple[str, ...], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            load(QUICKSTART, settings)

    @pytest.mark.parametrize(
        ("steps", "evaluate_every", "every", "at_end", "is_possible"),
        [
            (20, 10, 3, False, False),
            (30, 10, 3, False, True),
            (20, 0, 3, False, False),
            (20, 0, 3, True, True),
            (20, 0, 5, False, True),
            (21, 10, 3, False, True),
            (20, 10, 3, True, True),
            (2, 10, 3, False, False),
        ],
    )
    def test_the_best_by_an_evaluation_needs_one_after_a_step_with_a_checkpoint(
        self, steps: int, evaluate_every: int, every: int, at_end: bool, is_possible: bool
    ) -> None:
        """The last step has an evaluation in any case."""
        keys = (f"every={every}", f"at_end={str(at_end).lower()}", "best='evaluation/accuracy'")
        settings = (f"run.steps={steps}", f"run.evaluate_every={evaluate_every}")
        settings += tuple(f"checkpoint.{key}" for key in keys)
        if is_possible:
            load(QUICKSTART, settings)
            return
        with pytest.raises(
            ConfigError, match=rf"checkpoint\.best: no step up to run\.steps, {steps}, .*at_end = true"
        ):
            load(QUICKSTART, settings)


@dataclass
class Inner:
    values: np.ndarray
    names: tuple[str, ...] = ()


@dataclass
class Everything:
    number: float = 0.0
    count: int = 0
    flag: bool = False
    text: str = ""
    nothing: str | None = None
    single: np.float32 = field(default_factory=lambda: np.float32(0))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    table: dict[str, list[float]] = field(default_factory=dict)
    inner: Inner = field(default_factory=lambda: Inner(np.zeros(0)))


def through_json(kept: KeptState) -> KeptState:
    """The kept state of a resumed run, before the algorithm registers its own."""
    restored = KeptState()
    restored.restore(json.loads(json.dumps(kept.state(), allow_nan=False)))
    return restored


class Color(StrEnum):
    RED = "red"


class Pair(NamedTuple):
    first: int
    second: int


class TestKept:
    @given(log_lambda=st.floats(), costs=st.lists(st.floats(allow_nan=False), max_size=5))
    def test_state_of_algorithms_comes_back_bit_for_bit(self, log_lambda: float, costs: list[float]) -> None:
        kept = KeptState()
        kept.add("multiplier", Multiplier(log_lambda, costs))
        kept.add("kl", AdaptiveKL(0.1 + 0.2, 3.0, 5))
        restored, multiplier, kl = through_json(kept), Multiplier(1.0, [9.0]), AdaptiveKL(1.0, 3.0, 5)
        restored.add("multiplier", multiplier)
        restored.add("kl", kl)
        restored.check_complete()
        assert np.float64(multiplier.log_lambda).tobytes() == np.float64(log_lambda).tobytes() or math.isnan(
            log_lambda
        )
        assert multiplier.costs == costs
        assert kl == AdaptiveKL(0.1 + 0.2, 3.0, 5)

    def test_types_come_back_from_the_present_values(self) -> None:
        given = Everything(
            1e-300, 2**70, True, "ä", "x", np.float32(0.1), deque([1.0, math.inf], 3), {"a": [0.1]}
        )
        given.inner = Inner(np.array([[1.5, math.nan]], np.float32), ("b", "c"))
        kept = KeptState()
        kept.add("all", given)
        found = Everything()
        through_json(kept).add("all", found)
        assert (found.number, found.count, found.flag, found.text, found.nothing) == (
            1e-300,
            2**70,
            True,
            "ä",
            "x",
        )
        assert found.single.dtype == np.float32
        assert found.single == np.float32(0.1)
        assert found.recent == deque([1.0, math.inf])
        assert found.recent.maxlen == 3
        assert found.table == {"a": [0.1]}
        assert found.inner.names == ("b", "c")
        np.testing.assert_array_equal(found.inner.values, given.inner.values)
        assert found.inner.values.dtype == np.float32

    def test_numbers_of_numpy_come_back_as_such_whatever_the_algorithm_begins_with(self) -> None:
        """Sums of float32 round otherwise than those of Python's floats."""
        given = Everything(np.float32(0.1), np.int16(3), np.bool_(True))  # type: ignore[arg-type]
        given.recent.append(np.float32(math.inf))  # type: ignore[arg-type]
        kept = KeptState()
        kept.add("all", given)
        found = Everything()
        through_json(kept).add("all", found)
        numbers: list[Any] = [found.number, found.count, found.flag, found.recent[0]]
        assert [each.dtype for each in numbers] == [np.float32, np.int16, np.bool_, np.float32]
        assert numbers == [np.float32(0.1), 3, True, math.inf]

    def test_dictionaries_come_back_as_what_they_are(self) -> None:
        @dataclass
        class Counts:
            seen: Counter[str] = field(default_factory=Counter)
            sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
            pairs: list[tuple[int, str]] = field(default_factory=list)

        kept, given, found = KeptState(), Counts(Counter(a=2), pairs=[(1, "x")]), Counts(Counter(old=1))
        given.sums["a"] += 0.5
        kept.add("counts", given)
        through_json(kept).add("counts", found)
        assert found == given
        found.seen["new"] += 1
        found.sums["new"] += 1.5
        assert (found.seen, found.sums) == (Counter(a=2, new=1), {"a": 0.5, "new": 1.5})

    def test_fields_that_are_made_later_come_back_as_what_they_are(self) -> None:
        @dataclass
        class Lazy:
            window: deque[int] | None = None
            pair: tuple[int, ...] | None = None
            seen: Counter[str] | None = None
            sums: dict[str, float] | None = None

        kept, found = KeptState(), Lazy()
        kept.add("lazy", Lazy(deque([1, 2, 3], maxlen=3), (1, 2), Counter(a=2), {"a": 0.5}))
        through_json(kept).add("lazy", found)
        assert found == Lazy(deque([1, 2, 3]), (1, 2), Counter(a=2), {"a": 0.5})
        assert isinstance(found.seen, Counter)
        assert found.window is not None
        assert found.window.maxlen == 3
        kept = KeptState()
        kept.add("lazy", Lazy(sums=defaultdict(float, a=0.5)))
        with pytest.raises(ConfigError, match=r"lazy.sums is a defaultdict in the checkpoint and a NoneType"):
            through_json(kept).add("lazy", Lazy())

    @pytest.mark.parametrize("value", [signal.SIGTERM, Color.RED, Pair(1, 2)])
    def test_enums_and_named_tuples_are_refused(self, value: Any) -> None:
        kept = KeptState()
        kept.add("all", Everything(value))
        with pytest.raises(ConfigError, match=r"all.number has a .*, which a checkpoint cannot hold"):
            kept.state()

    @pytest.mark.parametrize("inner", [Counter(a=1), deque([1])])
    def test_a_type_that_would_not_come_back_is_refused(self, inner: Any) -> None:
        given = Everything()
        given.table["inner"] = inner
        kept = KeptState()
        kept.add("all", given)
        with pytest.raises(
            ConfigError, match=f"has a {type(inner).__name__}, which a checkpoint cannot hold"
        ):
            kept.state()

    def test_texts_of_numpy_come_back_as_texts(self) -> None:
        given = Everything()
        given.table["source"] = np.array(["math", "code"])[0]
        kept = KeptState()
        kept.add("all", given)
        found = Everything()
        through_json(kept).add("all", found)
        assert found.table["source"] == "math"

    def test_floats_of_more_than_64_bits_are_refused(self) -> None:
        for number in (np.longdouble(0.1), np.ones(2, np.longdouble)):
            kept = KeptState()
            kept.add("all", Everything(number))  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"all.number has a .*, which a checkpoint cannot hold"):
                kept.state()

    def test_another_algorithm_is_refused(self) -> None:
        kept = KeptState()
        kept.add("kl", FixedKL(0.5))
        restored = through_json(kept)
        with pytest.raises(ConfigError, match="no state 'other'"):
            restored.add("other", FixedKL())
        with pytest.raises(ConfigError, match="a state 'kl'"):
            through_json(kept).check_complete()
        with pytest.raises(ConfigError, match=r"has fields \['beta'\]"):
            through_json(kept).add("kl", AdaptiveKL())

    def test_state_that_no_checkpoint_can_hold_is_refused(self) -> None:
        kept = KeptState()
        kept.add("all", Everything(table={"a": [object()]}))  # type: ignore[list-item]
        with pytest.raises(ConfigError, match=r"all.table.a has a object"):
            kept.state()
        kept = KeptState()
        kept.add("list", [1])
        with pytest.raises(ConfigError, match="list is no dataclass"):
            kept.state()


def log(run_dir: Path, steps: range, **options: Any) -> None:
    """The files of some steps of a run, as its recorder writes them."""
    metrics, samples, timeline = (
        MetricsWriter(run_dir),
        SamplesWriter(run_dir),
        Timeline(run_dir, 100.0, **options),
    )
    for step in steps:
        metrics.log(step, {"loss": 0.5 * step})
        samples.log(step, [Sample(f"prompt {step}", "", "", 1.0)])
        for rank in range(2):
            timeline.add(("actor", f"rank {rank}"), "update", 100 + step, 100.5 + step, {"step": step})
        timeline.flush()
    metrics.close()
    samples.close()
    timeline.close()


class TestFiles:
    def test_files_are_continued_where_they_were_cut(self, tmp_path: Path) -> None:
        cut, whole = tmp_path / "cut", tmp_path / "whole"
        cut.mkdir()
        whole.mkdir()
        log(whole, range(6))
        log(cut, range(3))
        os.truncate(cut / TIMELINE_FILE, (cut / TIMELINE_FILE).stat().st_size - len("\n]\n"))
        marks = mark_files(cut)
        log(cut, range(3, 5))  # of the life before
        check_marks(cut, marks)
        cut_files(cut, marks)
        assert [line["step"] for line in read_metrics(cut)] == [0, 1, 2]
        log(cut, range(3, 6))
        assert read_metrics(cut) == read_metrics(whole)
        assert list(each_sample(cut)) == list(each_sample(whole))
        assert (cut / TIMELINE_FILE).read_text() == (whole / TIMELINE_FILE).read_text()
        assert len(list((cut / "tensorboard").iterdir())) == 1

    def test_a_timeline_that_was_renamed_since_is_found_again(self, tmp_path: Path) -> None:
        log(tmp_path, range(3))
        mark = mark_files(tmp_path)
        (tmp_path / TIMELINE_FILE).rename(tmp_path / EARLIER_FILE)
        (tmp_path / TIMELINE_FILE).write_text("[\n" + "x" * 10_000)
        cut_files(tmp_path, mark)
        assert len([e for e in read_events(tmp_path / TIMELINE_FILE) if e["ph"] == "X"]) == 6
        assert not (tmp_path / EARLIER_FILE).exists()

    def test_a_timeline_that_is_lost_is_begun_anew(self, tmp_path: Path) -> None:
        log(tmp_path, range(3))
        mark = mark_files(tmp_path)
        (tmp_path / TIMELINE_FILE).write_text("[\n")
        check_marks(tmp_path, mark)
        cut_files(tmp_path, mark)
        assert not (tmp_path / TIMELINE_FILE).exists()

    @pytest.mark.parametrize("damage", ["shorter", "other", "missing"])
    def test_metrics_of_another_run_are_refused(self, damage: str, tmp_path: Path) -> None:
        log(tmp_path, range(3))
        marks, path = mark_files(tmp_path), tmp_path / "metrics.jsonl"
        match damage:
            case "shorter":
                os.truncate(path, path.stat().st_size - 1)
            case "other":
                path.write_text(path.read_text().replace("0.5", "0.6"))
            case "missing":
                path.unlink()
        with pytest.raises(RlhfError, match=r"metrics.jsonl does not begin"):
            check_marks(tmp_path, marks)

    def test_a_mark_is_of_the_bytes_before_it(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(10_000))
        mark = Mark.at_end(path)
        path.write_bytes(bytes(10_000) + b"more")
        assert mark.is_in(path)
        path.write_bytes(bytes(9_999) + b"1more")
        assert not mark.is_in(path)


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return load(QUICKSTART).model_dump(mode="json", exclude_none=True)


def changed(tables: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tables with another value of a key."""
    copy = json.loads(json.dumps(tables))
    *parents, leaf = key.split(".")
    table = copy
    for parent in parents:
        table = table.setdefault(parent, {})
    table[leaf] = value
    return copy


class TestFacts:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rollout.environment.timeout_s", 300.0),
            ("services.reward.row_timeout_s", 30.0),
            ("services.reward.http.urls", ["http://127.0.0.1:9/score"]),
            ("services.reward.judge.retries", 9),
            ("run.steps", 100),
            ("run.epochs", 3),
            ("run.evaluate_every", 3),
            ("run.patience", 3),
            ("rollout.evaluation.temperature", 0.5),
            ("data.evaluated_rows", 100),
            ("checkpoint.keep", 5),
            ("services.actor.address", "127.0.0.1:9999"),
            ("services.actor.pool", "first"),
            ("pools.first", ["cpu:0"]),
            ("data.train", "elsewhere.jsonl"),
        ],
    )
    def test_what_changes_no_step_may_differ(self, key: str, value: Any, tables: dict[str, Any]) -> None:
        check_config(tables, changed(tables, key, value), elsewhere=False)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("run.seed", 1),
            ("data.prompts_per_step", 4),
            ("data.system", "Be brief."),
            ("data.template", "{prompt}="),
            ("data.heldout_rows", 3),
            ("data.subset", "main"),
            ("rollout.temperature", 0.5),
            ("algorithm.mini_batch_size", 64),
            ("services.actor.optimizer.weight_decay", 1e-3),
            ("services.critic.dtype", "bfloat16"),
        ],
    )
    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_what_changes_results_may_not(
        self, key: str, value: Any, elsewhere: bool, tables: dict[str, Any]
    ) -> None:
        before = changed(tables, "services.critic.dtype", "float32")
        with pytest.raises(ConfigError, match=f"^{key} was .* and is {json.dumps(value)} now"):
            check_config(before, changed(before, key, value), elsewhere=elsewhere)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("services.actor.ranks", 1), ("services.actor.engine", "3d"), ("services.actor.threads", 2)],
    )
    def test_what_changes_rounding_may_differ_elsewhere(
        self, key: str, value: Any, tables: dict[str, Any]
    ) -> None:
        now = changed(tables, key, value)
        with pytest.raises(ConfigError, match=f"^{key} was .*--elsewhere"):
            check_config(tables, now, elsewhere=False)
        check_config(tables, now, elsewhere=True)

    def test_keys_that_the_version_of_a_checkpoint_did_not_have_count_as_their_defaults(self) -> None:
        ppo = find_algorithm("ppo")
        now = ppo.resolved(ppo.configure(load(QUICKSTART)))
        before = json.loads(json.dumps(now))
        del before["data"]["shuffle"], before["algorithm"]["critic_warmup_steps"]
        del before["services"]["actor"]["optimizer"]["warmup_ratio"]
        assert with_new_keys(ppo, before) == now
        with pytest.raises(ConfigError, match=r"^data\.shuffle was true .* and is false now"):
            check_config(with_new_keys(ppo, before), changed(now, "data.shuffle", False), elsewhere=False)
        unreadable = changed(before, "data.shufle", True)
        assert with_new_keys(ppo, unreadable) == unreadable

    def test_learning_rates_may_differ_and_are_told(self, tables: dict[str, Any]) -> None:
        now = changed(tables, "services.actor.optimizer.learning_rate", 1e-3)
        now = changed(now, "services.critic.optimizer.schedule", "linear")
        now = changed(now, "services.critic.optimizer.total_steps", 100)
        now = changed(now, "run.steps", 100)
        check_config(tables, now, elsewhere=False)
        before = tables["services"]["actor"]["optimizer"]["learning_rate"]
        assert changed_learning_rates(tables, now) == {
            "services.actor.optimizer.learning_rate": (before, 1e-3),
            "services.critic.optimizer.schedule": ("constant", "linear"),
            "services.critic.optimizer.total_steps": (0, 100),
        }
        assert changed_learning_rates(tables, changed(tables, "run.steps", 100)) == {}

    def test_the_type_may_be_named_elsewhere_where_it_followed_the_device(
        self, tables: dict[str, Any]
    ) -> None:
        followed, named = (changed(tables, "services.critic.dtype", each) for each in ("auto", "float32"))
        for before, now in ((followed, named), (named, followed)):
            check_config(before, now, elsewhere=True)
            with pytest.raises(ConfigError, match=r"^services.critic.dtype was .*--elsewhere"):
                check_config(before, now, elsewhere=False)

    def test_places_of_sources_may_differ_and_their_weights_may_not(self, tables: dict[str, Any]) -> None:
        sources = [{"path": "a.jsonl", "heldout": "b.jsonl", "name": "a", "weight": 1.0}, {"path": "set"}]
        before = changed(tables, "data.sources", sources)
        moved = [{**sources[0], "path": "/c/a.jsonl", "heldout": "/c/b.jsonl"}, {"path": "/c/set"}]
        check_config(before, changed(tables, "data.sources", moved), elsewhere=False)
        sampled = [
            {**moved[0], "evaluation": {"samples": 32, "temperature": 0.6}, "evaluated_rows": 9},
            moved[1],
        ]
        check_config(before, changed(tables, "data.sources", sampled), elsewhere=False)
        heavier = [{**moved[0], "weight": 2.0}, moved[1]]
        with pytest.raises(ConfigError, match=r"^data.sources.0.weight was 1.0 .* and is 2.0 now"):
            check_config(before, changed(tables, "data.sources", heavier), elsewhere=False)
        with pytest.raises(ConfigError, match=r"^data.sources.1 was .* and is not set now"):
            check_config(before, changed(tables, "data.sources", moved[:1]), elsewhere=False)

    def test_platforms_are_compared(self) -> None:
        before = {"actor": {"threads": 1, "torch": "2.13.0+cpu", "vocabulary": "ab"}}
        now = {"actor": {"threads": 2, "torch": "2.14.0", "vocabulary": "ab"}}
        check_platform(before, before, elsewhere=False)
        check_platform(before, now, elsewhere=True)
        with pytest.raises(
            ConfigError,
            match=r"services.actor.threads was 1 .* is 2 now; services.actor.torch was .*--elsewhere",
        ):
            check_platform(before, now, elsewhere=False)
        with pytest.raises(ConfigError, match=r"^services.actor.vocabulary was"):
            check_platform(before, {"actor": {**now["actor"], "vocabulary": "cd"}}, elsewhere=True)

    def test_another_gpu_or_library_is_refused(self) -> None:
        def platform(gpu: str, version: str) -> dict[str, dict[str, Any]]:
            return platform_of({"actor": DescribeResponse(gpu=gpu, libraries={"transformers": version})})

        before = platform("NVIDIA H100", "5.19.0")
        check_platform(before, platform("NVIDIA H100", "5.19.0"), elsewhere=False)
        with pytest.raises(ConfigError, match=r'^services.actor.gpu was "NVIDIA H100" .* "NVIDIA A100"'):
            check_platform(before, platform("NVIDIA A100", "5.19.0"), elsewhere=False)
        with pytest.raises(ConfigError, match=r"^services.actor.libraries.transformers was"):
            check_platform(before, platform("NVIDIA H100", "5.19.1"), elsewhere=False)

    def test_other_contents_are_refused(self) -> None:
        check_contents({"data.train.0": "ab", "services.actor.model": ""}, {"data.train.0": "ab"})
        with pytest.raises(ConfigError, match=r"^data.train.0: the contents differ from those"):
            check_contents({"data.train.0": "ab"}, {"data.train.0": "cd"})

    @pytest.mark.parametrize("file", chat.FILES)
    def test_each_file_that_prompts_depend_on_counts(self, file: str, tmp_path: Path) -> None:
        config = load(QUICKSTART, (f"data.tokenizer='{tmp_path}'",))
        rows: Any = SimpleNamespace(fingerprints=tuple)
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
        before = contents_of(config, (rows, rows), None)
        (tmp_path / file).write_text("{ }")
        with pytest.raises(ConfigError, match=r"^data\.tokenizer: the contents differ"):
            check_contents(before, contents_of(config, (rows, rows), None))

    def test_a_tokenizer_that_is_not_there_is_told_from_another_one(self) -> None:
        """As in another working directory, of a config with a relative path."""
        absent = fingerprint(())
        check_contents({"data.tokenizer": absent}, {"data.tokenizer": absent})
        with pytest.raises(ConfigError, match=r"^data.tokenizer.* are not there; .* the working directory$"):
            check_contents({"data.tokenizer": "ab"}, {"data.tokenizer": absent})
        with pytest.raises(ConfigError, match=r"^data.tokenizer: the contents differ"):
            check_contents({"data.tokenizer": "ab"}, {"data.tokenizer": "cd"})


@pytest.fixture
def termination() -> Iterator[Termination]:
    """Handlers of SIGTERM in this process, until the end of the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    made = Termination()
    made.install()
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


class TestSigterm:
    def test_it_interrupts_at_once_where_no_step_is_under_way(self, termination: Termination) -> None:
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.args == (signal.SIGTERM,)

    def test_it_is_a_request_within_the_grace(self, termination: Termination) -> None:
        termination.grace_s = 60.0
        signal.raise_signal(signal.SIGTERM)
        assert termination.is_requested
        with pytest.raises(KeyboardInterrupt):
            termination.end_if_requested()
        assert not termination.is_requested
        termination.end_if_requested()

    def test_it_interrupts_after_the_grace_and_at_the_second_time(self, termination: Termination) -> None:
        termination.grace_s = 0.05
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(20)
        termination.grace_s = 60.0
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert termination.is_overdue


class Silent:
    """A role group that takes the state, and never says that it is written."""

    had_directory = False

    def save_checkpoint(self, directory: str, *arguments: Any, **options: Any) -> FutureBatch:
        self.had_directory = Path(directory).is_dir()
        return FutureBatch(0, {})

    def await_checkpoint(self, directory: str) -> Future[Any]:
        return Future()


@pytest.mark.timeout(60)
class TestCheckpointer:
    def test_a_service_finds_its_directory(self, tmp_path: Path) -> None:
        group = Silent()
        begun(tmp_path, group, Termination())
        assert group.had_directory

    def test_after_the_grace_it_does_not_wait_for_the_write(
        self, termination: Termination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(saver, "CLOSE_S", 600.0)
        checkpointer = begun(tmp_path, Silent(), termination)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        checkpointer.close()

    def test_weights_are_verified_before_a_checkpoint_that_only_sigterm_asks_for(
        self, termination: Termination, tmp_path: Path
    ) -> None:
        def corrupt() -> None:
            raise CorruptWeights("x on rank 0")

        checkpointer = begun(tmp_path, Silent(), termination, every=100)
        checkpointer.after_step(1, {}, dict, known=(), is_last=False, verify=corrupt)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(CorruptWeights):
            checkpointer.after_step(2, {}, dict, known=(), is_last=False, verify=corrupt)
        assert not list(CheckpointStore(tmp_path).path.glob("step-*"))


def begun(run_dir: Path, group: Any, termination: Termination, every: int = 1) -> saver.Checkpointer:
    """A writer of checkpoints that has begun one where `every` is 1."""
    table, store = CheckpointTable(every=every, grace_s=60.0), CheckpointStore(run_dir)
    journal = Journal(run_dir, {})
    checkpointer = saver.Checkpointer(
        table, store, {"actor": group}, {}, journal, dict, dict, print, termination
    )
    checkpointer.begin(dict)
    checkpointer.after_step(1, {}, dict, known=(), is_last=False)
    return checkpointer
