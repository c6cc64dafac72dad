"""Connections of the GPU transports to their sources, which are kept between transfers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import grpc

from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports.common import remaining_s
from nccl_transfer.transports.gpu.liveness import CLOSED, LivenessStream, liveness_channel
from rlhf.errors import AttachFailed, DeadlineExceeded, OutOfSpace, Refused, RlhfError, ServiceLost

CLOSING_S = 5.0
"""Maximum seconds that `close` waits for a running transfer. It ends immediately unless a CUDA call blocks it."""


class Resources(Protocol):
    """Resources of a connection, valid while a liveness stream is open.

    Attributes:
        liveness: The stream.
    """

    liveness: LivenessStream

    def end(self) -> None:
        """Frees the resources, then cancels the stream."""


S = TypeVar("S")
R = TypeVar("R", bound=Resources)
T = TypeVar("T")


class PeerConnection(ABC, Generic[S, R]):
    """Connection of this process to one source: a channel, resources that are valid while a liveness stream is open,
    and a lock that admits one transfer at a time (`turn`). Only `closed`, `close` and `forget` may be used without
    the lock.

    Args:
        address: Address of the source.
        stub: Class of the stub of the transport's gRPC service.

    Attributes:
        closed: Event that is set by `close`, and ends the waits of liveness streams.
    """

    def __init__(self, address: str, stub: Callable[[grpc.Channel], S]) -> None:
        self._make_stub = stub
        self.closed = threading.Event()
        self._address = address
        self._channel: grpc.Channel | None = None
        self._resources: R | None = None
        self._turn = threading.Lock()

    @abstractmethod
    def make_resources(self, source: Endpoint, where: str, deadline: float) -> R:
        """Opens the resources at the source, and frees what it has opened where that fails.

        Args:
            source: The source.
            where: Prefix of error messages.
            deadline: Time on the clock of `time.monotonic`, in seconds.

        Raises:
            RlhfError: The resources cannot be opened; see `attaching`.
        """

    def resources(self, source: Endpoint, where: str, deadline: float) -> R:
        """Returns the resources; opens them anew where there are none or their stream has ended. Arguments and errors
        are those of `make_resources`; where it fails, the channel is closed."""
        if self._resources is not None and not self._resources.liveness.is_alive:
            self.end()
        if self._resources is None:
            try:
                with attaching(where):
                    self._resources = self.make_resources(source, where, deadline)
            except BaseException:
                self.disconnect()
                raise
        return self._resources

    def opened(self, stream: Any, where: str, deadline: float, make: Callable[[LivenessStream, Any], T]) -> T:
        """Returns `make(liveness, message)` for the first message of a stream that was just started; cancels the stream
        where that fails. Raises as `LivenessStream.wait` and `make` do."""
        liveness = LivenessStream(stream, self.closed)
        try:
            return make(liveness, liveness.first(deadline, where))
        except BaseException:
            liveness.cancel()
            raise

    def end(self) -> None:
        """Frees the current resources, if any, and cancels their liveness stream."""
        if self._resources is not None:
            self._resources.end()
        self._resources = None

    @property
    def stub(self) -> S:
        """Stub of the source's service; opens the channel if there is none."""
        if self._channel is None:
            self._channel = liveness_channel(self._address)
            self._stub = self._make_stub(self._channel)
        return self._stub

    @contextmanager
    def turn(self, source: Endpoint, where: str, deadline: float) -> Iterator[None]:
        """Context manager that holds the lock of the connection, so that the block is the only transfer.

        Args:
            source: The source, for error messages.
            where: Prefix of error messages.
            deadline: Time on the clock of `time.monotonic`, in seconds.

        Raises:
            DeadlineExceeded: The deadline has passed, or earlier transfers held the lock until then.
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
        """Frees resources and channel if the liveness stream has ended, or there is none, and no transfer is running;
        else does nothing. A later transfer connects again."""
        if self._turn.acquire(blocking=False):
            try:
                if self._resources is None or not self._resources.liveness.is_alive:
                    self.disconnect()
            finally:
                self._leave()

    def close(self) -> None:
        """Ends the running transfer, for which it waits up to CLOSING_S seconds, and frees resources and channel. Later
        transfers raise Refused."""
        self.closed.set()
        if self._turn.acquire(timeout=CLOSING_S):  # else the transfer frees everything when its turn ends
            self._leave()

    def _leave(self) -> None:
        """Releases the lock; first frees resources and channel if the connection was closed."""
        try:
            if self.closed.is_set():
                self.disconnect()
        finally:
            self._turn.release()

    def disconnect(self) -> None:
        """Frees the resources, then closes the channel; in this order, because the source frees its memory when the
        channel is closed. A later transfer connects again."""
        self.end()
        if self._channel is not None:
            self._channel.close()
        self._channel = None


@contextmanager
def attaching(where: str) -> Iterator[None]:
    """Context manager for the set-up of a connection: raises what fails in the block as AttachFailed, a foreign error
    with the prefix `where`. Errors that say nothing of the transport stay as they are: DeadlineExceeded, ServiceLost
    and Refused, which another transport would meet too, and OutOfSpace, which may be over at the next read."""
    try:
        yield
    except (DeadlineExceeded, ServiceLost, Refused, OutOfSpace):
        raise
    except Exception as error:
        text = str(error) if isinstance(error, RlhfError) else f"{where}: {type(error).__name__}: {error}"
        raise AttachFailed(text) from error


A = TypeVar("A", bound=PeerConnection[Any, Any])


class PeerConnections(Generic[A]):
    """The connections of a transport, one per address of a source. Thread-safe.

    Args:
        make: Creates a connection to an address.
    """

    def __init__(self, make: Callable[[str], A]) -> None:
        self._make = make
        self._closed = False
        self._connections: dict[str, A] = {}
        self._sources: dict[str, Endpoint] = {}
        """The source that a connection was last used for, by its address."""
        self._lock = threading.Lock()

    def to(self, source: Endpoint) -> A:
        """Returns the connection to a source, created at the first call for its address. A connection stays until the
        source is forgotten, since a rank may restart at its address.

        Raises:
            Refused: The transport was closed.
        """
        with self._lock:
            if self._closed:
                raise Refused(f"{source}: {CLOSED}")
            self._sources[source.address] = source
            if source.address in self._connections:
                return self._connections[source.address]
            others = list(self._connections.values())
            made = self._connections[source.address] = self._make(source.address)
        for other in others:
            other.forget()  # the new source may be a rank that restarted at another address
        return made

    def forget(self, source: Endpoint) -> None:
        """Closes the connection to a source, if there is one, in a thread of its own, since a transfer may have to end
        first. A connection that was used for another rank at the address since, after a restart, stays."""
        with self._lock:
            if self._sources.get(source.address) != source:
                return
            del self._sources[source.address]
            connection = self._connections.pop(source.address, None)
        if connection is not None:
            threading.Thread(target=connection.close, name="forget-source", daemon=True).start()

    def close(self) -> None:
        """Closes all connections. Later calls of `to` raise Refused."""
        with self._lock:
            self._closed = True
        for connection in self._connections.values():
            connection.close()
