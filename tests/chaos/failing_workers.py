"""Workers that fail at a point that a test draws: at the n-th call of a function of ours within a method.

A rank looks for a file that tells it where to fail, `rank-N.fault` in the directory CHAOS_FAULTS, and writes how many
calls of functions its method made to `rank-N.calls`.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf.roles import find_role
from services.actor.worker import ActorWorker
from services.critic.worker import CriticWorker
from services.reference.worker import ReferenceWorker
from services.reward.model import LearningRewardWorker
from services.runtime.main import command
from services.runtime.worker import CallResult, Worker

FAULTS = "CHAOS_FAULTS"
OURS = str(Path(sys.modules["services.runtime.worker"].__file__ or "").parent.parent)


class Failing(Worker):
    """Runs methods as its base does, until it is told to fail."""

    def around(self, run: Callable[[], CallResult]) -> CallResult:
        directory, name = Path(os.environ[FAULTS]), f"rank-{self.ranks.rank}"
        fault = directory / f"{name}.fault"
        if not fault.exists():
            return super().around(run)
        told = json.loads(fault.read_text())
        fault.unlink()
        trace = Trace(**told)
        sys.settrace(trace)
        sys.unraisablehook = trace.was_ignored
        try:
            return super().around(run)
        finally:
            sys.settrace(None)
            sys.unraisablehook = sys.__unraisablehook__
            (directory / f"{name}.calls").write_text(json.dumps([trace.calls, trace.place]))


class Trace:
    """Counts calls of functions of ours, and raises an error at one of them.

    Args:
        at: Number of the call, from 1; 0: none.
        error: Name of a class of errors.

    Attributes:
        calls: How many there were.
        place: Name of the function that failed; empty where none did.
    """

    def __init__(self, at: int, error: str) -> None:
        self._at, self._error = at, error
        self.calls, self.place = 0, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(OURS):
            return
        self.calls += 1
        if self.calls == self._at:
            self.place = frame.f_code.co_qualname
            raise getattr(builtins, self._error)("a rank fails, says the test")

    def was_ignored(self, error: sys.UnraisableHookArgs) -> None:
        """Python ignored the error, as it does in a generator that is being closed: nothing has failed."""
        self.place = ""


class FailingActor(Failing, ActorWorker):
    """The policy."""


class FailingCritic(Failing, CriticWorker):
    """The value model."""


class FailingReference(Failing, ReferenceWorker):
    """The frozen policy."""


class FailingReward(Failing, LearningRewardWorker):
    """The reward model."""


def serve(
    role: str,
    rank: int,
    num_ranks: int,
    port: int,
    faults: Path,
    config: Path,
    log: Path,
    *,
    can_fail: bool = True,
) -> None:
    """Serves one rank in this process, which has imported all this already.

    Args:
        can_fail: Serves by a worker that can be told to fail; False: by the worker of the role's own entry point.
    """
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CHAOS_FAULTS=str(faults),
    )  # fmt: skip
    sys.argv = [role, "--config", str(config)]
    spec = find_role(role)
    failing = replace(spec, worker=f"{__name__}:Failing{role.capitalize()}")
    command(failing if can_fail else spec)()
