"""Weights from ranks that hold them to ranks that lack them, over real sockets and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from contract.weight_source import WeightSource, assembled, fetcher_by, read_all, receiver_of, whole
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.weight_plans import RankWeights, WeightSlice, WeightTransfer
from rlhf.errors import (
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    OutOfSpace,
    Refused,
    RlhfError,
    TransferError,
)
from services.storage.checkpoint import WeightShard
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


@pytest.mark.parametrize("transport", ["memfd", "tcp", "grpc"])
def test_all_receivers_get_their_slices_and_not_a_byte_more(make_source: MakeSource, transport: str):
    values = tensors()
    sources = [make_source(halves(values, part), transports=[transport]) for part in range(2)]
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
        assert sum(each.bytes for each in fetchers[number].traffic().values()) == num_bytes
        for name, got in assembled(wants[number], pieces).items():
            slice_ = next(each for each in wants[number] if each.name == name)
            expected = values[name][slice_.box.within(Slice.whole(slice_.shape))].to(got.dtype)
            assert torch.equal(got, expected)
        fetchers[number].close()
    assert all(source.store.stat().used_bytes == 0 for source in sources)
    assert all(source.store.stat().peak_bytes <= 2 * (4096 + 4096) for source in sources)


def one_to_one(make_source: MakeSource, **options: object) -> tuple[WeightSource, WeightTransfer]:
    values = tensors()
    source = make_source([(name, WeightShard.of_whole(x)) for name, x in values.items()], **options)
    return source, transfer_to([source], [receiver_of(0, [whole(name, x) for name, x in values.items()])])


def test_a_receiver_that_stops_is_named_at_the_deadline_and_leaves_nothing(make_source: MakeSource):
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


def test_a_receiver_that_never_comes_is_named_too(make_source: MakeSource):
    source, moved = one_to_one(make_source)
    with pytest.raises(DeadlineExceeded, match="rollout rank 0"):
        source.send(moved, within_s=0.2)[0].result(10)
    assert source.store.stat().used_bytes == 0


def test_a_source_that_never_sends_is_named_at_the_deadline(make_source: MakeSource):
    source, moved = one_to_one(make_source)
    with pytest.raises(DeadlineExceeded, match=f"actor rank .* at {source.endpoint.address}"):
        read_all(moved, 0, fetcher_by(["memfd"]), within_s=0.5)


def test_a_cancelled_sender_ends_and_its_receivers_with_it(make_source: MakeSource):
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


def test_an_arena_without_room_is_an_error_on_both_sides(make_source: MakeSource):
    big = torch.zeros(1 << 20)
    source = make_source([("big", WeightShard.of_whole(big))], arena_mib=1)
    moved = transfer_to([source], [receiver_of(0, [whole("big", big)])], bucket_bytes=4 << 20)
    sent, _ = source.send(moved)
    with pytest.raises(OutOfSpace, match="raise arena_mb"):
        read_all(moved, 0, fetcher_by(["memfd"]))
    with pytest.raises(OutOfSpace, match="raise arena_mb"):
        sent.result(5)


def test_an_arena_with_room_for_one_bucket_suffices(make_source: MakeSource):
    big = torch.arange(3 << 18, dtype=torch.float32)
    source = make_source([("big", WeightShard.of_whole(big))], arena_mib=1)
    moved = transfer_to([source], [receiver_of(0, [whole("big", big)])], bucket_bytes=768 << 10)
    sent, _ = source.send(moved)
    pieces, _ = read_all(moved, 0, fetcher_by(["memfd"]))
    sent.result(5)
    assert torch.equal(assembled([whole("big", big)], pieces)["big"], big)


@pytest.mark.parametrize("transport", ["memfd", "tcp", "grpc"])
def test_a_corrupted_bucket_is_named(make_source: MakeSource, transport: str):
    source, moved = one_to_one(make_source, transports=[transport])
    pack, packed = source.store.fill, []

    def fill_and_flip(*arguments: object, **options: object) -> object:
        shard = pack(*arguments, **options)  # type: ignore[arg-type]
        packed.append(shard)
        if len(packed) == 2:
            source.peer.flip(shard.id, 3)
        return shard

    source.store.fill = fill_and_flip  # type: ignore[method-assign]
    sent, call = source.send(moved)
    with pytest.raises(
        TransferError,
        match=rf"^actor rank .* at {source.endpoint.address}: column 'bucket 1 of \d+ of transfer t1', .* do not match",
    ):
        read_all(moved, 0, fetcher_by([transport]))
    call.cancelled = True
    with pytest.raises(CallCancelled):
        sent.result(5)
    assert source.store.stat().used_bytes == 0


def test_what_a_rank_does_not_hold_is_refused_by_name(make_source: MakeSource):
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
