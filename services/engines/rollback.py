"""Undoes a change of an engine's state that has failed."""

from __future__ import annotations

from rlhf.errors import OutOfStep
from services.engines.base import Snapshot, TrainEngine


def undo(engine: TrainEngine, before: Snapshot, failure: BaseException) -> None:
    """Restores the state that an engine had before a change that has failed. Not collective.

    Args:
        engine: The engine.
        before: Its snapshot from before the change.
        failure: Why the change failed, for the message.

    Raises:
        OutOfStep: The snapshot could not be restored either, so this rank's state is that after no call, and its
            process has to exit.
    """
    try:
        engine.restore(before)
    except Exception as error:
        raise OutOfStep(
            f"the state from before could not be restored ({type(error).__name__}: {error}) after "
            f"{type(failure).__name__}: {failure}"
        ) from error
