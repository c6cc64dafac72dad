"""Batch algebra equals the same operations on lists of rows, and survives the wire."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.wire import from_proto, row_numbers, to_proto
from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2 as pb

RANKS = [
    Endpoint(
        f"host:{7000 + rank}", "host", 2, "actor", rank, {"memfd": b"socket %d" % rank, "tcp": b"\0\xff"}
    )
    for rank in range(3)
]
KINDS = ("local", "local jagged", "text", "remote", "remote jagged", "remote matrix")

Row = tuple | str
"""A row as the oracle keeps it: a tuple of its numbers, or its text."""


@dataclass
class World:
    """Makes columns together with their rows; holds the bytes that remote columns point to."""

    memory: dict[int, bytes] = field(default_factory=dict)
    numbers: itertools.count = field(default_factory=itertools.count)

    def column(self, kind: str, rows: int, draw) -> tuple[LocalColumn | RemoteColumn, list[Row]]:
        lengths = np.array(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)), np.int64)
        if kind == "text":
            text = [f"text {next(self.numbers)} ä" for _ in range(rows)]
            return LocalColumn(text), [*text]
        jagged = "jagged" in kind
        entries = int(lengths.sum()) if jagged else rows
        shape = (entries, 3) if "matrix" in kind else (entries,)
        values = self.fresh(shape)
        cuts = lengths if jagged else np.ones(rows, np.int64)
        expected: list[Row] = [
            tuple(values[stop - count : stop].ravel().tolist())
            for stop, count in zip(np.cumsum(cuts).tolist(), cuts.tolist(), strict=True)
        ]
        if kind.startswith("local"):
            return LocalColumn(Jagged(values, lengths) if jagged else values), expected
        shard = Shard(draw(st.sampled_from(RANKS)), len(self.memory) + 1, 64, values.nbytes)
        self.memory[shard.id] = values.tobytes()
        return RemoteColumn.of_shard("int32", shape[1:], lengths if jagged else rows, shard), expected

    def fresh(self, shape: tuple[int, ...]) -> np.ndarray:
        """int32 numbers no other row has."""
        count = int(np.prod(shape))
        return np.array([next(self.numbers) for _ in range(count)], np.int32).reshape(shape)

    def rows_of(self, column: LocalColumn | RemoteColumn) -> list[Row]:
        """Rows of a column, read through its runs as a transport would."""
        if isinstance(column, RemoteColumn):
            data = b"".join(self.memory[r.shard.id][r.start : r.start + r.nbytes] for r in column.runs)
            sizes = (column.elements * column.element_bytes).tolist()
            ends = list(itertools.accumulate(sizes))
            assert len(data) == sum(sizes) == column.nbytes
            rows = (data[end - size : end] for end, size in zip(ends, sizes, strict=True))
            return [tuple(np.frombuffer(row, np.int32).tolist()) for row in rows]
        if isinstance(column.values, list):
            return list(column.values)
        if isinstance(column.values, Jagged):
            return [tuple(column.values.row(i).ravel().tolist()) for i in range(column.rows)]
        return [tuple(row.ravel().tolist()) for row in column.values]


@st.composite
def batches(draw, least: int = 0, columns: tuple[str, ...] = KINDS):
    """(world, batch, {column: rows})"""
    world, count = World(), draw(st.integers(least, 8))
    made = {kind: world.column(kind, count, draw) for kind in columns}
    batch = Batch(count, {name: column for name, (column, _) in made.items()})
    return world, batch, {name: expected for name, (_, expected) in made.items()}


def remote(batch: Batch, name: str) -> RemoteColumn:
    column = batch[name]
    assert isinstance(column, RemoteColumn)
    return column


def split(batch: Batch, parts: int) -> list[Batch]:
    return [batch.take(rows) for rows in np.array_split(np.arange(batch.rows), parts)]


def assert_same(world: World, batch: Batch, expected: dict[str, list[Row]]) -> None:
    assert {name: world.rows_of(column) for name, column in batch.columns.items()} == expected


@given(batches(), st.data())
@settings(deadline=None)
def test_any_chain_of_operations_equals_the_same_on_lists(made, data):
    world, batch, expected = made
    for operation in data.draw(st.lists(st.sampled_from(["take", "repeat", "split"]), max_size=4)):
        if operation == "take" and batch.rows:
            rows = data.draw(st.lists(st.integers(0, batch.rows - 1), max_size=12))
            batch = batch.take(np.array(rows, np.int64))
            expected = {name: [column[row] for row in rows] for name, column in expected.items()}
        elif operation == "repeat":
            batch = batch.repeat(2)
            expected = {name: [row for row in column for _ in range(2)] for name, column in expected.items()}
        elif operation == "split":
            parts = split(batch, data.draw(st.integers(1, 4)))
            turned = parts[::-1]
            batch = Batch.concat(turned)
            begins = [sum(part.rows for part in parts[:i]) for i in range(len(parts))]
            expected = {
                name: [
                    row
                    for begin, part in zip(begins[::-1], turned, strict=True)
                    for row in column[begin : begin + part.rows]
                ]
                for name, column in expected.items()
            }
        assert_same(world, batch, expected)


@given(batches(), st.data())
@settings(deadline=None)
def test_any_slice_of_a_column_equals_that_of_a_list(made, data):
    world, batch, expected = made
    bound = st.none() | st.integers(-10, 10)
    rows = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1])))
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            assert world.rows_of(column.take(rows)) == expected[name][rows]


@given(batches(), st.integers(1, 5))
@settings(deadline=None)
def test_splitting_and_putting_together_is_the_batch(made, parts):
    world, batch, expected = made
    assert_same(world, Batch.concat(split(batch, parts)), expected)


@given(batches(least=1), st.data())
@settings(deadline=None)
def test_rows_that_lie_side_by_side_are_one_run(made, data):
    _, batch, _ = made
    cuts = sorted(data.draw(st.lists(st.integers(0, batch.rows), max_size=3)))
    edges = [0, *cuts, batch.rows]
    parts = [batch.take(np.arange(a, b)) for a, b in itertools.pairwise(edges)]
    whole = Batch.concat(parts)
    for name in ("remote", "remote jagged", "remote matrix"):
        assert len(list(remote(whole, name).runs)) == 1


@pytest.mark.parametrize("kind", ["remote", "remote jagged"])
@given(data=st.data())
@settings(deadline=None)
def test_rows_of_two_ranks_stay_apart_where_one_goes_on_where_the_other_stops(kind, data):
    world = World()
    (a, a_rows), (b, b_rows) = (world.column(kind, 6, data.draw) for _ in range(2))
    cut = data.draw(st.integers(0, 6))
    parts = [Batch(6, {"x": a}).take(np.arange(cut)), Batch(6, {"x": b}).take(np.arange(cut, 6))]
    assert_same(world, Batch.concat(parts), {"x": a_rows[:cut] + b_rows[cut:]})


@given(batches(columns=("local", "text")), batches(columns=("remote", "local jagged")))
@settings(deadline=None)
def test_joining_takes_the_columns_of_both(left, right):
    (world, a, left_rows), (other, b, right_rows) = left, right
    if a.rows != b.rows:
        with pytest.raises(InvalidRequest, match=f"{b.rows} and {a.rows} rows|{a.rows} and {b.rows} rows"):
            _ = a | b
        return
    joined = a | b
    assert_same(world, joined.select(a.columns), left_rows)
    assert_same(other, joined.select(b.columns), right_rows)


def test_joining_prefers_the_right_column():
    joined = Batch.of(x=np.zeros(2)) | Batch.of(x=np.ones(2))
    assert World().rows_of(joined["x"]) == [(1,), (1,)]


def test_putting_together_keeps_the_columns_all_parts_have():
    a, b = Batch.of(x=np.zeros(1), y=["a"]), Batch.of(y=["b"], z=np.zeros(1))
    assert list(Batch.concat([a, b]).columns) == ["y"]


def test_putting_columns_of_different_types_together_is_refused():
    with pytest.raises(InvalidRequest, match="float32"):
        Batch.concat([Batch.of(x=np.zeros(1, np.float32)), Batch.of(x=np.zeros(1, np.float64))])


def test_a_column_of_another_length_is_refused():
    with pytest.raises(InvalidRequest, match="'y' has 3 rows in a batch of 2"):
        Batch.of(x=np.zeros(2), y=["a", "b", "c"])


def test_a_missing_column_lists_those_there_are():
    with pytest.raises(InvalidRequest, match=r"no column 'z'; it has \['x', 'y'\]"):
        Batch.of(y=["a"], x=np.zeros(1))["z"]


@given(batches(), st.data())
@settings(deadline=None)
def test_the_wire_keeps_rows_types_and_places(made, data):
    world, batch, expected = made
    if batch.rows:
        rows = data.draw(st.lists(st.integers(0, batch.rows - 1), min_size=1, max_size=12))
        batch = batch.take(np.array(rows, np.int64))
        expected = {name: [column[row] for row in rows] for name, column in expected.items()}
    message = pb.Batch.FromString(to_proto(batch).SerializeToString())
    back = from_proto(message)
    assert_same(world, back, expected)
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            returned = remote(back, name)
            assert (returned.dtype, returned.row_shape) == (column.dtype, column.row_shape)
            assert list(returned.runs) == list(column.runs)
    assert {shard.id for shard in message.shards} == {
        run.shard.id for c in batch.columns.values() if isinstance(c, RemoteColumn) for run in c.runs
    }


@given(st.lists(st.integers(0, 30), max_size=12))
def test_row_numbers_survive_the_wire(numbers):
    batch = Batch(len(numbers), {"x": LocalColumn(np.zeros(len(numbers)))})
    message = to_proto(batch, np.array(numbers, np.int64))
    assert row_numbers(message).tolist() == numbers


def test_a_jagged_column_finds_a_row_without_adding_up_all_lengths() -> None:
    column = Jagged(np.arange(6), np.array([2, 0, 4]))
    assert [column.row(row).tolist() for row in range(3)] == [[0, 1], [], [2, 3, 4, 5]]
    assert column.offsets is column.offsets
    assert not column.offsets.flags.writeable


def local(batch: Batch, name: str) -> Jagged[np.ndarray]:
    column = batch[name]
    assert isinstance(column, LocalColumn)
    assert isinstance(column.values, Jagged)
    return column.values


def test_lengths_that_columns_share_are_said_once():
    lengths, others = np.array([3, 0, 2], np.int64), np.array([3, 2, 0], np.int64)
    batch = Batch.of(
        x=Jagged(np.arange(5.0), lengths),
        text=["a", "b", "c"],
        y=Jagged(np.arange(5), lengths.copy()),
        z=Jagged(np.arange(5), others),
    )
    message = to_proto(batch)
    assert [list(column.lengths) for column in message.columns] == [[3, 0, 2], [], [], [3, 2, 0]]
    assert [column.lengths_of for column in message.columns] == [0, 0, 1, 0]
    back = from_proto(message)
    said = [local(back, name).lengths.tolist() for name in "xyz"]
    assert said == [[3, 0, 2], [3, 0, 2], [3, 2, 0]]


def test_row_numbers_that_are_not_given_count_from_zero():
    assert row_numbers(to_proto(Batch.of(x=np.zeros(3)))).tolist() == [0, 1, 2]


def broken_messages():
    good = to_proto(
        Batch(2, {"x": RemoteColumn.of_shard("int32", (), np.array([1, 2]), Shard(RANKS[0], 1, 64, 12))})
    )

    def change(edit):
        message = pb.Batch()
        message.CopyFrom(good)
        edit(message)
        return message

    inline = to_proto(Batch.of(x=np.zeros(2)))
    inline.columns[0].inline = inline.columns[0].inline[:-1]
    return {
        "endpoint 7 of 1": change(lambda m: setattr(m.shards[0], "endpoint", 7)),
        "shard 5 of 1": change(lambda m: setattr(m.columns[0].runs.runs[0], "shard", 5)),
        "row 3 of 2": change(lambda m: setattr(m.columns[0].runs.runs[0], "rows", 3)),
        "cover 1 of 2 rows": change(lambda m: setattr(m.columns[0].runs.runs[0], "rows", 1)),
        "1 lengths for 2 rows": change(lambda m: m.columns[0].lengths.pop()),
        "lengths_of is 7, which": change(lambda m: setattr(m.columns[0], "lengths_of", 7)),
        "no content": change(lambda m: m.columns[0].ClearField("runs")),
        "15 bytes, expected 16": inline,
    }


@pytest.mark.parametrize("text", broken_messages())
def test_a_message_that_contradicts_itself_is_refused(text):
    with pytest.raises(InvalidRequest, match=text):
        from_proto(broken_messages()[text])
