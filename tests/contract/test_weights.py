"""Weights from ranks that hold them to ranks that lack them, over real sockets and memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from contract.weight_source import WeightSource, assembled, fetcher_by, read_all, receiver_of, whole
from nccl_transfer.bucket_offer import BUCKETS_AHEAD, Offer
from nccl_transfer.process_memory import PART_BYTES, ProcessMemory
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.weight_plans import Bucket, RankWeights, WeightSlice, WeightTransfer
from rlhf.errors import (
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    OutOfSpace,
    Refused,
    RlhfError,
    TransferError,
)
from rlhf.v1 import common_pb2
from rlhf.v1 import transfer_pb2 as pb
from services.runtime.worker import CallContext
from services.storage.checkpoint import WeightShard
from services.weights.copying import Incoming
from services.weights.packing import WeightPacker
from services.weights.receive import _wait as wait_and_check
from services.weights.receive import receive

MakeSource = Callable[..., WeightSource]


@pytest.fixture
def make_source() -> Iterator[MakeSource]:
    with contextlib.ExitStack() as made:

        def make(shards: Sequence[tuple[str, WeightShard]], **options: object) -> WeightSource:
            source = WeightSource(shards, **options)  # type: ignore[arg-type]
            made.callback(source.close)
            return source

        yield make


@pytest.fixture(params=["in place", "memfd", "tcp", "grpc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A way of the weights: read where they lie, or packed and read by a transport. The host of "memfd" refuses to read
    the memory of processes."""
    if request.param == "memfd":
        refuse(monkeypatch)
    return request.param


verified_or_not = pytest.mark.parametrize("checksums", [False, True], ids=["", "verified"])
on_one_host = pytest.mark.parametrize("way", ["in place", "memfd"], indirect=True)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessMemory, "why_not", lambda memory: "not permitted")


def transport_of(way: str) -> str:
    return "memfd" if way == "in place" else way


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"embed": (70, 32), "norm": (32,), "down": (32, 48), "scale": ()}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return drawn | {"steps": torch.arange(12)}


