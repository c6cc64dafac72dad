"""One small all-gather at a time between the ranks of a service, on a process group that nothing else uses.

Engines use other groups, so a rank that tells its peers of a failure completes no collective of an engine by mistake.
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
"""Numbers in a note; the same in all rounds, since ranks may be at different places of a call."""


def make_group(size: int) -> ProcessGroup:
    """The process group of all ranks for rounds. Collective."""
    return own_group([range(size)])


class Round:
    """An all-gather of one note per rank. It ends when every rank has begun it.

    Args:
        note: At most NOTE_LENGTH numbers, float64; padded with 0.

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
        """Whether every rank has begun the round, or one has died."""
        return self._work.is_completed()

    def wait(self, until: float) -> list[list[float]]:
        """The notes of all ranks, in rank order; blocks this thread.

        Args:
            until: Latest time of the peers, by `time.monotonic()`.

        Raises:
            OutOfStep: A peer did not come, or died. The round is still open, so this rank can begin no other.
        """
        try:
            self._work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise _out_of_step(error) from error
        return self._table.tolist()

    async def arrive(self) -> list[list[float]]:
        """The notes of all ranks, in rank order; waits without a deadline.

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
    return OutOfStep(f"a peer of rank {dist.get_rank()} did not join a collective: {error}")
