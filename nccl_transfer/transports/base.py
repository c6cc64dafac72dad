"""The interface of transports: a `Source` on the rank that holds rows, and a `Reader` in a process that reads them. A
`Transport` makes both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Space
from nccl_transfer.store.store import TensorStore

Handler = Callable[[Any, Any], Any]
"""Handler of an RPC: a function of the request and its gRPC context that returns an awaitable of the response, or an
asynchronous iterator of responses."""


class Route(NamedTuple):
    """Route of rows, from memory of the rank that holds them to memory of the process that reads them."""

    source: Space
    reader: Space


HOST_TO_HOST = Route(Space.HOST, Space.HOST)
HOST_TO_DEVICE = Route(Space.HOST, Space.DEVICE)
DEVICE_TO_DEVICE = Route(Space.DEVICE, Space.DEVICE)


def _copied() -> None:
    """The `verify` of copied bytes: does nothing, since they were copied while their shards were valid."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a read.

    Attributes:
        views: The bytes of each range, which must not be modified: they may be memory of the rank that holds the
            rows.
        verify: To be called after the last use of the views. Raises Refused if a shard was released since the read,
            so that its bytes may have been overwritten, and TransferError if one was marked corrupt. Default: does
            nothing, for copied bytes.
        remap: Returns writable, private views of the same bytes. Default None: `views` are private already.
    """

    views: Sequence[memoryview]
    verify: Callable[[], None] = _copied
    remap: Callable[[], Sequence[memoryview]] | None = None

    def writable(self) -> Reading:
        """Returns a reading of the same bytes whose views are private to the caller and may be modified."""
        return self if self.remap is None else Reading(self.remap(), self.verify)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one transport into this process.

    Attributes:
        bytes: Number of bytes read.
        seconds: Time of all reads, summed also where reads overlap.
        transfers: Number of reads.
    """

    bytes: int = 0
    seconds: float = 0.0
    transfers: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes + other.bytes, self.seconds + other.seconds, self.transfers + other.transfers
        )

    @property
    def gb_per_s(self) -> float:
        """Average rate of a read, in 1e9 bytes per second; 0 without traffic. Of mapped memory, the rate of mapping
        it."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class DeviceMemory(Protocol):
    """Memory of this process's GPU.

    Attributes:
        pointer: Address in device memory.
        nbytes: Size in bytes.
    """

    pointer: int
    nbytes: int

    def free(self) -> None:
        """Frees the memory. Idempotent."""


class Source(ABC):
    """A transport's half at the rank that holds the rows: gives out the shards of a store."""

    service: ClassVar[str] = ""
    """gRPC service of `handlers`, as "module:Service" with the module that protoc generated from its proto; each of its
    methods declares the option (rlhf.v1.access). Empty: the transport has no RPCs."""

    @abstractmethod
    def advert(self) -> bytes:
        """Returns the bytes by which readers find this source, part of the rank's Endpoint: at most some 200, the same
        at every call. Clients that may only read the rank's state do not get them, so they may contain keys."""

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the handler of each method of `service`, by name of the method. They run in the event loop of the
        rank's server and raise errors of `rlhf.errors`. Default: none."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stops giving out rows and frees all resources. Called in the event loop: before the server stops if the
        transport has RPCs, whose streams have to end, else after it."""


class Reader(ABC):
    """A transport's half in the process that reads: reads byte ranges of shards of other ranks. Thread-safe;
    connections are kept between reads.

    Attributes:
        name: Name of the transport.
        routes: Routes that it covers; `create_readers` sets those of its transport. Default: from host memory to
            host memory.
        maps_memory: Whether reads map host memory of processes of the same host and user. Default: False.
    """

    name: ClassVar[str]
    maps_memory: ClassVar[bool] = False
    routes: frozenset[Route] = frozenset({HOST_TO_HOST})

    @abstractmethod
    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        """Returns the reason why this process, on host `host_id`, cannot read from `source` by this transport, or
        None if it can."""

    @abstractmethod
    def check_advert(self, advert: bytes) -> None:
        """Checks an advert that a client has passed on, before this reader connects to what it names.

        Raises:
            ValueError: No source of this transport has such an advert; the text says why.
        """

    @abstractmethod
    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        """Reads bytes of shards of one rank; blocks until they are read.

        Args:
            source: Endpoint of the rank that holds the shards.
            ranges: The bytes to read; the views of the result are in the same order.
            deadline: Time at which the read fails, on the clock of `time.monotonic`, in seconds.

        Raises:
            AttachFailed: What the transport needs to read from the rank could not be set up, though `why_not` gave no
                reason; no byte was read. The rank is then read by the next transport that reaches it.
            DeadlineExceeded: The bytes did not arrive by the deadline.
            ServiceLost: The rank has ended, or cannot be reached.
            Refused: The service has another epoch than `source`, or a shard was released.
            TransferError: A shard was marked corrupt, or the bytes are not those that were asked for.
        """

    def receive(
        self,
        source: Endpoint,
        ranges: Sequence[ByteRange],
        memory: DeviceMemory,
        offsets: Sequence[int],
        deadline: float,
    ) -> None:
        """Reads into memory of this process's GPU instead of host memory; of transports with a route there. Blocks
        until the bytes are there.

        Args:
            source: Endpoint of the rank that holds the shards.
            ranges: The bytes to read.
            memory: Memory to write to, in the order of the private stream of the GPU. Where this raises, it frees the
                memory, once nothing writes there any more.
            offsets: Offset in `memory` of each range.
            deadline: Time at which the read fails, on the clock of `time.monotonic`, in seconds.

        Raises:
            OutOfSpace: A GPU has too little free memory. Other errors as raised by `read`.
            NotImplementedError: The transport has no route to device memory.
        """
        raise NotImplementedError(f"{self.name} has no route to device memory")

    def forget(self, source: Endpoint) -> None:  # noqa: B027 - most plug-ins keep nothing open
        """Closes connections to a source that no call can refer to any longer. Returns at once; views that were
        returned stay valid, and a later read connects again. A running read may raise Refused, and should do so if it
        would otherwise block until its deadline. Default: does nothing, for transports without persistent
        connections."""

    @abstractmethod
    def close(self) -> None:
        """Closes all connections. Views that were returned stay valid."""


class Transport(ABC):
    """A means of moving rows between processes: declares its capabilities, and creates its two halves. A plug-in is an
    instance of a subclass.

    Attributes:
        name: Name in configurations, adverts and traffic counts.
        routes: Routes that it covers. Default: from host memory to host memory.
        is_secure: Whether no other host's process can read or change rows on their way where this process has
            certificates (`rlhf.security`): they stay on the host, or are encrypted with these. Default: False; with
            certificates the transport is then used, on either side, only where the configuration names it.
        needs_gpu: Whether it is of use only in a process that computes on a GPU. Others do not touch CUDA for it, whose
            context would take memory of a GPU. Default: False.
    """

    name: ClassVar[str]
    routes: ClassVar[frozenset[Route]] = frozenset({HOST_TO_HOST})
    is_secure: ClassVar[bool] = False
    needs_gpu: ClassVar[bool] = False

    def unavailable(self) -> str | None:
        """Returns the reason why this process cannot use the transport at all, or None if it can. Default: None."""
        return None

    @abstractmethod
    def source(self, store: TensorStore, host: str) -> Source:
        """Creates the half of a rank that holds rows; it serves when this returns.

        Args:
            store: Store of the rank's shards. Its endpoint is set later, before any reader knows of this source.
            host: IP address on which the rank may listen.
        """

    @abstractmethod
    def reader(self) -> Reader:
        """Creates the half of a process that reads."""