def halves(values: dict[str, Tensor], part: int) -> list[tuple[str, WeightShard]]:
    """Half of the rows of each tensor; the transpose of one is kept; scalars are on both."""
    shards = []
    for name, x in values.items():
        if x.ndim == 0:
            shards.append((name, WeightShard.of_whole(x)))
            continue
        first = part * (len(x) // 2)
        rows = x[first : first + len(x) // 2]
        rows = rows.t().contiguous().t() if name == "down" else rows
        shards.append((name, WeightShard(rows, (first, *(0,) * (x.ndim - 1)), tuple(x.shape))))
    return shards


def transfer_to(
    sources: Sequence[WeightSource], receivers: Sequence[RankWeights], bucket_bytes: int = 4096
) -> WeightTransfer:
    return WeightTransfer("t1", 5, bucket_bytes, tuple(each.weights for each in sources), tuple(receivers))


@verified_or_not
def test_all_receivers_get_their_slices_and_not_a_byte_more(
    make_source: MakeSource, way: str, checksums: bool
):
    values, transport = tensors(), transport_of(way)
    sources = [
        make_source(halves(values, part), transports=[transport], checksums=checksums) for part in range(2)
    ]
    columns = WeightSlice("down", (32, 48), Slice((0, 7), (32, 31)), "bfloat16")
    wants = [
        [whole(name, x) for name, x in values.items()],
        [whole("embed", values["embed"], "float16"), columns, whole("scale", values["scale"])],
        [],
    ]
    moved = transfer_to(sources, [receiver_of(number, each) for number, each in enumerate(wants)])
    sent = [source.send(moved, number)[0] for number, source in enumerate(sources)]
    with ThreadPoolExecutor(3) as threads:
        fetchers = [fetcher_by([transport]) for _ in wants]
        read = list(threads.map(lambda number: read_all(moved, number, fetchers[number]), range(3)))
    for each in sent:
        each.result(20)
    for number, (pieces, num_bytes) in enumerate(read):
        assert num_bytes == sum(each.nbytes for each in wants[number])
        read_bytes = sum(each.bytes for each in fetchers[number].traffic().values())
        assert read_bytes == num_bytes or (way == "in place" and number == 1)  # which casts what it has read
        assert ("in_place" in fetchers[number].traffic()) == (way == "in place" and number < 2)
        for name, got in assembled(wants[number], pieces).items():
            slice_ = next(each for each in wants[number] if each.name == name)
            expected = values[name][slice_.box.within(Slice.whole(slice_.shape))].to(got.dtype)
            assert torch.equal(got, expected)
        fetchers[number].close()
    assert all(source.store.stat().used_bytes == 0 for source in sources)
    assert all(source.store.stat().peak_bytes <= BUCKETS_AHEAD * (4096 + 4096) for source in sources)


def one_to_one(make_source: MakeSource, **options: object) -> tuple[WeightSource, WeightTransfer]:
    values = tensors()
    source = make_source([(name, WeightShard.of_whole(x)) for name, x in values.items()], **options)
    return source, transfer_to([source], [receiver_of(0, [whole(name, x) for name, x in values.items()])])


@on_one_host
def test_a_receiver_that_stops_is_named_at_the_deadline_and_leaves_nothing(make_source: MakeSource, way: str):
    source, moved = one_to_one(make_source)
    sent, _ = source.send(moved, within_s=0.5)
    reading = receive(moved, 0, fetcher_by(["memfd"]), time.monotonic() + 20)
    next(reading)
    with pytest.raises(
        DeadlineExceeded,
        match=r"^transfer t1: bucket 0 of \d+ was not read by the deadline by rollout rank 0 at .*:9000$",
    ):
        sent.result(10)
    assert source.store.stat().used_bytes == 0
    with pytest.raises(RlhfError, match=r"was not read by the deadline by rollout rank 0|was released"):
        list(reading)


@on_one_host
def test_a_receiver_that_never_comes_is_named_too(make_source: MakeSource, way: str):
    source, moved = one_to_one(make_source)
    with pytest.raises(DeadlineExceeded, match="rollout rank 0"):
        source.send(moved, within_s=0.2)[0].result(10)
    assert source.store.stat().used_bytes == 0


def test_a_source_that_never_sends_is_named_at_the_deadline(make_source: MakeSource):
    source, moved = one_to_one(make_source)
    with pytest.raises(DeadlineExceeded, match=f"actor rank .* at {source.endpoint.address}"):
        read_all(moved, 0, fetcher_by(["memfd"]), within_s=0.5)


def test_a_source_that_is_late_is_named_though_the_service_finds_the_deadline_first(make_source: MakeSource):
    source, moved = one_to_one(make_source)
    call = CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 1.0)
    late = threading.Timer(0.3, lambda: setattr(call, "is_late", True))  # as the event loop does
    late.start()
    with pytest.raises(DeadlineExceeded, match=f"actor rank .* at {source.endpoint.address}"):
        list(receive(moved, 0, fetcher_by(["memfd"]), call.deadline, call.check_cancelled))
    late.join()


@on_one_host
def test_a_cancelled_sender_ends_and_its_receivers_with_it(make_source: MakeSource, way: str):
    source, moved = one_to_one(make_source)
    sent, call = source.send(moved)
    reading = receive(moved, 0, fetcher_by(["memfd"]), time.monotonic() + 20)
    next(reading)
    call.cancelled = True
    with pytest.raises(CallCancelled):
        sent.result(5)
    with pytest.raises((CallCancelled, Refused)):
        list(reading)
    assert source.store.stat().used_bytes == 0


def test_an_arena_without_room_is_an_error_on_both_sides(
    make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
):
    refuse(monkeypatch)
    big = torch.zeros(1 << 20)
    source = make_source([("big", WeightShard.of_whole(big))], arena_mib=1)
    moved = transfer_to([source], [receiver_of(0, [whole("big", big)])], bucket_bytes=4 << 20)
    sent, _ = source.send(moved)
    with pytest.raises(OutOfSpace, match="raise arena_mb"):
        read_all(moved, 0, fetcher_by(["memfd"]))
    with pytest.raises(OutOfSpace, match="raise arena_mb"):
        sent.result(5)


def test_an_arena_with_room_for_one_bucket_suffices(make_source: MakeSource, monkeypatch: pytest.MonkeyPatch):
    refuse(monkeypatch)
    big = torch.arange(3 << 18, dtype=torch.float32)
    source = make_source([("big", WeightShard.of_whole(big))], arena_mib=1)
    moved = transfer_to([source], [receiver_of(0, [whole("big", big)])], bucket_bytes=768 << 10)
    sent, _ = source.send(moved)
    pieces, _ = read_all(moved, 0, fetcher_by(["memfd"]))
    sent.result(5)
    assert torch.equal(assembled([whole("big", big)], pieces)["big"], big)


@pytest.mark.parametrize("way", ["memfd", "tcp", "grpc"], indirect=True)
def test_a_corrupted_bucket_is_named(make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, way: str):
    source, moved = one_to_one(make_source, transports=[way])
    pack = WeightPacker.pack

    def pack_and_flip(packer: WeightPacker, bucket: Bucket, memory: memoryview) -> list[int]:
        checksums = pack(packer, bucket, memory)
        memory[3] ^= bucket.number == 1
        return checksums

    monkeypatch.setattr(WeightPacker, "pack", pack_and_flip)
    sent, call = source.send(moved)
    with pytest.raises(
        TransferError,
        match=rf"^actor rank .* at {source.endpoint.address}: column 'bucket 1 of \d+ of transfer t1', .* do not match",
    ):
        read_all(moved, 0, fetcher_by([way]))
    call.cancelled = True
    with pytest.raises(CallCancelled):
        sent.result(5)
    assert source.store.stat().used_bytes == 0


def change_after_offer(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Changes a value of a bucket in place, once its checksums have been computed."""
    place = WeightPacker.place

    def place_and_change(packer: WeightPacker, bucket: Bucket, checksums: bool) -> pb.BucketInPlace | None:
        placed = place(packer, bucket, checksums)
        if bucket.number == number:
            packer.find(bucket.pieces[0].slice).reshape(-1)[1] += 1
        return placed

    monkeypatch.setattr(WeightPacker, "place", place_and_change)


def test_weights_that_change_while_they_are_read_in_place_are_named(
    make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
):
    source, moved = one_to_one(make_source, checksums=True)
    change_after_offer(monkeypatch, 1)
    sent, call = source.send(moved)
    with pytest.raises(
        TransferError,
        match=rf"^actor rank .* at {source.endpoint.address}: bucket 1 of \d+ of transfer t1: the bytes of \w+ from 0 "
        "on do not match their checksum$",
    ):
        read_all(moved, 0, fetcher_by(["memfd"]))
    call.cancelled = True
    with pytest.raises(CallCancelled):
        sent.result(5)


def read_on(pieces: Iterator[tuple[WeightSlice, Incoming]]) -> None:
    for piece, values in pieces:
        values.copy_to(torch.empty(piece.box.shape))


@verified_or_not
def test_weights_that_change_after_the_call_of_their_source_end_with_its_error(
    make_source: MakeSource, checksums: bool
):
    source, moved = one_to_one(make_source, checksums=checksums)
    sent, call = source.send(moved)
    reading = receive(moved, 0, fetcher_by(["memfd"]), time.monotonic() + 20)
    piece, values = next(reading)
    call.cancelled = True
    with pytest.raises(CallCancelled):
        sent.result(5)
    for _, shard in source.shards:
        shard.tensor.add_(1)
    values.copy_to(torch.empty(piece.box.shape))
    # At once where there are checksums, else when the source is told what was read.
    with pytest.raises(CallCancelled):
        values.wait() if checksums else read_on(reading)


def test_memory_of_another_process_with_the_same_id_is_not_taken_for_that_of_the_source(
    make_source: MakeSource, caplog: pytest.LogCaptureFixture
):
    source, moved = one_to_one(make_source)
    memory = source.peer.board._own.memory
    source.peer.board._own.memory = replace(memory, nonce=bytes(len(memory.nonce)))
    fetcher = fetcher_by(["memfd"])
    with caplog.at_level(logging.INFO):
        sent, _ = source.send(moved)
        pieces, num_bytes = read_all(moved, 0, fetcher)
        sent.result(5)
    assert fetcher.traffic().keys() == {"memfd"}
    assert fetcher.traffic()["memfd"].bytes == num_bytes
    assert f"packs its weights: process {memory.pid} of this host is not the source" in caplog.text
    wanted = moved.receivers[0].slices
    assert all(torch.equal(x, tensors()[name]) for name, x in assembled(wanted, pieces).items())


def test_a_receiver_that_cannot_read_in_place_gets_the_same_buckets_packed(make_source: MakeSource):
    values = tensors()
    shards = [(name, WeightShard.of_whole(x)) for name, x in values.items()]
    source = make_source(shards, transports=["memfd", "grpc"])
    wanted = [whole(name, x) for name, x in values.items()]
    moved = transfer_to([source], [receiver_of(number, wanted) for number in range(2)])
    sent, _ = source.send(moved)
    fetchers = [fetcher_by([name]) for name in ("memfd", "grpc")]
    with ThreadPoolExecutor(2) as threads:
        read = list(threads.map(lambda number: read_all(moved, number, fetchers[number]), range(2)))
    sent.result(5)
    for pieces, _ in read:
        assert all(torch.equal(x, values[name]) for name, x in assembled(wanted, pieces).items())
    assert fetchers[1].traffic().keys() == {"grpc"}
    assert source.store.stat().used_bytes == 0


@pytest.mark.parametrize("way", ["memfd", "tcp"], indirect=True)
def test_a_receiver_that_says_late_that_it_cannot_read_in_place_gets_all(make_source: MakeSource, way: str):
    """Its first bucket has to be packed when those after it, packed from the start, may fill the arena."""
    values = {"a": torch.arange(1 << 18).float(), "b": torch.randn(1024, 1024)}
    wanted = [
        whole("a", values["a"]),
        WeightSlice("b", tuple(values["b"].shape), Slice((0, 0), (1024, 700)), "float32"),
    ]
    shards = [(name, WeightShard.of_whole(x)) for name, x in values.items()]
    source = make_source(shards, transports=["memfd", way], arena_mib=3)
    moved = transfer_to([source], [receiver_of(0, wanted)], bucket_bytes=1 << 20)
    sent, _ = source.send(moved)
    time.sleep(0.2)
    pieces, _ = read_all(moved, 0, fetcher_by([way]))
    sent.result(5)
    found = assembled(wanted, pieces)
    assert torch.equal(found["a"], values["a"])
    assert torch.equal(found["b"], values["b"][:, :700])


def test_a_receiver_of_weights_in_place_is_asked_between_buckets_whether_to_go_on(make_source: MakeSource):
    big = torch.arange(1 << 18, dtype=torch.float32)
    source = make_source([("big", WeightShard.of_whole(big))])
    moved = transfer_to([source], [receiver_of(0, [whole("big", big)])], bucket_bytes=1 << 12)
    sent, call = source.send(moved)

    received: list[Tensor] = []

    def stop() -> None:
        if received:
            raise CallCancelled("stopped")

    def read() -> None:
        for wanted, values in receive(moved, 0, fetcher_by(["memfd"]), time.monotonic() + 20, check=stop):
            received.append(torch.empty(wanted.box.shape))
            values.copy_to(received[-1])
            time.sleep(0.005)

    with pytest.raises(CallCancelled, match="stopped"):
        read()
    assert sum(x.nbytes for x in received) < big.nbytes / 2
    assert not sent.done()
    call.cancelled = True


def test_a_transfer_that_has_ended_keeps_no_weights(make_source: MakeSource, way: str):
    values = np.ones(1 << 16, np.float32)
    weights = torch.from_numpy(values)
    source = make_source([("big", WeightShard.of_whole(weights))], transports=["memfd", "tcp", "grpc"])
    moved = transfer_to([source], [receiver_of(0, [whole("big", weights)])])
    sent, _ = source.send(moved)
    read_all(moved, 0, fetcher_by([transport_of(way)]))
    sent.result(5)
    source.shards.clear()
    kept = weakref.ref(values)
    del values, weights, sent
    source.rest()
    gc.collect()
    assert kept() is None


def test_receivers_get_the_error_of_a_source_that_fails_before_its_offer(make_source: MakeSource):
    source, moved = one_to_one(make_source)
    with pytest.raises(OutOfSpace), source.peer.board.reporting_failures(moved.id):
        raise OutOfSpace("no memory for merged weights")
    begun_s = time.monotonic()
    with pytest.raises(OutOfSpace, match="no memory for merged weights"):
        read_all(moved, 0, fetcher_by(["memfd"]))
    assert time.monotonic() - begun_s < 10


def test_a_bucket_that_comes_as_its_wait_ends_is_no_error():
    class Late(Future[int]):
        """Has its result when a wait with a limit has just ended without it."""

        def result(self, timeout: float | None = None) -> int:
            if timeout is not None and not self.done():
                self.set_result(1)
                raise TimeoutError
            return super().result(timeout)

    late = Late()
    assert wait_and_check(late, lambda: None if late.done() else late.set_result(1)) == 1


def test_a_source_learns_what_was_read_in_place_before_a_bucket_that_it_cannot_offer_until_then(
    make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
):
    may_be_in_place, near_waits = Offer.may_be_in_place, threading.Event()

    def place_as_many_as_the_arena_holds(offer: Offer, number: int) -> bool:
        if number == BUCKETS_AHEAD:
            near_waits.set()
            while may_be_in_place(offer, number):
                time.sleep(0.01)
        return may_be_in_place(offer, number)

    monkeypatch.setattr(Offer, "may_be_in_place", place_as_many_as_the_arena_holds)
    long = torch.arange(20_000.0)
    source = make_source([("long", WeightShard.of_whole(long))], transports=["memfd", "grpc"])
    moved = transfer_to([source], [receiver_of(number, [whole("long", long)]) for number in range(2)])
    sent, _ = source.send(moved, within_s=10)
    with ThreadPoolExecutor(2) as threads:
        near = threads.submit(read_all, moved, 0, fetcher_by(["memfd"]))
        assert near_waits.wait(5)
        far = threads.submit(read_all, moved, 1, fetcher_by(["grpc"]))
        for pieces, _ in (near.result(), far.result()):
            assert torch.equal(assembled([whole("long", long)], pieces)["long"], long)
    sent.result(5)


@on_one_host
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@verified_or_not
def test_large_slices_of_rows_and_columns_arrive_whole(
    make_source: MakeSource, way: str, dtype: str, checksums: bool
):
    big = torch.randn((1600, 4200), generator=torch.Generator().manual_seed(1))
    source = make_source([("big", WeightShard.of_whole(big))], checksums=checksums)
    columns = WeightSlice("big", (1600, 4200), Slice((0, 100), (1600, 3000)), dtype)
    moved = transfer_to([source], [receiver_of(0, [columns])], bucket_bytes=6 << 20)
    assert columns.box.numel * 4 > 8 * PART_BYTES
    wanted = getattr(torch, dtype)
    plain, strided = torch.zeros((1600, 2900), dtype=wanted), torch.zeros((2900, 1600), dtype=wanted).t()
    for number, target in enumerate((plain, strided, plain.double())):
        again = replace(moved, id=f"t{number}")
        sent, _ = source.send(again)
        fetcher = fetcher_by(["memfd"])
        for piece, values in receive(again, 0, fetcher, time.monotonic() + 20):
            values.copy_to(target[piece.box.within(columns.box)])
        sent.result(5)
        assert torch.equal(target, big[:, 100:3000].to(wanted).to(target.dtype))
        assert fetcher.traffic().keys() == {"in_place" if way == "in place" else "memfd"}


@on_one_host
def test_what_a_rank_does_not_hold_is_refused_by_name(make_source: MakeSource, way: str):
    source, moved = one_to_one(make_source)
    source.shards = source.shards[1:]
    sent, _ = source.send(moved)
    with pytest.raises(InvalidRequest, match="weight embed"):
        read_all(moved, 0, fetcher_by(["memfd"]))
    with pytest.raises(InvalidRequest, match=r"weight embed: this rank does not hold \[0, 0\]"):
        sent.result(5)


def test_a_source_of_another_epoch_is_refused(make_source: MakeSource):
    source, moved = one_to_one(make_source)
    later = RankWeights(replace(source.endpoint, epoch=4), moved.sources[0].slices)
    with pytest.raises(Refused, match="the epoch is 3"):
        read_all(replace(moved, sources=(later,)), 0, fetcher_by(["memfd"]))


def test_the_id_of_a_transfer_is_used_once(make_source: MakeSource):
    source, moved = one_to_one(make_source)
    sent, _ = source.send(moved)
    read_all(moved, 0, fetcher_by(["memfd"]))
    sent.result(5)
    with pytest.raises(InvalidRequest, match="transfer t1: its id was used before"):
        source.send(moved)[0].result(5)
