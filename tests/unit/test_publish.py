"""Directories appear whole or not at all, replace only their like, and a crash leaves the old one or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import Refused
from services.storage import publish
from services.storage.publish import (
    FILES,
    check_replaceable,
    check_writable,
    only_writer,
    partial_of,
    readable_path,
    settle,
)

CRASHED = 9


def written(directory: Path, text: str) -> Path:
    """Partial directory to publish, with a file and one below."""
    partial = partial_of(directory)
    (partial / "below").mkdir(parents=True)
    (partial / "config.json").write_text(text)
    (partial / "below" / f"{text}.txt").write_text(text)
    return partial


def published(directory: Path, text: str) -> Path:
    publish.publish(written(directory, text), directory)
    return directory


def read(directory: Path) -> str:
    """Which one it is, and all of it."""
    text = (directory / "config.json").read_text()
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert files == {"config.json", f"below/{text}.txt", FILES}
    assert set(json.loads((directory / FILES).read_text())["files"]) == files - {FILES}
    return text


def test_a_directory_replaces_an_earlier_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    directory = published(tmp_path / "model", "old")
    check_replaceable(directory)
    assert read(published(directory, "new")) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_not_there_or_empty_is_replaceable(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "nothing")
    check_replaceable(tmp_path)
    (tmp_path / "empty").mkdir()
    assert read(published(tmp_path / "empty", "new")) == "new"


def a_thesis_beside_a_config(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "thesis.tex").write_text("text")


def a_thesis_in_a_model(directory: Path) -> None:
    published(directory, "model")
    (directory / "below" / "thesis.tex").write_text("text")


def a_link_in_a_model(directory: Path) -> None:
    published(directory, "model")
    (directory / "thesis").symlink_to(directory.parent)


def a_list_that_cannot_be_read(directory: Path) -> None:
    published(directory, "model")
    (directory / FILES).write_text("[]")


def a_file(directory: Path) -> None:
    directory.write_text("text")


def a_link(directory: Path) -> None:
    directory.symlink_to(published(directory.with_name("elsewhere"), "model"))


@pytest.mark.parametrize(
    "make",
    [
        a_thesis_beside_a_config,
        a_thesis_in_a_model,
        a_link_in_a_model,
        a_list_that_cannot_be_read,
        a_file,
        a_link,
    ],
)
def test_what_may_be_the_work_of_somebody_is_not(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine .*not replaced"):
        check_replaceable(tmp_path / "mine")


def crash_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends this process before the n-th time that the disk is told something."""
    told = 0

    def crashing(function: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*arguments: Any, **options: Any) -> Any:
            nonlocal told
            told += 1
            if told == number:
                os._exit(CRASHED)
            return function(*arguments, **options)

        return tell

    for owner, name in ((os, "rename"), (os, "fsync"), (publish, "_exchange"), (publish.shutil, "rmtree")):
        monkeypatch.setattr(owner, name, crashing(getattr(owner, name)))


@pytest.mark.parametrize("exchanges", [True, False], ids=["at once", "one after the other"])
def test_a_crash_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """One after the other, the old one may have to be given its name again by the next who comes."""
    if not exchanges:
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    found, code, number = [], CRASHED, 0
    while code == CRASHED:
        number += 1
        directory = published(tmp_path / str(number), "old")
        partial = written(directory, "new")
        child = os.fork()
        if not child:
            crash_at(number, monkeypatch)
            publish.publish(partial, directory)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        readable = read(readable_path(directory))
        if not exchanges:
            settle(directory)
        assert read(directory) == readable
        found.append(read(directory))
    assert code == 0
    assert found == sorted(found, reverse=True), "old ones, then new ones"
    assert {"old", "new"} == set(found)
    assert not list(tmp_path.glob(".*previous"))


def test_a_directory_that_could_be_written_is_not_made_yet(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / "one" / "actor")
    check_writable(published(tmp_path / "model", "old"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_could_not_be_written_is_told(tmp_path: Path) -> None:
    a_thesis_beside_a_config(tmp_path / "mine")
    with pytest.raises(ValueError, match="not replaced"):
        check_writable(tmp_path / "mine")
    file = tmp_path / "mine" / "thesis.tex"
    with pytest.raises(ValueError, match=rf"{file}/runs/actor cannot be written: {file}: Not a directory"):
        check_writable(file / "runs" / "actor")
    with pytest.raises(ValueError, match="/proc/actor cannot be written: /proc: "):
        check_writable(Path("/proc/actor"))


def test_a_directory_has_one_writer_at_a_time(tmp_path: Path):
    """The other one is refused, and leaves what the first has written so far."""
    directory = tmp_path / "new" / "checkpoint"
    with only_writer(directory) as partial:
        partial.mkdir()
        (partial / "weights").touch()
        for _ in range(2):
            with pytest.raises(Refused, match=f"{directory} is being written"), only_writer(directory):
                raise AssertionError("two writers")
        assert (partial / "weights").exists()
        with only_writer(directory.with_name("other")):
            pass
    assert list(tmp_path.rglob("*")) == [directory.parent]
    with only_writer(directory):
        pass


def test_the_lock_of_a_writer_that_was_killed_holds_up_nobody(tmp_path: Path):
    child = os.fork()
    if child == 0:
        with only_writer(tmp_path / "checkpoint") as partial:
            partial.mkdir()
            os._exit(CRASHED)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CRASHED
    assert len(os.listdir(tmp_path)) == 2
    with only_writer(tmp_path / "checkpoint") as partial:
        assert partial.exists()
    assert os.listdir(tmp_path) == []
