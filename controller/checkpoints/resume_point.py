"""The checkpoint that a run is resumed from."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.checkpoints.saver import FORMAT
from controller.checkpoints.store import CheckpointStore, Commit
from controller.tracking.marks import Mark, check_marks
from controller.tracking.run_directory import writing
from rlhf.errors import ConfigError, RlhfError


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint whose files were verified.

    Attributes:
        run_dir: Path of the run directory.
        commit: Content of the checkpoint's file COMMIT.
        run: State of the run as JSON values.
        marks: Mark at the end of each file that the run appends to, as of the checkpoint, by the file's path.
        facts: Facts that the results of the run depend on; see `controller.checkpoints.facts`.
    """

    run_dir: Path
    commit: Commit
    run: Mapping[str, Any]
    marks: Mapping[str, Mark]
    facts: Mapping[str, Any]

    @staticmethod
    def find(run_dir: Path) -> ResumePoint:
        """Finds the newest complete checkpoint of a run and verifies all of its files.

        Raises:
            ConfigError: There is no such directory, or no checkpoint in it.
            RlhfError: A file of the checkpoint is damaged or missing, or a file that the run appends to is not the one
                that the checkpoint continues; the text names the file.
        """
        if not run_dir.is_dir():
            raise ConfigError(f"run directory {run_dir}: no such directory")
        store = CheckpointStore(run_dir)
        commits = store.commits()
        if not commits:
            raise ConfigError(
                f"run directory {run_dir}: there is no complete checkpoint to resume from in {store.path.name}/; a run "
                "writes them with checkpoint.every"
            )
        point = ResumePoint._verified(run_dir, store, commits[-1])
        check_marks(run_dir, point.marks)
        return point

    @staticmethod
    def at(directory: Path) -> ResumePoint:
        """Verifies one checkpoint of a run, RUN/checkpoints/step-N, to read it alone.

        Raises:
            ConfigError: The directory is no complete checkpoint.
            RlhfError: A file of it is damaged; the text names it.
        """
        run_dir = directory.resolve().parent.parent
        store = CheckpointStore(run_dir)
        for commit in store.commits():
            if store.place(commit.step) == directory.resolve():
                return ResumePoint._verified(run_dir, store, commit)
        raise ConfigError(
            f"{directory} is neither a complete checkpoint (RUN/checkpoints/step-N) nor a model directory"
        )

    @staticmethod
    def _verified(run_dir: Path, store: CheckpointStore, commit: Commit) -> ResumePoint:
        content = store.verify(commit)
        if content["format"] != FORMAT:
            raise RlhfError(
                f"checkpoint {store.place(commit.step)} has format {content['format']}, and this version reads {FORMAT}"
            )
        marks = {name: Mark(**fields) for name, fields in content["files"].items()}
        return ResumePoint(run_dir, commit, content["run"], marks, content["facts"])

    def check_newest(self) -> None:
        """Raises ConfigError where the run has another newest checkpoint by now, from another controller. To be called
        by the process that holds the run directory."""
        store = CheckpointStore(self.run_dir)
        # A host that has cached the directory of another one, as over NFS, reads it anew after a change of its own.
        with writing(store.path, "a temporary file"), tempfile.NamedTemporaryFile(dir=store.path, prefix="."):
            pass
        commits = store.commits()
        if commits[-1:] != [self.commit]:
            now = f"step-{commits[-1].step}" if commits else "none"
            raise ConfigError(
                f"run directory {self.run_dir}: the newest checkpoint was step-{self.step} and is {now} now, by "
                "another controller; resume again"
            )

    @property
    def step(self) -> int:
        """Number of the step that the checkpoint is the state after."""
        return self.commit.step

    @property
    def started_unix_ns(self) -> int:
        """Start of the run, Unix time in nanoseconds."""
        return self.facts["identity"]["started_unix_ns"]

    def place_of(self, service: str) -> Path:
        """Returns the directory of a service's state."""
        return CheckpointStore(self.run_dir).place(self.step) / service
