"""Plans move every byte that is needed, once per host, and nothing else: held against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from drawn import PROTOCOLS, meshes
from hypothesis import given
from hypothesis import strategies as st

from nccl_transfer.arena import ByteRange
from nccl_transfer.batch import Batch, Endpoint, RemoteColumn, Shard, concat_columns
from nccl_transfer.mesh import Mesh
from nccl_transfer.plans import RowPlan, Slice, difference, intersection, plan_rows, plan_slices, union
from nccl_transfer.protocols import TransferProtocol, get_protocol
from rlhf.errors import TransferError

SHARD_BYTES = 40
SHARDS = [Shard(Endpoint("source:1"), number, 0, SHARD_BYTES) for number in range(3)]

Byte = tuple[Shard, int]
"""One byte, by the shard it is in and its place there."""


def bytes_of(ranges: Sequence[ByteRange]) -> list[Byte]:
    return [(r.shard, r.start + i) for r in ranges for i in range(r.nbytes)]


@st.composite
def byte_ranges(draw: st.DrawFn) -> list[ByteRange]:
    ranges = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, SHARD_BYTES - 1))
        ranges.append(
            ByteRange(draw(st.sampled_from(SHARDS)), start, draw(st.integers(1, SHARD_BYTES - start)))
        )
    return ranges


@given(byte_ranges())
def test_a_union_has_every_byte_once_in_order(ranges):
    got = bytes_of(union(ranges))
    assert got == sorted(set(bytes_of(ranges)), key=lambda byte: (byte[0].id, byte[1]))


@given(byte_ranges(), byte_ranges())
def test_intersection_and_difference_are_those_of_sets(left, right):
    a, b = set(bytes_of(left)), set(bytes_of(right))
    assert set(bytes_of(intersection(union(left), union(right)))) == a & b
    rest = bytes_of(difference(union(left), union(right)))
    assert set(rest) == a - b
    assert len(rest) == len(a - b)


@st.composite
def batches(draw: st.DrawFn, hosts: int) -> Batch:
    """Rows in shards of up to three ranks: a fixed column and a jagged one, shuffled and repeated."""
    pieces = []
    for source in range(draw(st.integers(1, 3))):
        endpoint = Endpoint(f"source:{source}", f"host {draw(st.integers(0, hosts - 1))}")
        lengths = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)), np.int64)
        fixed = Shard(endpoint, 1, 0, 8 * len(lengths))
        jagged = Shard(endpoint, 2, 0, 4 * int(lengths.sum()))
        pieces.append(
            (
                RemoteColumn.of_shard("float64", (), len(lengths), fixed),
                RemoteColumn.of_shard("int32", (), lengths, jagged),
            )
        )
    fixed, jagged = (concat_columns(list(columns)) for columns in zip(*pieces, strict=True))
    batch = Batch(fixed.rows, {"fixed": fixed, "jagged": jagged})
    order = draw(st.lists(st.integers(0, batch.rows - 1), max_size=24))
    return batch.take(np.array(order, np.int64))


def row_bytes(batch: Batch, row: int) -> set[tuple[Endpoint, Byte]]:
    """The bytes of one row, from the definition of a remote column."""
    found = set()
    for column in batch.columns.values():
        assert isinstance(column, RemoteColumn)
        shards, shard_of, element = column.scattered
        shard = shards[int(shard_of[row])]
        size = {"float64": 8, "int32": 4}[column.dtype]
        entries = 1 if column.lengths is None else int(column.lengths[row])
        first = int(element[row]) * size
        found |= {(shard.endpoint, (shard, first + i)) for i in range(entries * size)}
    return found


def got(plan: RowPlan) -> set[tuple[Endpoint, Byte]]:
    direct = {(source, byte) for source, ranges in plan.direct.items() for byte in bytes_of(ranges)}
    relayed = {(relay.source, byte) for relay in plan.relayed for byte in bytes_of(relay.ranges)}
    assert not direct & relayed
    return direct | relayed


@given(st.data(), meshes(), st.sampled_from(PROTOCOLS))
def test_every_protocol_moves_every_byte_where_it_must_and_once_per_host(
    data: st.DataObject, mesh: Mesh, protocol: TransferProtocol
) -> None:
    hosts = data.draw(st.integers(1, 3))
    batch = data.draw(batches(hosts))
    if protocol.name == "ALL_TO_ALL":
        batch = batch.take(np.arange(batch.rows // mesh.size * mesh.size))
    per_host = data.draw(st.integers(1, mesh.size))
    destinations = [Endpoint(f"rank:{rank}", f"host {rank // per_host % hosts}") for rank in range(mesh.size)]
    rows = protocol.distribute(batch.rows, mesh)
    plans = plan_rows([batch.take(part) for part in rows], destinations)

    wants = [
        set(itertools.chain.from_iterable(row_bytes(batch, row) for row in part.tolist())) for part in rows
    ]
    assert [got(plan) for plan in plans] == wants
    for host in range(hosts):
        here = [rank for rank, endpoint in enumerate(destinations) if endpoint.host_id == f"host {host}"]
        crossing = set().union(*(wants[rank] for rank in here)) if here else set()
        lower_bound = sum(source.host_id != f"host {host}" for source, _ in crossing)
        planned = sum(
            r.nbytes
            for rank in here
            for source, ranges in plans[rank].direct.items()
            if source.host_id != f"host {host}"
            for r in ranges
        )
        assert planned == lower_bound


@given(st.data(), meshes())
def test_a_rank_takes_from_ranks_of_its_host_only_what_they_keep_and_read_themselves(data, mesh):
    batch = data.draw(batches(3))
    destinations = [Endpoint(f"rank:{rank}", f"host {rank % 2}") for rank in range(mesh.size)]
    parts = [batch.take(rows) for rows in get_protocol("3D_PROTO").distribute(batch.rows, mesh)]
    plans = plan_rows(parts, destinations)
    for rank, plan in enumerate(plans):
        for relay in plan.relayed:
            reader = destinations.index(relay.reader)
            assert reader < rank
            assert relay.reader.host_id == destinations[rank].host_id
            assert set(bytes_of(relay.ranges)) <= set(bytes_of(plans[reader].direct[relay.source]))
            kept = next(keep for keep in plans[reader].kept if keep.source == relay.source)
            assert set(bytes_of(relay.ranges)) <= set(bytes_of(kept.ranges))


def test_on_one_host_nothing_is_relayed():
    source = Endpoint("source:0", "host")
    column = RemoteColumn.of_shard("float64", (), 4, Shard(source, 1, 0, 32))
    parts = [Batch(4, {"x": column})] * 2
    plans = plan_rows(parts, [Endpoint("rank:0", "host"), Endpoint("rank:1", "host")])
    assert [plan.direct_bytes for plan in plans] == [32, 32]
    assert [plan.relayed or plan.kept for plan in plans] == [(), ()]


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@st.composite
def slices(draw: st.DrawFn, shape: Sequence[int]) -> Slice:
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    stops = [draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
    return Slice(tuple(starts), tuple(stops))


def cells(piece: Slice) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(piece.starts, piece.stops, strict=True))))


@given(st.data(), SHAPES)
def test_slices_intersect_and_subtract_like_sets_of_cells(data, shape):
    left, right = data.draw(slices(shape)), data.draw(slices(shape))
    common = left.intersect(right)
    assert (cells(common) if common else set()) == cells(left) & cells(right)
    rest = [cell for piece in left.without(right) for cell in cells(piece)]
    assert len(rest) == len(set(rest))
    assert set(rest) == cells(left) - cells(right)


@given(st.data(), SHAPES)
def test_a_slice_plan_brings_every_cell_once(data, shape):
    held = {rank: data.draw(slices(shape)) for rank in range(data.draw(st.integers(1, 4)))}
    held[9] = Slice.whole(shape)
    wanted = {rank: data.draw(slices(shape)) for rank in range(3)}
    whole = np.arange(np.prod(shape)).reshape(shape)
    shards = {rank: whole[piece.within(Slice.whole(shape))] for rank, piece in held.items()}
    arrived = {rank: np.full(piece.shape, -1) for rank, piece in wanted.items()}
    moves = plan_slices(held, wanted)
    for move in moves:
        target = arrived[move.destination][move.piece.within(wanted[move.destination])]
        assert np.all(target == -1)
        target[...] = shards[move.source][move.piece.within(held[move.source])]
    for rank, piece in wanted.items():
        np.testing.assert_array_equal(arrived[rank], whole[piece.within(Slice.whole(shape))])
    moved = sum(move.piece.numel for move in moves if move.source != move.destination)
    own = [cells(piece) & cells(held[rank]) if rank in held else set() for rank, piece in wanted.items()]
    assert moved == sum(piece.numel - len(mine) for piece, mine in zip(wanted.values(), own, strict=True))


def test_replicas_share_the_sending():
    held = dict.fromkeys(range(2), Slice.whole((8, 4)))
    wanted = {rank: Slice.shard((8, 4), 0, rank - 2, 4) for rank in range(2, 6)}
    sources = [move.source for move in plan_slices(held, wanted)]
    assert sorted(sources) == [0, 0, 1, 1]


def test_a_replica_on_the_same_host_goes_first():
    held = dict.fromkeys(range(2), Slice.whole((8,)))
    hosts = {0: "here", 1: "there", 2: "there"}
    assert [move.source for move in plan_slices(held, {2: Slice.whole((8,))}, hosts)] == [1]


def test_what_nobody_holds_is_an_error_that_names_the_piece():
    with pytest.raises(TransferError, match=r"no rank holds \(4,\) to \(8,\), which rank 1 needs"):
        plan_slices({0: Slice((0,), (4,))}, {1: Slice.whole((8,))})
