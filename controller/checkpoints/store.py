"""The directory of a run's checkpoints: which of them are complete, and how one becomes so.

    checkpoints/LATEST                  name of the newest checkpoint
    checkpoints/step-20/COMMIT          written last: step, metric, and the sha256 of files.json
    checkpoints/step-20/files.json      sha256 and size of every other file
    checkpoints/step-20/controller.json state of the controller
    checkpoints/step-20/SERVICE/        state of a service, written by its ranks
    checkpoints/step-30.ID.partial/     not complete; ID differs from controller to controller

A directory without COMMIT is no checkpoint. LATEST is for people and scripts: the newest COMMIT decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from controller.checkpoints.digests import Digest, digest_of, sha256_of_text
from controller.tracking.ownership import Ownership
from controller.tracking.run_directory import json_text, sync_directory, write_atomically, writing
from rlhf.errors import RlhfError

DIRECTORY = "checkpoints"
COMMIT, LATEST, FILES, CONTROLLER = "COMMIT", "LATEST", "files.json", "controller.json"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Commit:
    """Content of a file COMMIT, by which a checkpoint is complete.

    Attributes:
        step: Number of the step that the checkpoint is the state after.
        files_sha256: sha256 (hex) of files.json.
        metric: Name of the metric `checkpoint.best`; empty where there was none.
        value: Its value in that step; None where the step has none.
    """

    step: int
    files_sha256: str
    metric: str = ""
    value: float | None = None

    def to_text(self) -> str:
        """Returns the text of the file: one line of JSON, and one line with its sha256."""
        line = json_text(asdict(self))
        return f"{line}\n{sha256_of_text(line)}\n"

    @staticmethod
    def of_text(text: str) -> Commit:
        """Returns the commit of a file's text; raises ValueError where it is damaged."""
        line, _, rest = text.partition("\n")
        if rest != f"{sha256_of_text(line)}\n":
            raise ValueError("it does not have the sha256 that it names")
        found = json.loads(line)
        value = None if found["value"] is None else float(found["value"])
        return Commit(found["step"], found["files_sha256"], found["metric"], value)


