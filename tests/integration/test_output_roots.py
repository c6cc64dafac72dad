"""Services write below the directories that their config names, and replace nothing that they have not written."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import HUGGING_FACE, POLICY_LOSS, SHARDED, TWO_STEPS, Cluster, Service
from integration.test_server import training_rows
from rlhf.errors import InvalidRequest, PeerFailed, Refused, RlhfError

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "save": ("save_checkpoint", {"format": SHARDED}),
    "save_in_background": ("save_checkpoint", {"format": SHARDED, "in_background": True}),
    "export": ("save_checkpoint", {"format": HUGGING_FACE}),
    "load": ("load_checkpoint", {}),
    "profile": ("profile", {"calls": 1}),
}


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that is not below the root of the tests' services, and empty at the end."""
    directory = tmp_path_factory.getbasetemp().with_name(f"outside-{tmp_path_factory.getbasetemp().name}")
    directory.mkdir()
    yield directory
    assert not list(directory.iterdir())
    directory.rmdir()


@pytest.mark.parametrize("way", ["elsewhere", "up", "link", "root"])
@pytest.mark.parametrize("name", METHODS)
def test_a_directory_outside_is_refused_and_those_allowed_are_named(
    actor: Service, cluster: Cluster, tmp_path: Path, outside: Path, name: str, way: str
) -> None:
    (root,) = cluster.config.services["actor"].output_roots
    (tmp_path / "link").symlink_to(outside)
    up = Path(*[".."] * len(tmp_path.relative_to(root.parent).parts))
    directory = {
        "elsewhere": outside / "x",
        "up": tmp_path / up / outside.name / "x",
        "link": tmp_path / "link" / "x",
        "root": root,
    }[way]
    method, options = METHODS[name]
    outcomes = actor.start(method, directory=str(directory), **options).outcomes()
    assert [type(outcome) for outcome in outcomes] == [InvalidRequest, InvalidRequest]
    assert f"output_roots: {root.resolve()}" in str(outcomes[0])
    assert list(actor.description.output_roots) == [str(root.resolve())]


@pytest.mark.parametrize("kind", ["manifest.json", "config.json", ""])
@pytest.mark.parametrize("name", ["save", "export"])
def test_a_directory_with_a_thesis_is_not_replaced(
    actor: Service, tmp_path: Path, name: str, kind: str
) -> None:
    """Also where it looks like a checkpoint, or is one."""
    method, options = METHODS[name]
    thesis = tmp_path / "mine" / "thesis.tex"
    if kind:
        thesis.parent.mkdir()
        (thesis.parent / kind).write_text("{}")
    else:
        actor.call(method, directory=str(thesis.parent), **options)
    before = {path: path.read_bytes() for path in thesis.parent.iterdir()}
    thesis.write_text("text")
    outcomes = actor.start(method, directory=str(thesis.parent), **options).outcomes()
    assert [type(outcome) for outcome in outcomes] == [InvalidRequest, PeerFailed]
    assert "not replaced" in str(outcomes[0])
    assert {path: path.read_bytes() for path in thesis.parent.iterdir()} == {**before, thesis: b"text"}
    actor.call(method, directory=str(tmp_path / "other"), **options)
    actor.call(method, directory=str(tmp_path / "other"), **options)


def test_a_session_that_could_not_write_its_output_does_not_begin_and_changes_nothing(
    actor: Service, tmp_path: Path, outside: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    actor.call("update_actor", training_rows(), loss=POLICY_LOSS, schedule=TWO_STEPS, temperature=1.0)
    versions, sha256 = actor.versions, actor.export(tmp_path / "before")
    for output, said in [
        (outside / "x", "output_roots"),
        (file / "x", "cannot be written"),
        (file, "not replaced"),
    ]:
        outcome, other = actor.start(
            "begin_session", directories=[str(tmp_path / "model"), str(output)]
        ).outcomes()
        assert isinstance(outcome, InvalidRequest)
        assert said in str(outcome)
        assert isinstance(other, InvalidRequest | PeerFailed)
    assert actor.versions == versions
    assert actor.export(tmp_path / "after") == sha256
    actor.call("begin_session", directories=[str(tmp_path / "new" / "model"), str(tmp_path / "before")])
    assert actor.versions == [0, 0]
    assert not (tmp_path / "new").exists()


def test_a_service_without_weights_has_no_output(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.service("reward") as reward:
        for outcome in reward.start("begin_session", directories=[str(tmp_path / "reward")]).outcomes():
            assert isinstance(outcome, InvalidRequest)
            assert "no weights to save" in str(outcome)


def test_a_profile_of_very_many_calls_is_refused(actor: Service, tmp_path: Path) -> None:
    for outcome in actor.start("profile", directory=str(tmp_path), calls=2**31).outcomes():
        assert isinstance(outcome, InvalidRequest)
        assert "at most 100" in str(outcome)


def test_a_checkpoint_in_the_background_is_awaited_by_its_directory(actor: Service, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    actor.call("save_checkpoint", directory=str(directory), format=SHARDED, in_background=True)
    told = [actor.ask("AwaitCheckpoint", rank, directory=str(directory)) for rank in actor.ranks]
    sizes = {file.path: file.size for answer in told for file in answer.files}
    names = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert sizes == {name: (directory / name).stat().st_size for name in names}
    assert {path.name for path in directory.iterdir()} == sizes.keys()
    for file in told[1].files:
        assert file.sha256 == hashlib.sha256((directory / file.path).read_bytes()).hexdigest()
    actor.load(directory)
    with pytest.raises(InvalidRequest, match="is not empty"):
        actor.call("save_checkpoint", directory=str(directory), format=SHARDED, in_background=True)
    with pytest.raises(Refused, match="writes no checkpoint to"):
        actor.ask("AwaitCheckpoint", directory=str(tmp_path / "other"))
    with pytest.raises(InvalidRequest, match="output_roots"):
        actor.ask("AwaitCheckpoint", directory="/tmp")


def test_a_write_in_the_background_that_fails_names_rank_and_file(actor: Service, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    actor.call("save_checkpoint", directory=str(directory), format=SHARDED, in_background=True)
    actor.ask("AwaitCheckpoint", 0, directory=str(directory))
    shutil.rmtree(directory)
    with pytest.raises(
        RlhfError, match=r"actor rank 0 AwaitCheckpoint: .*[Nn]o such file.*manifest|rank-00000"
    ):
        actor.ask("AwaitCheckpoint", 0, directory=str(directory))
