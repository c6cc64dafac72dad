"""Undoes a change of an engine's state that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.errors import OutOfStep
from services.engines.base import Snapshot, TrainEngine


@contextmanager
def undone_if_it_fails(engine: TrainEngine, before: Snapshot) -> Iterator[None]:
    """Context manager of a block that changes weights or optimizer state: if the block fails, restores `before` and
    raises the block's error. Not collective.

    Args:
        engine: Engine that the block changes.
        before: Snapshot of the engine from before the block.

    Raises:
        OutOfStep: The snapshot could not be restored either, so this rank's state is that of no call, and its process
            has to exit.
    """
    try:
        yield
    except BaseException as failure:
        try:
            engine.restore(before)
        except Exception as error:
            raise OutOfStep(
                f"the state from before could not be restored ({type(error).__name__}: {error}) after "
                f"{type(failure).__name__}: {failure}"
            ) from error
        raise
