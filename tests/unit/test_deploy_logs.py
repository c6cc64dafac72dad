"""Logs are followed line by line, also where they are begun anew or removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy import logs
from deploy.logs import read_lines


def test_a_log_begun_anew_while_it_is_followed_begins_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "actor.log"
    log.write_text("one\na line that was cut o")
    changes = iter([
        lambda: log.write_text("two\nhalf"),
        lambda: log.unlink(),
        lambda: log.write_text("three\n"),
    ])  # fmt: skip
    monkeypatch.setattr(logs.time, "sleep", lambda _: next(changes)())
    lines = read_lines([log], follow=True)
    assert [next(lines) for _ in range(3)] == [(log, "one"), (log, "two"), (log, "three")]


def test_a_log_that_was_replaced_by_a_longer_one_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, new = tmp_path / "actor.log", tmp_path / "new.log"
    log.write_text("one\n")
    new.write_text("a longer line\nand another\n")
    monkeypatch.setattr(logs.time, "sleep", lambda _: os.replace(new, log))
    lines = read_lines([log], follow=True)
    assert [next(lines)[1] for _ in range(3)] == ["one", "a longer line", "and another"]
