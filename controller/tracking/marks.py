"""Marks in the files that a run appends to, and the cut of these files back to their marks, from where a resumed run
continues them; and the removal of the files of later steps."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.tracking.contents import ROLLOUTS
from controller.tracking.metrics import METRICS_FILE, SAMPLES_FILE
from controller.tracking.run_directory import writing
from controller.tracking.tensorboard import event_files
from controller.tracking.timeline import EARLIER_FILE, TIMELINE_FILE
from rlhf.errors import RlhfError

TAIL_BYTES = 4096


@dataclass(frozen=True)
class Mark:
    """A place in a file that is appended to.

    Attributes:
        size: Number of bytes before the mark.
        tail: sha256 (hex) of the last `TAIL_BYTES` bytes before the mark, or of all if there are fewer.
    """

    size: int
    tail: str

    @staticmethod
    def at_end(path: Path) -> Mark:
        """Returns the mark at the present end of a file; raises OSError where it cannot be read."""
        size = path.stat().st_size
        return Mark(size, _tail(path, size))

    def is_in(self, path: Path) -> bool:
        """Returns whether a file has the same bytes before the mark, judged by the tail; False where the file is
        missing or shorter."""
        try:
            return path.stat().st_size >= self.size and _tail(path, self.size) == self.tail
        except FileNotFoundError:
            return False


def mark_files(run_dir: Path) -> dict[str, Mark]:
    """Returns the marks at the present ends of metrics, samples, timeline and TensorBoard events of a run, by path
    relative to its directory. Raises RlhfError where a file cannot be read."""
    with writing(run_dir, "the marks of a checkpoint"):
        names = (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE)
        paths = [*(run_dir / name for name in names), *event_files(run_dir)]
        return {path.relative_to(run_dir).as_posix(): Mark.at_end(path) for path in paths}


def check_marks(run_dir: Path, marks: Mapping[str, Mark]) -> None:
    """Raises RlhfError if a file of the run except its timeline is missing or is not the one that was marked; the text
    names the file. The timeline has no numbers of the run, and is begun anew where it is lost."""
    for name, mark in marks.items():
        if name != TIMELINE_FILE and not mark.is_in(run_dir / name):
            raise RlhfError(
                f"run directory {run_dir}: {name} does not begin with the {mark.size} bytes that it had when the "
                "checkpoint was written, so it cannot be continued"
            )


def cut_files(run_dir: Path, marks: Mapping[str, Mark]) -> None:
    """Cuts the files of a run back to their marks, and removes TensorBoard events that were begun later. `check_marks`
    must have passed. Raises RlhfError where a file cannot be changed."""
    with writing(run_dir, "the files that the run continues"):
        _find_timeline(run_dir, marks.get(TIMELINE_FILE))
        for name, mark in marks.items():
            if (run_dir / name).exists():
                os.truncate(run_dir / name, mark.size)
        for path in event_files(run_dir):
            if path.relative_to(run_dir).as_posix() not in marks:
                path.unlink()


def remove_rollouts(run_dir: Path, after: int) -> None:
    """Removes the files with the rows of steps above `after`, which a run that goes on there executes again. Raises
    RlhfError where one cannot be removed."""
    with writing(run_dir, ROLLOUTS):
        for path in (run_dir / ROLLOUTS).glob("step-*.jsonl"):
            step = path.stem.removeprefix("step-")
            if step.isdecimal() and int(step) > after:
                path.unlink()


def _find_timeline(run_dir: Path, mark: Mark | None) -> None:
    """Makes the file that `mark` is in `timeline.json` again, after it may have been renamed when it was full; removes
    the timeline where the mark is in neither file."""
    timeline, earlier = run_dir / TIMELINE_FILE, run_dir / EARLIER_FILE
    if mark is None or mark.is_in(timeline):
        return
    timeline.unlink(missing_ok=True)
    if mark.is_in(earlier):
        earlier.rename(timeline)


def _tail(path: Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, size - TAIL_BYTES))
        return hashlib.sha256(file.read(min(size, TAIL_BYTES))).hexdigest()
