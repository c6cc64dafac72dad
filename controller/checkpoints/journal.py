"""The journal of a run: its state after the last step, written after every step. With services that still hold theirs
from the same step, a run goes on from there without a checkpoint.

    line 1: facts that the results depend on, as in a checkpoint
    line 2: step, state of the run, marks in its files, and the ids of the states of its services
    line 3: sha256 of the two lines

It is replaced by renaming and not synced to disk: it is of use only while the services live, and one that is damaged or
older than their states is not used.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from controller.checkpoints.digests import sha256_of_text
from controller.checkpoints.store import DIRECTORY
from controller.tracking.marks import Mark
from controller.tracking.ownership import Ownership
from controller.tracking.run_directory import json_text, writing

JOURNAL = "journal.jsonl"
FORMAT = 1
"""Version of the form of controller.json and of the journal."""


class Journal:
    """Writer of the journal of a run.

    Args:
        run_dir: The run directory, which this process holds.
        facts: Facts that the results of the run depend on, as JSON values.
    """

    def __init__(self, run_dir: Path, facts: Mapping[str, Any]) -> None:
        self._path = run_dir / DIRECTORY / JOURNAL
        self._facts = json_text(facts)
        self._ownership = Ownership(run_dir)

    def write(self, content: Mapping[str, Any]) -> None:
        """Replaces the journal by what `content_of` returned. Raises RlhfError where writing fails, or another process
        has taken over the run directory."""
        self._ownership.check()
        lines = f"{self._facts}\n{json_text(content)}\n"
        temporary = self._path.with_name(f".{JOURNAL}.tmp")
        with writing(self._path.parent, JOURNAL):
            self._path.parent.mkdir(exist_ok=True)
            temporary.write_text(f"{lines}{sha256_of_text(lines)}\n")
            os.replace(temporary, self._path)


def content_of(
    step: int, run: Mapping[str, Any], marks: Mapping[str, Mark], states: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the state of a run after a step as JSON values, as a checkpoint and the journal have it.

    Args:
        step: Number of the step.
        run: State of the run after it, as JSON values.
        marks: Marks at the present ends of the files that the run appends to.
        states: Id of the state of each service, by name.
    """
    files = {name: asdict(mark) for name, mark in marks.items()}
    return {"format": FORMAT, "step": step, "run": run, "files": files, "states": dict(states)}


def read_journal(run_dir: Path) -> dict[str, Any] | None:
    """Returns the content of a run's journal as JSON values, facts included; None where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        lines = (run_dir / DIRECTORY / JOURNAL).read_text().splitlines(keepends=True)
        if len(lines) == 3 and lines[2] == f"{sha256_of_text(lines[0] + lines[1])}\n":
            return {**json.loads(lines[1]), "facts": json.loads(lines[0])}
    return None


def remove_journal(run_dir: Path) -> None:
    """Removes the journal of a run, if there is one. Raises RlhfError where that fails."""
    with writing(run_dir / DIRECTORY, JOURNAL):
        (run_dir / DIRECTORY / JOURNAL).unlink(missing_ok=True)
