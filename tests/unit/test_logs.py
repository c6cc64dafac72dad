"""Lines of logs are shown whole and once, whatever becomes of the files meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy import logs
from deploy.logs import evidence, explain_exit, read_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "actor.log"
    path.write_text("one\ntwo")
    return path


@pytest.fixture
def followed(log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[str]]:
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    lines = read_lines([log], follow=True)
    yield (line for _, line in lines)
    lines.close()  # type: ignore[attr-defined]


def test_without_follow_a_last_line_without_an_end_is_shown(log: Path) -> None:
    assert list(read_lines([log], follow=False)) == [(log, "one"), (log, "two")]


def test_a_line_that_comes_in_parts_is_one(log: Path, followed: Iterator[str]) -> None:
    assert next(followed) == "one"
    with log.open("a") as file:
        file.write("fold\n")
    assert next(followed) == "twofold"


def test_the_cut_off_line_of_a_log_that_is_written_anew_is_not_glued_to_its_first(
    log: Path, followed: Iterator[str]
) -> None:
    assert next(followed) == "one"
    log.write_text("new\n")
    assert [next(followed), next(followed)] == ["two", "new"]


def test_a_log_that_is_removed_while_it_is_followed_may_come_again(
    log: Path, followed: Iterator[str]
) -> None:
    assert next(followed) == "one"
    log.unlink()
    log.write_text("another\n")
    assert [next(followed), next(followed)] == ["two", "another"]


def test_a_log_that_is_gone_ends_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def removed(seconds: float) -> None:
        log.unlink(missing_ok=True)
        waits.append(seconds)
        if len(waits) > 3:
            log.write_text("back\n")

    monkeypatch.setattr(logs.time, "sleep", removed)
    lines = (line for _, line in read_lines([log], follow=True))
    assert [next(lines) for _ in range(3)] == ["one", "two", "back"]


def test_a_log_that_was_replaced_by_a_longer_one_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, new = tmp_path / "actor.log", tmp_path / "new.log"
    log.write_text("one\n")
    new.write_text("a longer line\nand another\n")
    monkeypatch.setattr(logs.time, "sleep", lambda _: os.replace(new, log))
    lines = read_lines([log], follow=True)
    assert [next(lines)[1] for _ in range(3)] == ["one", "a longer line", "and another"]


def test_an_end_whose_log_is_gone_is_explained_without_it(tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    assert explain_exit({0: 1}, 1, log) == f"exited with code 1 (log: {log})"
    assert evidence(log, since=5) == f" (log: {log})"


def test_that_a_service_was_ready_explains_no_end(tmp_path: Path) -> None:
    log = tmp_path / "reward.log"
    log.write_text("a warning\nready: reward at 127.0.0.1:7103, 1 rank\n")
    assert explain_exit({0: 3}, 1, log) == f"exited with code 3: a warning (log: {log})"
    assert evidence(log, since=len("a warning\n")) == f" (log: {log})"


def test_a_log_on_a_full_disk_may_lack_the_cause_and_says_so(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs.os, "statvfs", lambda _: SimpleNamespace(f_blocks=8, f_bavail=0))
    assert explain_exit({0: 1}, 1, log) == f"exited with code 1: two (log: {log}, whose disk is full)"


def test_a_disk_that_does_not_say_its_size_is_not_told_as_full(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some file systems over a network or in user space."""
    monkeypatch.setattr(logs.os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0))
    assert explain_exit({0: 1}, 1, log) == f"exited with code 1: two (log: {log})"


def test_a_line_of_a_traceback_is_not_the_cause_that_a_service_reports(tmp_path: Path) -> None:
    """Lines of a traceback are indented, and may be what a peer has sent."""
    log = tmp_path / "reward.log"
    log.write_text(
        "12:00 reward/0 a call failed:\n  Error: no\u2028fatal: forged\n  fatal: forged\nfatal: reward: real\n"
    )
    assert explain_exit({0: 2}, 1, log) == "real"
    assert explain_exit({0: 1}, 1, log) == f"real (log: {log})"
    log.write_text("12:00 reward/0 a call failed:\n  Error: boom\n")
    assert explain_exit({0: 2}, 1, log) == f"exited with code 2: Error: boom (log: {log})"
