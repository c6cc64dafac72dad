"""The directory in which `rlhf-deploy` notes what is up lies where every user can write: it is used only if it is this
user's alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deploy import state
from deploy.state import Deployment
from rlhf.errors import Refused


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"rlhf-deploy-{os.getuid()}"


def claim(tmp_path: Path) -> None:
    with state.claim(Deployment(str(tmp_path / "run.toml"), "logs"), grace_s=1):
        assert state.find(tmp_path / "run.toml")


def test_it_is_made_for_this_user_alone_and_used_again(tmp_path: Path, directory: Path) -> None:
    for _ in range(2):
        claim(tmp_path)
        assert directory.stat().st_mode & 0o777 == 0o700
        assert not list(directory.iterdir())


def test_a_link_to_a_directory_of_this_user_is_refused_and_nothing_is_written_there(
    tmp_path: Path, directory: Path
) -> None:
    target = tmp_path / "home"
    target.mkdir(mode=0o700)
    directory.symlink_to(target)
    with pytest.raises(Refused, match=rf"{directory} \(owner: \S.*\) has to be a directory, and no symbolic"):
        claim(tmp_path)
    with pytest.raises(Refused, match="no symbolic link"):
        state.find(tmp_path / "run.toml")
    assert not list(target.iterdir())


def test_a_file_in_its_place_is_refused(tmp_path: Path, directory: Path) -> None:
    directory.touch(mode=0o600)
    with pytest.raises(Refused, match="has to be a directory"):
        claim(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o705])
def test_a_directory_that_others_can_use_is_refused(mode: int, tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(Refused, match=rf"{directory} \(owner: \S.*\) has mode {mode:o}.* must be 700"):
        claim(tmp_path)
    assert not list(directory.iterdir())


def test_a_directory_of_another_user_is_refused_with_the_owner(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o700)
    owner, real = 54321, Path.lstat

    def lstat(path: Path) -> Any:
        found = real(path)
        return os.stat_result((*found[:4], owner, *found[5:])) if path == directory else found

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(Refused, match=rf"{directory} \(owner: uid {owner}\) belongs to another user"):
        claim(tmp_path)


def test_a_deployment_whose_file_was_removed_ends_and_leaves_that_of_the_next(
    tmp_path: Path, directory: Path
) -> None:
    def claimed() -> contextlib.AbstractContextManager[None]:
        return state.claim(Deployment(str(tmp_path / "run.toml"), str(tmp_path)), grace_s=1)

    def file() -> Path:
        (found,) = directory.iterdir()
        return found

    with claimed():
        file().unlink()
    with contextlib.ExitStack() as first:
        first.enter_context(claimed())
        file().unlink()
        with claimed():
            first.close()
            assert file()


def test_a_file_that_its_killed_supervisor_has_not_written_to_the_end_is_written_anew(
    tmp_path: Path, directory: Path
) -> None:
    deployment = Deployment(str(tmp_path / "run.toml"), str(tmp_path))
    with state.claim(deployment, grace_s=1):
        (file,) = directory.iterdir()
        whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    assert state.find(tmp_path / "run.toml") is None
    with state.claim(deployment, grace_s=1):
        assert state.find(tmp_path / "run.toml") == deployment
