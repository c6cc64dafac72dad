"""Connections of the GPU transports to their sources, kept from one transfer to the next."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import grpc

from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports.base import remaining_s
from nccl_transfer.transports.gpu.liveness import CLOSED, LivenessStream
from rlhf.errors import DeadlineExceeded, Refused
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

CLOSING_S = 5.0
"""How long `close` waits for the transfer under way. It ends at once, unless it is held up in a call of CUDA."""


class PeerConnection(ABC):
    """This process and one source: a channel, something that lasts until a liveness is cut, and one transfer at a time.
    All but `closed`, `close` and `forget` is for the transfer whose turn it is.

    Args:
        channel: Opens a channel to the source.

    Attributes:
        closed: For its streams: ends their waits.
    """

    def __init__(self, channel: Callable[[], grpc.Channel]) -> None:
        self.closed = threading.Event()
        self._open = channel
        self._channel: grpc.Channel | None = None
        self._turn = threading.Lock()

    @property
    @abstractmethod
    def liveness(self) -> LivenessStream | None:
        """Of what there is now."""

    @abstractmethod
    def end(self) -> None:
        """Lets go of what there is, if anything, and cuts its liveness."""

    @property
    def stub(self) -> pb_grpc.TransferServiceStub:
        """Calls the source."""
        if self._channel is None:
            self._channel = self._open()
            self._stub = pb_grpc.TransferServiceStub(self._channel)
        return self._stub

    @contextmanager
    def turn(self, source: Endpoint, where: str, deadline: float) -> Iterator[None]:
        """Until it is left, no other transfer is under way.

        Raises:
            DeadlineExceeded: An earlier one took until the deadline.
            Refused: The transport was closed.
        """
        if not self._turn.acquire(timeout=remaining_s(deadline, source)):
            raise DeadlineExceeded(f"{where}: an earlier transfer took until the deadline")
        try:
            if self.closed.is_set():
                raise Refused(f"{where}: {CLOSED}")
            yield
        finally:
            self._leave()

    def forget(self) -> None:
        """Lets go of a source that has gone, unless a transfer is under way. Should it come back, all begins anew."""
        if self._turn.acquire(blocking=False):
            try:
                if self.liveness is None or not self.liveness.is_alive:
                    self._release_all()
            finally:
                self._leave()

    def close(self) -> None:
        """Ends the transfer that is under way and lets go of everything; later ones are refused."""
        self.closed.set()
        if self._turn.acquire(timeout=CLOSING_S):  # else the transfer itself lets go when it leaves
            self._leave()

    def _leave(self) -> None:
        """Ends the turn, and where it was closed, everything."""
        try:
            if self.closed.is_set():
                self._release_all()
        finally:
            self._turn.release()

    def _release_all(self) -> None:
        """The source is told last: it frees its own, of which nothing is in use here any more."""
        self.end()
        if self._channel is not None:
            self._channel.close()
        self._channel = None


A = TypeVar("A", bound=PeerConnection)


class PeerConnections(Generic[A]):
    """Those of a transport, by the address of the source. Thread-safe.

    Args:
        make: Makes one, with what opens its channel.
        channel: Opens a channel to an address.
    """

    def __init__(
        self, make: Callable[[Callable[[], grpc.Channel]], A], channel: Callable[[str], grpc.Channel]
    ) -> None:
        self._make = make
        self._channel = channel
        self._closed = False
        self._of: dict[str, A] = {}
        self._lock = threading.Lock()

    def of(self, source: Endpoint) -> A:
        """That with a source. One for each address, for good: a rank that restarts may come back at its own.

        Raises:
            Refused: They were closed.
        """
        with self._lock:
            if self._closed:
                raise Refused(f"{source}: {CLOSED}")
            if source.address in self._of:
                return self._of[source.address]
            others = list(self._of.values())
            made = self._of[source.address] = self._make(partial(self._channel, source.address))
        for other in others:
            other.forget()  # the new one may be a rank that restarted elsewhere
        return made

    def close(self) -> None:
        """Closes all, and makes no more."""
        with self._lock:
            self._closed = True
        for connection in self._of.values():
            connection.close()
