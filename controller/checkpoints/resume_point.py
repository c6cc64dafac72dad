"""The point that a run is resumed from: a checkpoint, or its journal with services that still hold their states."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.checkpoints.journal import FORMAT, read_journal
from controller.checkpoints.store import COMMIT, CheckpointStore, Commit
from controller.tracking.marks import Mark, check_marks
from controller.tracking.run_directory import writing
from rlhf.errors import ConfigError, RlhfError


@dataclass(frozen=True)
class ResumePoint:
    """The state of a run after a step: in a checkpoint whose files were verified, or in its journal.

    Attributes:
        run_dir: Path of the run directory.
        step: Number of the step.
        commit: Content of the checkpoint's file COMMIT; None for the journal, which has no state of services.
        run: State of the run as JSON values.
        marks: Mark at the end of each file that the run appends to, as of the checkpoint, by the file's path.
        facts: Facts that the results of the run depend on; see `controller.checkpoints.facts`.
        states: Id of the state of each service after the step, by name, of those that report one.
    """

    run_dir: Path
    step: int
    commit: Commit | None
    run: Mapping[str, Any]
    marks: Mapping[str, Mark]
    facts: Mapping[str, Any]
    states: Mapping[str, str]

    @staticmethod
    def journaled(run_dir: Path) -> ResumePoint | None:
        """Returns the point of a run's journal; None where it has none, or a damaged one, or one that is older than its
        newest checkpoint or of other files. Raises RlhfError where the COMMIT of a checkpoint is damaged."""
        content = read_journal(run_dir)
        if content is None or content["format"] != FORMAT:
            return None
        point = ResumePoint._of(run_dir, content, None)
        commits = CheckpointStore(run_dir).commits()
        if commits and commits[-1].step > point.step:
            return None
        try:
            check_marks(run_dir, point.marks)
        except RlhfError:
            return None
        return point

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
            if (run_dir / COMMIT).is_file():
                raise ConfigError(
                    f"{run_dir} is a checkpoint; resume its run, {run_dir.resolve().parent.parent}"
                )
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
            ConfigError: The directory is no complete checkpoint, or its run has removed it meanwhile.
            RlhfError: A file of it is damaged; the text names it.
        """
        place = Path(os.path.realpath(directory))  # Path.resolve raises in a loop of links
        run_dir = place.parent.parent
        store = CheckpointStore(run_dir)
        for commit in store.commits():
            if store.place(commit.step) == place:
                try:
                    return ResumePoint._verified(run_dir, store, commit)
                except RlhfError:
                    if (directory / COMMIT).exists():
                        raise
                    raise ConfigError(
                        f"{directory} was removed while it was read, by a run that keeps newer checkpoints alone"
                    ) from None
        if (directory / "config.json").is_file():
            raise ConfigError(f"{directory} is a model directory, and no checkpoint (RUN/checkpoints/step-N)")
        own = CheckpointStore(directory)
        if commits := own.commits():
            newest = own.place(commits[-1].step)
            raise ConfigError(
                f"{directory} is a run; name one of its checkpoints, of which the newest is {newest}"
            )
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
        return ResumePoint._of(run_dir, content, commit)

    @staticmethod
    def _of(run_dir: Path, content: Mapping[str, Any], commit: Commit | None) -> ResumePoint:
        marks = {name: Mark(**fields) for name, fields in content["files"].items()}
        return ResumePoint(
            run_dir,
            content["step"],
            commit,
            content["run"],
            marks,
            content["facts"],
            content.get("states", {}),
        )

    def check_newest(self) -> None:
        """Raises ConfigError where the run has another journal or newest checkpoint by now, from another controller. To
        be called by the process that holds the run directory."""
        store = CheckpointStore(self.run_dir)
        # Creating a file invalidates this host's cache of the directory, which another host may have changed over NFS.
        with writing(store.path, "a temporary file"), tempfile.NamedTemporaryFile(dir=store.path, prefix="."):
            pass
        if self.commit is None:
            if ResumePoint.journaled(self.run_dir) != self:
                raise ConfigError(
                    f"run directory {self.run_dir}: another controller has gone on with the run after step "
                    f"{self.step}; resume again"
                )
            return
        commits = store.commits()
        # By their texts: a value that is no number is not equal to itself.
        if [each.to_text() for each in commits[-1:]] != [self.commit.to_text()]:
            now = f"step-{commits[-1].step}" if commits else "none"
            raise ConfigError(
                f"run directory {self.run_dir}: the newest checkpoint was step-{self.step} and is {now} now, by "
                "another controller; resume again"
            )

    @property
    def started_unix_ns(self) -> int:
        """Start of the run, Unix time in nanoseconds."""
        return self.facts["identity"]["started_unix_ns"]

    def place_of(self, service: str) -> Path:
        """Returns the directory of a service's state in the checkpoint."""
        return CheckpointStore(self.run_dir).place(self.step) / service
