"""NCCL with a hook that runs before every group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nccl_transfer.devices.cuda import Event
from nccl_transfer.transports.gpu.communicator import Communicator, Message, Nccl


class HookedNccl(Nccl):
    """Wraps an NCCL so that a test can keep this side out of a group.

    Args:
        nccl: The NCCL to call.

    Attributes:
        enter: Called before every group; returns whether to enqueue it. Default: always true.
        joined: Number of communicators created so far.
    """

    def __init__(self, nccl: Nccl) -> None:
        self.version = nccl.version
        self.enter: Callable[[], bool] = lambda: True
        self.joined = 0
        self._nccl = nccl

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        communicator = _Hooked(self._nccl.join(unique_id, rank, size), self)
        self.joined += 1
        return communicator


class _Hooked(Communicator):
    def __init__(self, communicator: Communicator, nccl: HookedNccl) -> None:
        self._communicator = communicator
        self._nccl = nccl
        self._entered = True

    def wait(self, event: Event) -> None:
        self._communicator.wait(event)

    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._entered = self._nccl.enter()
        if self._entered:
            self._communicator.group(sends, receives)

    def done(self) -> bool:
        return self._entered and self._communicator.done()

    def abort(self) -> None:
        self._communicator.abort()
