"""Plans name every byte that is needed, and one reader a host for it: held against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from drawn import PROTOCOLS, meshes
from hypothesis import given
from hypothesis import strategies as st

from controller.role_groups.requests import cut
from nccl_transfer.refs.batch import Batch, concat_columns
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.plans import Slice, needed, plan_relays, plan_slices, union
from nccl_transfer.refs.protocols import TransferProtocol
from nccl_transfer.refs.ranges import ByteRange, cut_chunks
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
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


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 4)))
def test_chunks_hold_every_byte_once_in_order_and_are_full_but_for_the_last(sizes, chunk_bytes, max_pieces):
    chunks = list(cut_chunks(sizes, chunk_bytes, max_pieces))
    cut = [(item, start + i) for chunk in chunks for item, start, nbytes in chunk for i in range(nbytes)]
    assert cut == [(item, at) for item, size in enumerate(sizes) for at in range(size)]
    for chunk in chunks:
        assert all(piece.nbytes for piece in chunk)
        assert 0 < sum(piece.nbytes for piece in chunk) <= chunk_bytes
        assert max_pieces is None or len(chunk) <= max_pieces
    for chunk in chunks[:-1]:
        assert sum(piece.nbytes for piece in chunk) == chunk_bytes or len(chunk) == max_pieces


@given(byte_ranges())
def test_a_union_has_every_byte_once_in_order(ranges):
    got = bytes_of(union(ranges))
    assert got == sorted(set(bytes_of(ranges)), key=lambda byte: (byte[0].id, byte[1]))


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


@given(st.data())
def test_what_is_needed_are_the_bytes_of_the_rows_each_once(data):
    batch = data.draw(batches(2))
    wanted = [(source, byte) for source, ranges in needed(batch).items() for byte in bytes_of(ranges)]
    assert len(wanted) == len(set(wanted))
    assert set(wanted) == set(
        itertools.chain.from_iterable(row_bytes(batch, row) for row in range(batch.rows))
    )


@given(st.data(), meshes(), st.sampled_from(PROTOCOLS))
def test_every_part_has_one_reader_on_a_host_for_each_rank_elsewhere_that_holds_its_bytes(
    data: st.DataObject, mesh: Mesh, protocol: TransferProtocol
) -> None:
    hosts = data.draw(st.integers(1, 3))
    batch = data.draw(batches(hosts))
    if protocol.name == "ALL_TO_ALL":
        batch = batch.take(np.arange(batch.rows // mesh.size * mesh.size))
    per_host = data.draw(st.integers(1, mesh.size))
    ranks = [Endpoint(f"rank:{rank}", f"host {rank // per_host % hosts}") for rank in range(mesh.size)]
    parts = cut(batch, protocol, mesh)
    dealt = protocol.distribute(batch.rows, mesh)
    assert sorted(rank for part in parts for rank in part.ranks) == list(range(mesh.size))
    for part in parts:
        assert all(np.array_equal(dealt[rank], part.places) for rank in part.ranks)
        sources = {source for row in part.places.tolist() for source, _ in row_bytes(batch, row)}
        expected = {
            (source, host)
            for host in {ranks[rank].host_id for rank in part.ranks}
            if sum(ranks[rank].host_id == host for rank in part.ranks) > 1
            for source in sources
            if source.host_id != host
        }
        relays = plan_relays(part.batch, [ranks[rank] for rank in part.ranks])
        assert sorted((relay.source.address, relay.reader.host_id) for relay in relays) == sorted(
            (source.address, host) for source, host in expected
        )
        assert {relay.reader for relay in relays} <= {ranks[rank] for rank in part.ranks}


def test_the_ranks_of_a_host_share_the_reading():
    sources = [Endpoint(f"source:{number}", "there") for number in range(4)]
    shards = [Shard(source, 1, 0, 8) for source in sources]
    columns = [RemoteColumn.of_shard("float64", (), 1, shard) for shard in shards]
    batch = Batch(4, {"x": concat_columns(columns)})
    ranks = [Endpoint(f"rank:{rank}", "here") for rank in range(2)]
    relays = plan_relays(batch, ranks)
    assert [relay.source for relay in relays] == sources
    assert [relay.reader for relay in relays] == [*ranks, *ranks]


def test_on_one_host_nothing_is_relayed():
    column = RemoteColumn.of_shard("float64", (), 4, Shard(Endpoint("source:0", "host"), 1, 0, 32))
    part = Batch(4, {"x": column})
    assert plan_relays(part, [Endpoint("rank:0", "host"), Endpoint("rank:1", "host")]) == []


def test_ranks_that_name_no_host_read_for_themselves():
    column = RemoteColumn.of_shard("float64", (), 4, Shard(Endpoint("source:0", "host"), 1, 0, 32))
    assert plan_relays(Batch(4, {"x": column}), [Endpoint("rank:0"), Endpoint("rank:1")]) == []


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


def each_in_a_list(pieces):
    return {rank: [piece] for rank, piece in pieces.items()}


@given(st.data(), SHAPES)
def test_a_slice_plan_brings_every_cell_once(data, shape):
    held = {rank: data.draw(slices(shape)) for rank in range(data.draw(st.integers(1, 4)))}
    held[9] = Slice.whole(shape)
    wanted = {rank: data.draw(slices(shape)) for rank in range(3)}
    whole = np.arange(np.prod(shape)).reshape(shape)
    shards = {rank: whole[piece.within(Slice.whole(shape))] for rank, piece in held.items()}
    arrived = {rank: np.full(piece.shape, -1) for rank, piece in wanted.items()}
    moves = plan_slices(each_in_a_list(held), each_in_a_list(wanted))
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
    wanted = {rank: Slice.at((2 * (rank - 2), 0), (2, 4)) for rank in range(2, 6)}
    sources = [move.source for move in plan_slices(each_in_a_list(held), each_in_a_list(wanted))]
    assert sorted(sources) == [0, 0, 1, 1]


def test_a_replica_on_the_same_host_goes_first():
    held = dict.fromkeys(range(2), Slice.whole((8,)))
    hosts = {0: "here", 1: "there", 2: "there"}
    assert [move.source for move in plan_slices(each_in_a_list(held), {2: [Slice.whole((8,))]}, hosts)] == [1]


def test_what_nobody_holds_is_an_error_that_names_the_piece():
    with pytest.raises(TransferError, match=r"no rank holds \[4\] to \[8\], which 1 needs"):
        plan_slices({0: [Slice((0,), (4,))]}, {1: [Slice.whole((8,))]})
