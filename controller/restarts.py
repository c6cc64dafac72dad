"""Restarts of a run that has lost a service, from its newest checkpoint."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from controller.checkpoints.resume_point import ResumePoint
from controller.checkpoints.store import CheckpointStore
from controller.role_groups.replacement import LostAgain
from rlhf.errors import CorruptWeights, DeadlineExceeded, PeerFailed, Restarted, RlhfError, ServiceLost
from settings.restarts import pause_before

LOST = (ServiceLost, DeadlineExceeded, PeerFailed, Restarted)
"""Errors of a process that has died, is stuck, has left its collectives, or has been started anew already."""


def how_to_resume(run_dir: Path, *, launch: bool, elsewhere: bool = False) -> str:
    """Returns a line for the terminal with the command that resumes a run that has failed or was stopped, or that it
    has no checkpoint, or why its files cannot be read.

    Args:
        run_dir: The run directory.
        launch: Whether the run had launched its services. Others may still hold its states after its last step.
        elsewhere: Whether it was resumed on services that compute in another way.
    """
    try:
        if not CheckpointStore(run_dir).commits() and (launch or not ResumePoint.journaled(run_dir)):
            return f"{run_dir} has no checkpoint to resume from"
    except (RlhfError, OSError) as error:
        return f"{run_dir} cannot be resumed as it is: {error}"
    options = f"{' --launch' * launch}{' --elsewhere' * elsewhere}"
    return f"to resume: rlhf-controller --resume {shlex.quote(str(run_dir))}{options}"


class Restarts:
    """Decides which errors of a run are followed by a restart from its newest checkpoint.

    Args:
        allowed: Number of restarts from one checkpoint, `checkpoint.restarts`; a newer checkpoint allows as many again.
        launches: Whether each restart starts the services anew. They then load all that they hold, so weights that were
            found to be corrupt are a reason to restart too.
    """

    def __init__(self, allowed: int, *, launches: bool) -> None:
        self._allowed = allowed
        self._reasons: tuple[type[RlhfError], ...] = (*LOST, CorruptWeights) if launches else LOST
        self._step = 0
        self._made = 0

    def next(self, error: BaseException, run_dir: Path) -> str:
        """Counts a restart, and returns a line for the terminal that has the error, its number and the step of the
        checkpoint; an empty text where no restart follows: the error is of another kind, or a LostAgain, which would
        come again; no checkpoint can be read; or the newest one had all of its restarts.

        Args:
            error: Error that has ended the run.
            run_dir: The run directory.
        """
        try:
            is_reason = isinstance(error, self._reasons) and not isinstance(error, LostAgain)
            commits = CheckpointStore(run_dir).commits() if is_reason else []
        except (RlhfError, OSError):
            return ""
        if not commits:
            return ""
        if commits[-1].step != self._step:
            self._step, self._made = commits[-1].step, 0
        if self._made >= self._allowed:
            return ""
        self._made += 1
        return f"error: {error}; restart {self._made} of {self._allowed} from the checkpoint of step {self._step}"

    def pause(self) -> None:
        """Waits before a restart that is not the first from its checkpoint, as long as `pause_before` says."""
        if pause_s := pause_before(self._made):
            time.sleep(pause_s)