class CheckpointStore:
    """The checkpoints of a run. One process at a time may write them.

    Args:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(os.path.realpath(run_dir)) / DIRECTORY  # Path.resolve raises in a loop of links
        self._ownership = Ownership(run_dir)
        # Ranks may still write for a controller that was killed.
        self._partial = f".{secrets.token_hex(4)}{PARTIAL}"

    def place(self, step: int) -> Path:
        """Returns the path of the complete checkpoint of a step."""
        return self.path / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Returns the path at which this object writes the checkpoint of a step, until `commit`."""
        return self.path / f"step-{step}{self._partial}"

    def begin(self, step: int) -> Path:
        """Makes an empty directory at `partial(step)` and returns its path. Raises RlhfError where that fails."""
        partial = self.partial(step)
        with writing(self.path, partial.name):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return partial

    def commit(
        self,
        step: int,
        state: str,
        written: Mapping[str, Digest],
        metric: str = "",
        value: float | None = None,
    ) -> Commit:
        """Completes the checkpoint of a step, whose services have written and synced their files below
        `partial(step)`: writes controller.json and files.json, renames the directory, and writes COMMIT and LATEST.

        Args:
            step: Number of the step.
            state: Text of controller.json.
            written: Digests of the files that the services have written, by path relative to the checkpoint.
            metric: Name of the metric `checkpoint.best`. Default: none.
            value: Its value in the step. Default: none.

        Raises:
            RlhfError: A file of `written` is not there, writing failed, or another process has taken over the run
                directory; earlier checkpoints are as before.
        """
        # Checked before the first access too, since a new owner of the directory removes partial checkpoints.
        self._ownership.check()
        partial, place = self.partial(step), self.place(step)
        write_atomically(partial / CONTROLLER, state)
        with writing(self.path, partial.name):
            digests = {**written, CONTROLLER: digest_of(partial / CONTROLLER)}
            _check_written(partial, digests)
        files = json_text({name: asdict(digests[name]) for name in sorted(digests)}, indent=1) + "\n"
        write_atomically(partial / FILES, files)
        self._ownership.check()
        self.remove(step)
        with writing(self.path, place.name):
            partial.rename(place)
            sync_directory(self.path)
        commit = Commit(step, sha256_of_text(files), metric, value)
        write_atomically(place / COMMIT, commit.to_text())
        write_atomically(self.path / LATEST, f"{place.name}\n")
        return commit

    def commits(self) -> list[Commit]:
        """Returns the commits of all checkpoints, by step. Left out are checkpoints that a run removes meanwhile,
        directories of other names, such as copies, and damaged checkpoints that are older than another.

        Raises:
            RlhfError: The newest COMMIT is damaged or cannot be read; the text names the file.
        """
        names = (path.parent.name.removeprefix("step-") for path in self.path.glob(f"step-*/{COMMIT}"))
        found: list[Commit] = []
        for step in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
            path = self.place(step) / COMMIT
            try:
                found.append(self._read(path))
            except RlhfError:
                if path.exists() and not found:
                    raise
        return found[::-1]

    def remove(self, step: int) -> None:
        """Removes a checkpoint, if it is there. A removal that is interrupted leaves no COMMIT. Errors of the file
        system are ignored: what is left is removed by `clean`."""
        place = self.place(step)
        with contextlib.suppress(OSError):
            (place / COMMIT).unlink(missing_ok=True)
            sync_directory(place)
            shutil.rmtree(place)

    def clean(self) -> None:
        """Removes what interrupted writes and removals have left: directories of steps without COMMIT."""
        for path in self.path.glob("step-*"):
            if path.name.endswith(PARTIAL) or not (path / COMMIT).exists():
                shutil.rmtree(path, ignore_errors=True)

    def verify(self, commit: Commit) -> dict[str, Any]:
        """Verifies size and sha256 of every file of a checkpoint, and returns the state of the controller in it.

        Raises:
            RlhfError: A file is missing or damaged, or is one more than the checkpoint has; the text names it.
        """
        place = self.place(commit.step)
        listed = _read_text(place / FILES)
        if sha256_of_text(listed) != commit.files_sha256:
            raise _damaged(place / FILES, "its sha256 is not the one in COMMIT")
        digests = {name: Digest(**fields) for name, fields in json.loads(listed).items()}
        if others := sorted(set(_files(place)) - digests.keys() - {COMMIT, FILES}):
            raise _damaged(place / others[0], f"{FILES} does not list it")
        for name, expected in digests.items():
            try:
                found = digest_of(place / name, expected.size)
            except OSError as error:
                raise _damaged(place / name, (error.strerror or str(error)).lower()) from None
            if found.size != expected.size:
                raise _damaged(place / name, f"it has {found.size} bytes instead of {expected.size}")
            if found.sha256 != expected.sha256:
                raise _damaged(place / name, f"its sha256 is not the one in {FILES}")
        return json.loads(_read_text(place / CONTROLLER))

    def _read(self, path: Path) -> Commit:
        try:
            commit = Commit.of_text(_read_text(path))
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, str(error)) from None
        if path.parent != self.place(commit.step):
            raise _damaged(path, f"it is of step {commit.step}")
        return commit


def _check_written(directory: Path, digests: Mapping[str, Digest]) -> None:
    """Raises RlhfError unless the directory has exactly these files, with these sizes, as this host sees it; and syncs
    its directories to disk."""
    found = {name: (directory / name).stat().st_size for name in _files(directory)}
    for name in sorted(found.keys() | digests.keys()):
        if name not in found:
            raise RlhfError(
                f"checkpoint {directory}: {name} was written by a rank, and this host does not see it; checkpoints "
                "need a file system that the controller and all ranks share"
            )
        if name not in digests or found[name] != digests[name].size:
            raise RlhfError(f"checkpoint {directory}: {name} is not as a rank has written it")
    for path in {(directory / name).parent for name in digests}:
        sync_directory(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise _damaged(path, f"not UTF-8: {error.reason}") from None
    except OSError as error:
        raise _damaged(path, (error.strerror or str(error)).lower()) from None


def _damaged(path: Path, why: str) -> RlhfError:
    step = next(each.name for each in (path, *path.parents) if each.parent.name == DIRECTORY)
    return RlhfError(
        f"checkpoint file {path} is damaged: {why}. To resume from an earlier checkpoint, remove {step}"
    )


def _files(directory: Path) -> Iterator[str]:
    """Yields the paths of all files below a directory, relative to it."""
    for top, _, names in os.walk(directory):
        for name in names:
            yield (Path(top) / name).relative_to(directory).as_posix()
