"""The arena on a GPU under random schedules of puts, uses, reads by other processes, releases and deaths, on a GPU
whose streams run late: nothing is read before it is there, or written before its last use is over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from late_gpu import GRANULE, LateCuda, LateTensor, LateTensors, Race, World

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard, Space
from nccl_transfer.store import device_arena
from nccl_transfer.store.arena import ArenaReader
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.device_arrays import DeviceArray, Pin, PinnedBytes
from nccl_transfer.store.device_shards import DeviceShards
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports.gpu.arena_reads import ArenaClient
from nccl_transfer.transports.gpu.device_read import DeviceRead
from rlhf.errors import OutOfSpace, Refused, RlhfError, ServiceLost

ACTIONS = 40
SCHEDULES = 300
ALL = 10_000


class Liveness:
    """Waits of a reader, in which the rest of the world goes on; the source may die in one of them."""

    def __init__(self, world: World, dies: bool) -> None:
        self._world = world
        self._dies = dies

    def wait(self, done: Callable[[], bool], deadline: float, where: str) -> None:
        while not done():
            self._world.between()
            if self._dies and self._world.random.random() < 0.2:
                raise ServiceLost(where)


class Headers:
    """The headers of the source as another process reads them: between two looks, the source may go on."""

    def __init__(self, world: World, reader: ArenaReader) -> None:
        self._world = world
        self._reader = reader

    def check(self, shards: Any) -> None:
        self._world.between()
        self._reader.check(shards)
        self._world.between()

    def device_place(self, shard: Shard) -> Any:
        return self._reader.device_place(shard)


class OpenedArena:
    def __init__(self, world: World, arena: DeviceArena, liveness: Liveness, cuda: LateCuda) -> None:
        self.pointer = cuda.open(arena.cuda.share(arena.pointer))
        self.nbytes = arena.nbytes
        self.copied = cuda.event()
        self.liveness = liveness
        self.ready = arena.ready.__getitem__


class Schedule:
    """One process with an arena, and readers on the same GPU, until the end of a random schedule."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.random = random.Random(seed)
        self.cuda = LateCuda(self.world)
        self.tensors = LateTensors(self.world)
        self.streams = [self.tensors.current, self.world.stream()]
        self.arena = DeviceArena(self.cuda, 12 * GRANULE)
        self.store = TensorStore(64 << 10, device=(self.arena, self.tensors))  # type: ignore[arg-type]
        self.store.endpoint = Endpoint("here:1")
        self.device: DeviceShards = self.store.device  # type: ignore[assignment]
        self.live: dict[int, tuple[Shard, int]] = {}
        self.held: list[tuple[LateTensor, int]] = []
        self.sends: list[tuple[int, Pin, Any]] = []
        self.value = self.step = 0
        self.depth = 0
        self.world.between = self.between

    def run(self) -> None:
        try:
            for _ in range(ACTIONS):
                self.act()
            self.finish()
        finally:
            self.store._arena.close()

    def act(self) -> None:
        self.tensors.current = self.random.choice(self.streams)
        action = self.random.choice(
            [self.put, self.put, self.put, self.view, self.view, self.drop, self.release, self.send, self.end_send,
             self.receive, self.read_elsewhere, self.read_elsewhere, self.copy_to_host, self.go_on]
        )  # fmt: skip
        action()

    def between(self) -> None:
        """Lets the source go on while a reader is in the middle of something."""
        if self.depth < 2 and self.random.random() < 0.3:
            self.depth += 1
            self.random.choice([self.put, self.put, self.release, self.drop, self.end_send, self.go_on])()
            self.depth -= 1

    def put(self) -> None:
        self.value += 1
        nbytes = self.random.randint(1, 4) * GRANULE
        tensor = LateTensor(self.world.malloc(nbytes), nbytes)
        stream = self.tensors.current
        self.world.fill(stream, tensor.pointer, nbytes, self.value)
        try:
            column = self.device.put_column(tensor, Lease("s", self.step))
        except NotImplementedError:  # full, and would be copied to the host
            return
        shard = column.shards[0]
        assert shard.space is Space.DEVICE
        self.live[shard.id] = shard, self.value

    def pick(self) -> tuple[Shard, int] | None:
        return self.random.choice(list(self.live.values())) if self.live else None

    def view(self) -> None:
        if picked := self.pick():
            shard, value = picked
            self.hold(self.device.pin(shard.id, 0, shard.nbytes), shard.nbytes, value)

    def hold(self, pin: Pin, nbytes: int, value: int) -> None:
        """Reads a tensor of pinned bytes in a kernel, and keeps it for a while."""
        array = DeviceArray("uint8", (nbytes,), [PinnedBytes(pin, 0, nbytes)], self.tensors)
        tensor = array.tensor()
        self.world.expect(self.tensors.current, tensor.pointer, nbytes, value)
        self.held.append((tensor, value))

    def drop(self) -> None:
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))

    def release(self) -> None:
        self.live.clear()
        self.store.release("s", {self.step})
        self.step += 1

    def send(self) -> None:
        """Sends by a stream of its own, as NCCL does; unpins once the host knows that the send is over."""
        if picked := self.pick():
            shard, value = picked
            pin, stream = self.device.pin(shard.id, 0, shard.nbytes), self.world.stream()
            assert pin.event is not None
            pin.event.wait(stream)
            self.world.expect(stream, pin.pointer, shard.nbytes, value)
            sent = self.cuda.event()
            sent.record(stream)
            self.sends.append((stream, pin, sent))

    def end_send(self) -> None:
        if self.sends:
            stream, pin, sent = self.sends.pop(self.random.randrange(len(self.sends)))
            if self.random.random() < 0.3:
                self.world.abandon(stream)  # the reader has died
            while self.world.random.random() < 0.9 and not sent.done():
                pass
            if not sent.done():
                self.world.abandon(stream)
            pin.free()

    def receive(self) -> None:
        """Receives bytes of another rank into the arena, and uses them."""
        self.value += 1
        nbytes = self.random.randint(1, 3) * GRANULE
        try:
            pin = self.device.borrow(nbytes)
        except OutOfSpace:
            return
        self.world.fill(self.cuda.stream, pin.pointer, nbytes, self.value)
        if self.random.random() < 0.3:
            pin.free()  # the read has failed while bytes were still on their way
            return
        self.world.drain(self.cuda.stream)
        self.hold(pin, nbytes, self.value)

    def read_elsewhere(self) -> None:
        """Another process reads a shard by the opened arena."""
        if not (picked := self.pick()):
            return
        shard, value = picked
        cuda = LateCuda(self.world, self.world.between)
        headers = Headers(self.world, self.store.reader)
        client = ArenaClient(cuda, headers, "")  # type: ignore[arg-type]
        arena = OpenedArena(self.world, self.arena, Liveness(self.world, self.random.random() < 0.2), cuda)
        target = self.world.malloc(shard.nbytes)
        read = DeviceRead(
            shard.endpoint,
            [ByteRange(shard, 0, shard.nbytes)],
            SimpleNamespace(pointer=target),  # type: ignore[arg-type]
            [0],
            time.monotonic() + 20,
        )
        cuda.token = 0
        try:
            client._copy(read, arena, headers)  # type: ignore[arg-type]
        except (Refused, ServiceLost):
            return
        if cuda.token in self.world.tainted:
            raise Race("another process took bytes that changed under its copy")
        self.world.expect(cuda.stream, target, shard.nbytes, value)

    def copy_to_host(self) -> None:
        if picked := self.pick():
            shard, value = picked
            try:
                copied = self.device.copy_to_host(shard.id, time.monotonic() + 20)
            except RlhfError:
                return
            got = self.store.read_bytes(copied.id, 0, copied.nbytes)
            if got != value.to_bytes(8, "little") * (shard.nbytes // 8):
                raise Race("the copy in host memory has other bytes")

    def go_on(self) -> None:
        for _ in range(self.random.randrange(8)):
            self.world.step()

    def finish(self) -> None:
        """Ends all uses: nothing stays in use."""
        self.release()
        self.held.clear()
        while self.sends:
            self.end_send()
        self.world.drain()
        self.arena.settle()
        assert self.arena.used_bytes == 0
        assert self.store.stat().used_bytes == 0


def run(seeds: Iterator[int] | range) -> None:
    for seed in seeds:
        try:
            Schedule(seed).run()
        except Race as race:
            raise Race(f"schedule {seed}: {race}") from race


def test_nothing_is_read_early_or_written_over_in_random_schedules() -> None:
    run(range(SCHEDULES))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_nothing_is_read_early_or_written_over_in_ten_thousand_random_schedules() -> None:
    run(range(SCHEDULES, SCHEDULES + ALL))


def no_wait_for_bytes(patch: pytest.MonkeyPatch) -> None:
    """A tensor is handed out without a wait for its bytes."""
    patch.setattr(Pin, "wait", lambda self, stream: self._streams.add(stream))


def no_wait_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Another process does not wait for the bytes."""
    patch.setattr(ArenaClient, "_is_ready", lambda self, arena, headers, shard: True)


def no_wait_for_uses(patch: pytest.MonkeyPatch) -> None:
    """A block is given out again without a wait for its last uses."""
    patch.setattr(DeviceArena, "_unpin", lambda self, block, streams: unpin(self, block, ()))


def early_free(patch: pytest.MonkeyPatch) -> None:
    """A block is given out again though it is pinned."""

    free = DeviceArena.free

    def free_at_once(self: DeviceArena, block: device_arena.Block) -> None:
        block.pins = 0
        free(self, block)

    patch.setattr(DeviceArena, "free", free_at_once)


def no_pin(patch: pytest.MonkeyPatch) -> None:
    """A use of a shard does not pin its block."""

    def pin(self: DeviceArena, block: device_arena.Block) -> None:
        pass

    def unpin_once(self: DeviceArena, block: device_arena.Block, streams: Any) -> None:
        if block.pins:
            unpin(self, block, ())

    patch.setattr(DeviceArena, "pin", pin)
    patch.setattr(DeviceArena, "_unpin", unpin_once)


def no_recheck(patch: pytest.MonkeyPatch) -> None:
    """Another process does not check the header again after its copy."""
    looks: dict[int, int] = {}

    def check(self: Headers, shards: Any) -> None:
        self._world.between()
        looks[id(self)] = looks.get(id(self), 0) + 1
        if looks[id(self)] == 1:
            self._reader.check(shards)

    patch.setattr(Headers, "check", check)


def ready_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """The event of readiness is recorded before the bytes are copied."""
    record = DeviceArena.record_ready
    numbers: dict[int, int] = {}
    allocate = DeviceArena.allocate

    def allocate_and_record(self: DeviceArena, nbytes: int, stream: int | None = None) -> device_arena.Block:
        block = allocate(self, nbytes, stream)
        if stream is not None:
            numbers[id(self)] = record(self, stream)
        return block

    patch.setattr(DeviceArena, "allocate", allocate_and_record)
    patch.setattr(DeviceArena, "record_ready", lambda self, stream: numbers[id(self)])


unpin = DeviceArena._unpin
BUGS = [
    no_wait_for_bytes, no_wait_elsewhere, no_wait_for_uses, early_free, no_pin, no_recheck, ready_before_the_copy
]  # fmt: skip


@pytest.mark.parametrize("plant", BUGS)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Race):
        run(range(SCHEDULES))
