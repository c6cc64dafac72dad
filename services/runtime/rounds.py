"""Small all-gathers between the ranks of a service, one at a time, on a process group that nothing else uses.

Engines use other groups. So a rank that reports a failure in a round cannot be matched with peers that wait in a
collective of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.errors import OutOfStep
from services.runtime.process_groups import own_group

NOTE_LENGTH = 8
"""Length of every note. Fixed, because a rank that failed and one that has not may meet in the same round."""


def make_group(size: int) -> ProcessGroup:
    """Creates the process group of all `size` ranks that `Round` uses, on gloo, since notes are in host memory on GPU
    ranks too. Collective."""
    return own_group([range(size)], "gloo")


class Round:
    """An asynchronous all-gather of one note (a few numbers) per rank. It completes when every rank has begun it.

    Args:
        group: Process group of all ranks, from `make_group`.
        note: This rank's note, at most NOTE_LENGTH numbers; padded with 0 and sent as float64.

    Raises:
        OutOfStep: A peer has died.
    """

    def __init__(self, group: ProcessGroup, note: Sequence[float]) -> None:
        mine = torch.zeros(NOTE_LENGTH, dtype=torch.float64)
        mine[: len(note)] = torch.tensor(note, dtype=torch.float64)
        self._table = torch.empty((group.size(), NOTE_LENGTH), dtype=torch.float64)
        try:
            work = dist.all_gather(list(self._table.unbind()), mine, group=group, async_op=True)
        except RuntimeError as error:
            raise _out_of_step(error) from error
        assert work is not None
        self._work = work

    @property
    def is_over(self) -> bool:
        """Whether the all-gather has ended: every rank has begun the round, or one has died."""
        return self._work.is_completed()

    def wait(self, until: float) -> list[list[float]]:
        """Blocks this thread until every rank has begun the round; returns the notes of all ranks, in rank order.

        Args:
            until: How long to wait for the other ranks, as a time of `time.monotonic()` in seconds.

        Raises:
            OutOfStep: A peer did not come by `until`, or died. This rank must then begin no other round.
        """
        try:
            self._work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise _out_of_step(error) from error
        return self._table.tolist()

    async def arrive(self) -> list[list[float]]:
        """Waits on the event loop, without a deadline, until every rank has begun the round; returns the notes of all
        ranks, in rank order.

        Raises:
            OutOfStep: A peer died.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended.set)

        future = self._work.get_future()
        future.add_done_callback(end)
        await ended.wait()
        try:
            future.value()
        except RuntimeError as error:
            raise _out_of_step(error) from error
        return self._table.tolist()


def _out_of_step(error: RuntimeError) -> OutOfStep:
    """Converts an error of torch's collectives, which means that a peer died or was late, to OutOfStep."""
    return OutOfStep(f"a peer of rank {dist.get_rank()} did not join a collective: {error}")
