"""A GPU whose streams run late: an operation that the host enqueues is carried out at a random later time, in the order
of its stream. Vector clocks find accesses to the same memory that nothing orders.

Memory has a value per granule of 256 bytes. A copy out of memory that another process has opened is optimistic: it may
race, and its reader finds that out by itself; `World.tainted` has those that did.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nccl_transfer.devices.cuda import Cuda, Event
from nccl_transfer.devices.tensors import DeviceBytes, DeviceTensors

GRANULE = 256
HOST = -1
Clock = dict[int, int]


class Race(AssertionError):
    """Two accesses to the same memory, at least one of them a write, that nothing orders, or a value that is not the
    one that was written."""


def join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


@dataclass
class _Operation:
    run: Callable[[Clock], None]
    clock: Clock
    is_ready: Callable[[], bool]


@dataclass
class _Granule:
    value: int = 0
    write: tuple[int, int] | None = None
    reads: dict[int, tuple[int, int | None]] = field(default_factory=dict)


class World:
    """The GPU, for all processes on it. Everything happens in one thread."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.host: Clock = {HOST: 1}
        self.tainted: set[int] = set()
        self.between: Callable[[], None] = lambda: None
        self.tokens = itertools.count(1)
        self._numbers = itertools.count(1)
        self._streams: dict[int, deque[_Operation]] = {}
        self._clocks: dict[int, Clock] = {}
        self._granules: dict[int, _Granule] = {}
        self._next = GRANULE
        self.opened: dict[int, tuple[int, int]] = {}

    def stream(self) -> int:
        number = next(self._numbers)
        self._streams[number], self._clocks[number] = deque(), {}
        return number

    def malloc(self, nbytes: int) -> int:
        pointer = self._next
        self._next += -(-nbytes // GRANULE) * GRANULE
        return pointer

    def enqueue(
        self, stream: int, run: Callable[[Clock], None], is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.host[HOST] += 1
        self._streams[stream].append(_Operation(run, dict(self.host), is_ready))
        while self.random.random() < 0.3 and self.step():
            pass

    def step(self) -> bool:
        """Carries out the next operation of a random stream; returns whether there was one."""
        able = [number for number, queue in self._streams.items() if queue and queue[0].is_ready()]
        if not able:
            return False
        stream = self.random.choice(able)
        operation, clock = self._streams[stream].popleft(), self._clocks[stream]
        join(clock, operation.clock)
        clock[stream] = clock.get(stream, 0) + 1
        operation.run(clock)
        return True

    def drain(self, stream: int | None = None) -> None:
        """Carries out all operations, or until a stream has none left; the host then knows of them."""
        while (self._streams[stream] if stream is not None else True) and self.step():
            pass
        for clock in [self._clocks[stream]] if stream is not None else self._clocks.values():
            join(self.host, clock)

    def abandon(self, stream: int) -> None:
        """Drops what a stream has not carried out, as an abort does."""
        self._streams[stream].clear()
        join(self.host, self._clocks[stream])

    def granules(self, pointer: int, nbytes: int) -> tuple[range, bool]:
        """Numbers of the granules of memory, and whether it is another process's."""
        for alias, (real, size) in self.opened.items():
            if alias <= pointer < alias + size:
                pointer, foreign = pointer - alias + real, True
                break
        else:
            foreign = False
        return range(pointer // GRANULE, -(-(pointer + nbytes) // GRANULE)), foreign

    def read(self, pointer: int, nbytes: int, clock: Clock, stream: int, token: int) -> list[int]:
        numbers, optimistic = self.granules(pointer, nbytes)
        values = []
        for number in numbers:
            granule = self._granules.setdefault(number, _Granule())
            if granule.write is not None and clock.get(granule.write[0], 0) < granule.write[1]:
                if not optimistic:
                    raise Race(f"stream {stream} reads granule {number} before a write on {granule.write[0]}")
                self.tainted.add(token)
            granule.reads[stream] = clock[stream], token if optimistic else None
            values.append(granule.value)
        return values

    def write(self, pointer: int, values: Sequence[int], clock: Clock, stream: int) -> None:
        numbers, _ = self.granules(pointer, len(values) * GRANULE)
        for number, value in zip(numbers, values, strict=True):
            granule = self._granules.setdefault(number, _Granule())
            if granule.write is not None and clock.get(granule.write[0], 0) < granule.write[1]:
                raise Race(f"stream {stream} writes granule {number} before a write on {granule.write[0]}")
            for reader, (time, token) in granule.reads.items():
                if clock.get(reader, 0) < time:
                    if token is None:
                        raise Race(f"stream {stream} writes granule {number} before a read on {reader}")
                    self.tainted.add(token)
            granule.value, granule.write, granule.reads = value, (stream, clock[stream]), {}

    def fill(self, stream: int, pointer: int, nbytes: int, value: int) -> None:
        """A kernel that writes memory."""
        count = len(self.granules(pointer, nbytes)[0])
        self.enqueue(stream, lambda clock: self.write(pointer, [value] * count, clock, stream))

    def expect(self, stream: int, pointer: int, nbytes: int, value: int) -> None:
        """A kernel that reads memory, which must have a value."""

        def run(clock: Clock) -> None:
            if set(self.read(pointer, nbytes, clock, stream, 0)) != {value}:
                raise Race(f"stream {stream} read other bytes than were written")

        self.enqueue(stream, run)


class LateEvent(Event):
    def __init__(self, cuda: LateCuda) -> None:
        self._cuda = cuda
        self._recorded: dict[int, Clock] = {}
        self._count = 0

    @property
    def handle(self) -> bytes:
        return b""

    def record(self, stream: int | None = None) -> None:
        self._count += 1
        number = self._count
        self._cuda.world.enqueue(
            self._cuda.stream if stream is None else stream,
            lambda clock: self._recorded.__setitem__(number, dict(clock)),
        )

    def wait(self, stream: int | None = None) -> None:
        number = self._count
        if number:
            self._cuda.world.enqueue(
                self._cuda.stream if stream is None else stream,
                lambda clock: join(clock, self._recorded[number]),
                lambda: number in self._recorded,
            )

    def done(self) -> bool:
        self._cuda.pause()
        world, number = self._cuda.world, self._count
        for _ in range(world.random.randrange(3)):
            world.step()
        if number and number not in self._recorded:
            return False
        join(world.host, self._recorded.get(number, {}))
        return True

    def close(self) -> None:
        pass


class LateCuda(Cuda):
    """The GPU in one process.

    Args:
        world: The GPU.
        pause: Called before each call of this process, where other processes may go on. Default: nothing.
    """

    def __init__(self, world: World, pause: Callable[[], None] = lambda: None) -> None:
        self.uuid = "GPU-late"
        self.world = world
        self.stream = world.stream()
        self.pause = pause

    def malloc(self, nbytes: int) -> int:
        return self.world.malloc(nbytes)

    def free(self, pointer: int) -> None:
        pass

    def share(self, pointer: int) -> bytes:
        return pointer.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        alias = self.world.malloc(1 << 20)
        self.world.opened[alias] = int.from_bytes(handle, "little"), 1 << 20
        return alias

    def close(self, pointer: int) -> None:
        del self.world.opened[pointer]

    def copy_in(self, pointer: int, data: memoryview) -> None:
        raise NotImplementedError

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self.pause()
        world, on = self.world, self.stream if stream is None else stream
        self.token = token = next(world.tokens)

        def run(clock: Clock) -> None:
            world.write(target, world.read(source, nbytes, clock, on, token), clock, on)

        world.enqueue(on, run)

    def copy_out(self, data: memoryview, pointer: int) -> None:
        world, read = self.world, list[int]()
        world.enqueue(
            self.stream, lambda clock: read.extend(world.read(pointer, len(data), clock, self.stream, 0))
        )
        world.drain(self.stream)
        data[:] = np.array(read, "<u8").repeat(GRANULE // 8).tobytes()[: len(data)]

    def event(self) -> Event:
        return LateEvent(self)

    def open_event(self, handle: bytes) -> Event:
        raise NotImplementedError

    def synchronize(self) -> None:
        self.world.drain(self.stream)


class LateTensor:
    """Memory of the GPU as uint8."""

    def __init__(self, pointer: int, nbytes: int, memory: object = None) -> None:
        self.pointer, self.nbytes, self.memory = pointer, nbytes, memory
        self.shape = (nbytes,)
        self.dtype = "torch.uint8"

    def __len__(self) -> int:
        return self.nbytes

    def detach(self) -> LateTensor:
        return self

    def contiguous(self) -> LateTensor:
        return self

    def numel(self) -> int:
        return self.nbytes

    def element_size(self) -> int:
        return 1


class LateTensors(DeviceTensors):
    """Tensors of the GPU; `current` is the current stream."""

    def __init__(self, world: World) -> None:
        self.current = world.stream()

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, LateTensor)

    def stream(self) -> int:
        return self.current

    def pointer(self, tensor: LateTensor) -> int:
        return tensor.pointer

    def tensor(self, memory: DeviceBytes, dtype: str, shape: Sequence[int]) -> LateTensor:
        return LateTensor(memory.pointer, memory.nbytes, memory)

    def join(self, parts: Sequence[LateTensor]) -> LateTensor:
        raise NotImplementedError

    def upload(self, array: np.ndarray, dtype: str) -> LateTensor:
        raise NotImplementedError

    def download(self, tensor: LateTensor) -> np.ndarray:
        raise NotImplementedError
