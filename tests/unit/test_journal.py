"""The journal of a run, the choice between it and a checkpoint, and a process that has lost its run directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from unit.test_checkpoints import write

from client.fanout import FanOut
from controller.checkpoints.journal import JOURNAL, Journal, content_of, read_journal, remove_journal
from controller.checkpoints.resume_point import ResumePoint
from controller.checkpoints.store import COMMIT, DIRECTORY, CheckpointStore
from controller.restoring import Restorer
from controller.role_groups.cluster import SavedState
from controller.role_groups.platform import platform_of
from controller.tracking.marks import mark_files
from controller.tracking.metrics import MetricsWriter, SamplesWriter
from controller.tracking.run_directory import AppendFile, RunDirectory
from controller.tracking.timeline import Timeline
from rlhf.errors import ConfigError, RlhfError
from rlhf.v1 import worker_pb2
from settings.actor import ActorTable

FACTS = {"platform": {}, "config": {"services": {}}, "text": "\u00e9\n"}
STATES = {"actor": "a5", "critic": "c5", "reference": "r"}


def begin(run_dir: Path) -> None:
    """The files that a run appends to."""
    metrics = MetricsWriter(run_dir)
    metrics.log(0, {"loss": 1.0})
    metrics.close()
    SamplesWriter(run_dir).close()
    Timeline(run_dir, 1.0).close()


def journal(run_dir: Path, step: int = 5, run: Mapping[str, Any] | None = None) -> None:
    """The journal of a run after a step."""
    Journal(run_dir, FACTS).write(content_of(step, run or {}, mark_files(run_dir), STATES))


class TestJournal:
    def test_it_comes_back_and_each_replaces_the_one_before(self, tmp_path: Path) -> None:
        begin(tmp_path)
        for step in (5, 6):
            journal(tmp_path, step, {"kept": {"number": 0.1}})
        point = ResumePoint.journaled(tmp_path)
        assert point is not None
        assert (point.step, point.commit, point.run) == (6, None, {"kept": {"number": 0.1}})
        assert (point.facts, point.states, point.marks) == (FACTS, STATES, mark_files(tmp_path))
        assert [path.name for path in (tmp_path / DIRECTORY).iterdir()] == [JOURNAL]
        remove_journal(tmp_path)
        remove_journal(tmp_path)
        assert ResumePoint.journaled(tmp_path) is None

    def test_a_damaged_one_is_none(self, tmp_path: Path) -> None:
        begin(tmp_path)
        journal(tmp_path)
        path = tmp_path / DIRECTORY / JOURNAL
        whole = path.read_bytes()
        for position in range(0, len(whole), 7):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            assert read_journal(tmp_path) is None
            path.write_bytes(whole[:position])
            assert read_journal(tmp_path) is None
        path.write_bytes(whole)
        assert read_journal(tmp_path) is not None

    def test_one_of_other_files_or_older_than_a_checkpoint_is_none(self, tmp_path: Path) -> None:
        begin(tmp_path)
        journal(tmp_path)
        store = CheckpointStore(tmp_path)
        write(store, 5)
        assert ResumePoint.journaled(tmp_path) is not None
        write(store, 6)
        assert ResumePoint.journaled(tmp_path) is None
        store.remove(6)
        assert ResumePoint.journaled(tmp_path) is not None
        (tmp_path / "metrics.jsonl").write_text("")
        assert ResumePoint.journaled(tmp_path) is None

    def test_one_that_another_controller_has_replaced_is_not_resumed(self, tmp_path: Path) -> None:
        begin(tmp_path)
        journal(tmp_path)
        point = ResumePoint.journaled(tmp_path)
        assert point is not None
        point.check_newest()
        journal(tmp_path, 6)
        with pytest.raises(ConfigError, match="another controller has gone on with the run after step 5"):
            point.check_newest()


@dataclass(frozen=True)
class Planned:
    """A plan as far as the choice of a point goes."""

    resumes: ResumePoint
    elsewhere: bool = False
    config: Any = field(default_factory=lambda: SimpleNamespace(services={}))
    moved: list[int] = field(default_factory=list)

    def at(self, point: ResumePoint) -> Planned:
        self.moved.append(point.step)
        return replace(self, resumes=point)


class TestRestorer:
    def restorer(self, run_dir: Path, *, is_warm: bool = True) -> Restorer:
        """Of a run with a journal after step 5 and a checkpoint after step 4, which has the states a4 and c4."""
        begin(run_dir)
        store = CheckpointStore(run_dir)
        write(store, 4, content={"states": {"actor": "a4", "critic": "c4", "reference": "r"}, "facts": FACTS})
        journal(run_dir)
        point = (ResumePoint.journaled(run_dir) if is_warm else None) or ResumePoint.find(run_dir)
        plan: Any = Planned(point)
        return Restorer(plan, ["actor", "critic"], dict)

    def test_services_that_hold_their_states_load_nothing(self, tmp_path: Path) -> None:
        restorer = self.restorer(tmp_path)
        (tmp_path / DIRECTORY / "step-4" / "controller.json").unlink()  # it is not even read
        assert restorer.restoration.names == {"actor", "critic", "reference"}
        assert restorer.restoration.choose(STATES) == {}
        assert restorer.line() == "resumed after step 5; nothing was loaded; held the state: actor, critic"

    def test_a_frozen_service_that_restarted_loads_its_model_alone(self, tmp_path: Path) -> None:
        restorer = self.restorer(tmp_path)
        assert restorer.restoration.choose(STATES | {"reference": "other"}) == {"reference": None}
        assert restorer.line() == "resumed after step 5; loaded: reference; held the state: actor, critic"

    @pytest.mark.parametrize(
        ("held", "loaded"),
        [
            ({"actor": "a4", "critic": "c5", "reference": "r"}, {"critic"}),
            ({"actor": "a5", "critic": "c4", "reference": "r"}, {"actor"}),
            ({"actor": "a4", "critic": "c4", "reference": "r"}, set()),
            ({"actor": "a5", "reference": "r"}, {"actor", "critic"}),
            ({}, {"actor", "critic", "reference"}),
        ],
    )
    @pytest.mark.parametrize("is_warm", [True, False])
    def test_without_agreement_it_goes_back_to_the_checkpoint_and_loads_what_differs(
        self, tmp_path: Path, held: dict[str, str], loaded: set[str], is_warm: bool
    ) -> None:
        restorer = self.restorer(tmp_path, is_warm=is_warm)
        chosen = restorer.restoration.choose(held)
        assert chosen.keys() == loaded
        assert chosen.get("reference") is None
        for name in loaded - {"reference"}:
            place = CheckpointStore(tmp_path).place(4) / name
            assert chosen[name] == SavedState(place, f"{name[0]}4")
        assert restorer.plan.resumes is not None
        assert restorer.plan.resumes.step == 4
        assert restorer.line().startswith("resumed after step 4; ")

    def test_without_a_checkpoint_the_services_that_differ_are_named(self, tmp_path: Path) -> None:
        restorer = self.restorer(tmp_path)
        CheckpointStore(tmp_path).remove(4)
        with pytest.raises(ConfigError, match=r"no complete checkpoint .* after step 5: critic"):
            restorer.restoration.choose(STATES | {"critic": "c4"})

    @pytest.mark.parametrize(
        ("before", "now", "is_same"),
        [
            (("auto", "cpu"), ("auto", "cpu"), True),
            (("auto", "cpu"), ("auto", "cuda"), False),
            (("auto", "cuda"), ("auto", "cpu"), False),
            (("auto", "cpu"), ("float32", "cuda"), True),
            (("auto", "cpu"), ("bfloat16", "cuda"), False),
            (("float32", "cuda"), ("auto", "cpu"), True),
            (("bfloat16", "cpu"), ("auto", "cuda"), True),
        ],
    )
    def test_a_run_goes_on_elsewhere_in_the_types_of_before(
        self, tmp_path: Path, before: tuple[str, str], now: tuple[str, str], is_same: bool
    ) -> None:
        """`dtype` may be another where it stands for the same type, of a device that may be another."""

        def described(device: str) -> dict[str, worker_pb2.DescribeResponse]:
            actor = worker_pb2.DescribeResponse()
            actor.ranks.add().device = device
            return {"actor": actor, "reward": worker_pb2.DescribeResponse()}

        tables = {"actor": {"dtype": before[0]}, "reward": {}}
        facts = {"config": {"services": tables}, "platform": platform_of(described(before[1]))}
        table = ActorTable.model_validate(
            {"role": "actor", "address": "127.0.0.1:1", "model": tmp_path, "dtype": now[0]}
        )
        config = SimpleNamespace(services={"actor": table})
        plan: Any = Planned(cast(Any, SimpleNamespace(facts=facts)), elsewhere=True, config=config)
        services = described(now[1])
        if is_same:
            Restorer(plan, ["actor"], dict).admit(services)
            return
        types = {"cpu": "float32", "cuda": "bfloat16"}
        said = (
            f'services.actor.dtype was "{types[before[1]]}" when the checkpoint was written and is '
            f'"{types[now[1]]}" now; "auto" depends on the device. To keep the types: '
            f"--set services.actor.dtype={types[before[1]]}"
        )
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
            Restorer(plan, ["actor"], dict).admit(services)

    def test_a_checkpoint_without_ids_is_loaded(self, tmp_path: Path) -> None:
        begin(tmp_path)
        write(CheckpointStore(tmp_path), 4)
        plan: Any = Planned(ResumePoint.find(tmp_path))
        restorer = Restorer(plan, ["actor"], dict)
        assert restorer.restoration.choose({"actor": ""}).keys() == {"actor"}


class TestOwnership:
    def test_a_process_that_lost_the_directory_writes_nothing_more(self, tmp_path: Path) -> None:
        """As on a file system without locks, on which a second process takes it over."""
        with RunDirectory(tmp_path).locked():
            begin(tmp_path)
            mine, books = AppendFile(tmp_path, "metrics.jsonl"), Journal(tmp_path, FACTS)
            mine.append(b"")
            (tmp_path / ".lock").unlink()
            mine.append(b"")
            with RunDirectory(tmp_path).locked():
                theirs = AppendFile(tmp_path, "metrics.jsonl")
                before = (tmp_path / "metrics.jsonl").read_bytes()
                with pytest.raises(RlhfError, match=r"process \d+ of host \S+ has taken it over"):
                    mine.append(b"{}\n")
                with pytest.raises(RlhfError, match="has taken it over"):
                    books.write(content_of(1, {}, {}, {}))
                assert (tmp_path / "metrics.jsonl").read_bytes() == before
                theirs.append(b"{}\n")
            mine.close()
            theirs.close()

    @pytest.mark.parametrize("moment", ["before the commit", "while its files are checked"])
    def test_a_process_that_lost_the_directory_commits_no_checkpoint(
        self, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check_written(*_: Any) -> None:
            if moment == "while its files are checked":
                (tmp_path / ".lock").write_text("7 elsewhere 0\n")

        with RunDirectory(tmp_path).locked():
            store = CheckpointStore(tmp_path)
            old = write(store, 4)
            begun = store.begin(4)
            if moment == "before the commit":
                (tmp_path / ".lock").write_text("7 elsewhere 0\n")
            monkeypatch.setattr("controller.checkpoints.store._check_written", check_written)
            with pytest.raises(RlhfError, match="process 7 of host elsewhere has taken it over"):
                store.commit(4, "{}", {})
            assert CheckpointStore(tmp_path).commits() == [old]
            assert store.verify(old)
            assert not (begun / COMMIT).exists()


def test_the_state_of_a_service_is_that_of_its_last_call_on_all_ranks() -> None:
    def responses(*ids: str) -> list[Any]:
        return [SimpleNamespace(outcome=SimpleNamespace(state_id=each)) for each in ids]

    client: Any = SimpleNamespace(service="actor")
    ranks = FanOut([client, client], 1)
    assert ranks.state_id == ""
    ranks._note_state(2, responses("b", "b"))
    ranks._note_state(1, responses("a", "a"))
    assert ranks.state_id == "b"
    ranks._note_state(3, responses("b", "c"))
    assert ranks.state_id == ""
