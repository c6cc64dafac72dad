"""Transfer protocols put every row where Table 3 of HybridFlow says, on any mesh."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_transfer.batch import Batch, LocalColumn
from nccl_transfer.protocols import Mesh, get_protocol, names, register_protocol
from rlhf.errors import ConfigError

MESHES = st.builds(Mesh, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
ROWS = st.integers(0, 40)


def coordinates(mesh: Mesh) -> list[tuple[int, int, int]]:
    """(p, t, d) of every rank, counted out: tensor index fastest, then pipeline stage, then data."""
    return [
        (p, t, d) for d, p, t in itertools.product(range(mesh.data), range(mesh.pipeline), range(mesh.tensor))
    ]


def dealt(rows: int, parts: int) -> list[list[int]]:
    """Rows dealt one by one to see how many each part gets, then handed out in order."""
    counts = [0] * parts
    for row in range(rows):
        counts[row % parts] += 1
    ends = list(itertools.accumulate(counts))
    return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def distributed(name: str, rows: int, mesh: Mesh) -> list[list[int]]:
    return [part.tolist() for part in get_protocol(name).distribute(rows, mesh)]


@given(MESHES)
def test_a_mesh_numbers_ranks_by_tensor_then_pipeline_then_data(mesh):
    assert [mesh.position(rank) for rank in range(mesh.size)] == coordinates(mesh)
    assert [mesh.rank(*position) for position in coordinates(mesh)] == list(range(mesh.size))


@given(ROWS, MESHES)
def test_one_to_all_broadcasts_and_collects_from_all(rows, mesh):
    assert distributed("ONE_TO_ALL", rows, mesh) == [list(range(rows))] * mesh.size
    assert get_protocol("ONE_TO_ALL").collect(mesh) == list(range(mesh.size))


@given(ROWS, MESHES)
def test_dp_proto_deals_rows_to_all_ranks_in_order(rows, mesh):
    assert distributed("DP_PROTO", rows, mesh) == dealt(rows, mesh.size)
    assert get_protocol("DP_PROTO").collect(mesh) == list(range(mesh.size))


@given(ROWS, MESHES)
def test_3d_proto_gives_every_rank_the_rows_of_its_data_group(rows, mesh):
    parts = dealt(rows, mesh.data)
    assert distributed("3D_PROTO", rows, mesh) == [parts[d] for _, _, d in coordinates(mesh)]


@given(MESHES)
def test_3d_proto_collects_from_the_last_stage_of_every_data_group(mesh):
    last = [rank for rank, (p, t, _) in enumerate(coordinates(mesh)) if (p, t) == (mesh.pipeline - 1, 0)]
    assert get_protocol("3D_PROTO").collect(mesh) == last


@given(st.integers(0, 5), MESHES)
def test_all_to_all_gives_each_rank_its_own_equal_part(rows_each, mesh):
    got = distributed("ALL_TO_ALL", rows_each * mesh.size, mesh)
    assert got == [list(range(rank * rows_each, (rank + 1) * rows_each)) for rank in range(mesh.size)]
    assert get_protocol("ALL_TO_ALL").collect(mesh) == list(range(mesh.size))


def test_all_to_all_refuses_rows_that_do_not_divide():
    with pytest.raises(ConfigError, match="4 ranks, got 6"):
        get_protocol("ALL_TO_ALL").distribute(6, Mesh(2, 2, 1))


@given(st.sampled_from(["DP_PROTO", "3D_PROTO"]), ROWS, MESHES)
def test_rows_through_workers_that_change_nothing_come_back_once_and_in_order(name, rows, mesh):
    text = [f"row {row}" for row in range(rows)]
    batch = Batch.of(text=text)
    protocol = get_protocol(name)
    assert protocol.splits
    inputs = [batch.take(part) for part in protocol.distribute(rows, mesh)]
    outputs = Batch.concat([inputs[rank] for rank in protocol.collect(mesh)])
    column = outputs["text"]
    assert isinstance(column, LocalColumn)
    assert column.values == text


@given(st.sampled_from(["DP_PROTO", "3D_PROTO"]), ROWS, MESHES)
def test_data_groups_differ_by_at_most_one_row(name, rows, mesh):
    sizes = [len(part) for part in distributed(name, rows, mesh)]
    assert max(sizes) - min(sizes) <= 1


def test_an_unknown_name_lists_the_known_ones():
    assert {"3D_PROTO", "ALL_TO_ALL", "DP_PROTO", "ONE_TO_ALL"} <= set(names())
    with pytest.raises(ConfigError, match=f"'3D_PORTO'; known: {', '.join(names())}$"):
        get_protocol("3D_PORTO")


def test_a_name_can_be_taken_once():
    with pytest.raises(ConfigError, match="'DP_PROTO' exists already"):
        register_protocol(get_protocol("DP_PROTO"))
