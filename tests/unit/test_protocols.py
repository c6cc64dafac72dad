"""Transfer protocols put every row where Table 3 of HybridFlow says, on any mesh."""

import itertools
import runpy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from drawn import SIZES, Interleaved, Padded, meshes
from hypothesis import given
from hypothesis import strategies as st

from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.protocols import (
    TransferProtocol,
    get_protocol,
    padded_rows,
    protocol_names,
    register_protocol,
)
from nccl_transfer.refs.wire_ranks import mesh_from_proto, mesh_to_proto
from rlhf.errors import ConfigError, InvalidRequest

DOCS = Path(__file__).parents[2] / "docs"
ROWS = st.integers(0, 40)
CONCATENATING = ["DP_PROTO", "3D_PROTO", "3D_ALL_MICRO_DP", "3D_PP_AS_DP"]
MESHES = meshes()


@dataclass(frozen=True)
class Place:
    """Where a rank stands, counted out."""

    p: int
    t: int
    d: int
    g_p: int
    g_t: int
    replica: int


def places(mesh: Mesh) -> list[Place]:
    """Every rank in order: data index slowest, then the generation replicas of a data index, then the generation
    stages and the generation tensor ranks within a replica."""
    over_p = mesh.pipeline // mesh.generation_pipeline
    over_t = mesh.tensor // mesh.generation_tensor
    found: list[Place] = []
    replica = 0
    for d in range(mesh.data):
        for i_p in range(over_p):
            for i_t in range(over_t):
                for g_p in range(mesh.generation_pipeline):
                    for g_t in range(mesh.generation_tensor):
                        found.append(Place(g_p * over_p + i_p, g_t * over_t + i_t, d, g_p, g_t, replica))
                replica += 1
    return found


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
def test_a_mesh_puts_ranks_where_they_count_out(mesh):
    assert [mesh.position(rank) for rank in range(mesh.size)] == [(x.p, x.t, x.d) for x in places(mesh)]
    assert [mesh.rank(x.p, x.t, x.d) for x in places(mesh)] == list(range(mesh.size))
    got = [mesh.generation_position(rank) for rank in range(mesh.size)]
    assert got == [(x.g_p, x.g_t, x.replica) for x in places(mesh)]


@given(SIZES, SIZES, SIZES)
def test_without_a_generation_mesh_the_order_is_tensor_then_pipeline_then_data(p, t, d):
    counted = [(x, y, z) for z, x, y in itertools.product(range(d), range(p), range(t))]
    assert [Mesh(p, t, d).position(rank) for rank in range(p * t * d)] == counted


@given(MESHES)
def test_the_training_shards_of_a_micro_data_group_make_the_generation_shard_of_each_of_its_ranks(mesh):
    all_places = places(mesh)
    stages, columns = mesh.pipeline // mesh.generation_pipeline, mesh.tensor // mesh.generation_tensor
    for rank, place in enumerate(all_places):
        group = mesh.micro_data_group(rank)
        assert rank in group
        held = sorted((all_places[r].p, all_places[r].t) for r in group)
        first_p, first_t = place.g_p * stages, place.g_t * columns
        assert held == [(first_p + i, first_t + j) for i in range(stages) for j in range(columns)]
        assert {all_places[r].d for r in group} == {place.d}


@pytest.mark.parametrize(("sizes", "message"), [
    ((2, 4, 1, 2, 3), "generation tensor size must divide the training one, 4 .given: 3; allowed: 1, 2, 4."),
    ((3, 1, 1, 2, 1), "generation pipeline size must divide the training one, 3"),
    ((0, 1, 1), "pipeline size must be at least 1 .given: 0."),
    ((1, 1, 4, 1, 2), "generation tensor size must divide the training one, 1 .given: 2; allowed: 1."),
])  # fmt: skip
def test_an_impossible_mesh_is_refused_with_what_is_allowed(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Mesh(*sizes)


def test_data_ranks_may_form_generation_replicas() -> None:
    mesh = Mesh(1, 1, 8, 2, 2, usual_order=True)
    assert mesh_from_proto(mesh_to_proto(mesh)) == mesh
    assert [mesh.position(rank) for rank in range(8)] == [(0, 0, rank) for rank in range(8)]
    assert [mesh.rank(0, 0, data) for data in range(8)] == list(range(8))
    ends = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [mesh.generation_position(rank) for rank in range(8)] == [(*e, n) for n in range(2) for e in ends]
    assert distributed("3D_ALL_MICRO_DP", 5, mesh) == [[0, 1, 2]] * 4 + [[3, 4]] * 4
    assert get_protocol("3D_ALL_MICRO_DP").collect(mesh) == [0, 4]
    assert distributed("3D_PROTO", 9, mesh) == [[0, 1], *([n] for n in range(2, 9))]
    assert str(mesh) == "1-1-8 / 2-2-2, usual order"


def test_ranks_with_the_same_rows_may_generate_with_those_of_other_data_ranks() -> None:
    mesh = Mesh(1, 3, 2, 1, 2, usual_order=True)
    assert mesh_from_proto(mesh_to_proto(mesh)) == mesh
    assert [mesh.position(rank) for rank in range(6)] == [(0, t, d) for d in range(2) for t in range(3)]
    assert distributed("3D_ALL_MICRO_DP", 4, mesh) == [[0, 1]] * 2 + [[2]] * 2 + [[3]] * 2
    assert distributed("3D_PROTO", 4, mesh) == [[0, 1]] * 3 + [[2, 3]] * 3
    assert str(mesh) == "1-3-2 / 1-2-3, usual order"


def test_generation_replicas_of_data_ranks_divide_them() -> None:
    with pytest.raises(ConfigError, match="generation tensor size must divide the training one, 1"):
        Mesh(1, 1, 4, 1, 3, usual_order=True)


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
    assert distributed("3D_PROTO", rows, mesh) == [parts[place.d] for place in places(mesh)]


@given(MESHES)
def test_3d_proto_collects_from_the_last_stage_of_every_data_group(mesh):
    last = [rank for rank, place in enumerate(places(mesh)) if (place.p, place.t) == (mesh.pipeline - 1, 0)]
    assert get_protocol("3D_PROTO").collect(mesh) == sorted(last, key=lambda rank: places(mesh)[rank].d)


@given(ROWS, MESHES)
def test_3d_all_micro_dp_gives_every_rank_the_rows_of_its_generation_replica(rows, mesh):
    parts = dealt(rows, len({place.replica for place in places(mesh)}))
    assert distributed("3D_ALL_MICRO_DP", rows, mesh) == [parts[place.replica] for place in places(mesh)]


@given(MESHES)
def test_3d_all_micro_dp_collects_from_the_first_rank_of_every_replica(mesh):
    first = [rank for rank, place in enumerate(places(mesh)) if (place.g_p, place.g_t) == (0, 0)]
    assert get_protocol("3D_ALL_MICRO_DP").collect(mesh) == first


@given(ROWS, MESHES)
def test_3d_pp_only_broadcasts_and_collects_once_per_stage(rows, mesh):
    assert distributed("3D_PP_ONLY", rows, mesh) == [list(range(rows))] * mesh.size
    got = [places(mesh)[rank] for rank in get_protocol("3D_PP_ONLY").collect(mesh)]
    assert [(place.p, place.t, place.d) for place in got] == [(stage, 0, 0) for stage in range(mesh.pipeline)]


@given(ROWS, MESHES)
def test_3d_pp_as_dp_deals_rows_to_the_stages_of_every_data_rank(rows, mesh):
    parts = dealt(rows, mesh.data * mesh.pipeline)
    assert distributed("3D_PP_AS_DP", rows, mesh) == [
        parts[place.d * mesh.pipeline + place.p] for place in places(mesh)
    ]


@given(ROWS, MESHES)
def test_dp_metric_deals_rows_as_dp_proto_and_collects_a_list(rows, mesh):
    assert distributed("DP_METRIC", rows, mesh) == dealt(rows, mesh.size)
    assert get_protocol("DP_METRIC").collect(mesh) == list(range(mesh.size))
    assert not get_protocol("DP_METRIC").splits


@given(st.integers(0, 5), MESHES)
def test_all_to_all_gives_each_rank_its_own_equal_part(rows_each, mesh):
    got = distributed("ALL_TO_ALL", rows_each * mesh.size, mesh)
    assert got == [list(range(rank * rows_each, (rank + 1) * rows_each)) for rank in range(mesh.size)]
    assert get_protocol("ALL_TO_ALL").collect(mesh) == list(range(mesh.size))


def test_all_to_all_refuses_rows_that_do_not_divide():
    with pytest.raises(ConfigError, match="4 ranks, got 6"):
        get_protocol("ALL_TO_ALL").distribute(6, Mesh(2, 2, 1))


@given(st.sampled_from(CONCATENATING), ROWS, MESHES)
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


@given(st.sampled_from(CONCATENATING), ROWS, MESHES)
def test_data_groups_differ_by_at_most_one_row(name, rows, mesh):
    sizes = [len(part) for part in distributed(name, rows, mesh)]
    assert max(sizes) - min(sizes) <= 1


def test_an_unknown_name_lists_the_known_ones():
    known = "3D_ALL_MICRO_DP, 3D_PP_AS_DP, 3D_PP_ONLY, 3D_PROTO, ALL_TO_ALL, DP_METRIC, DP_PROTO, ONE_TO_ALL"
    with pytest.raises(
        ConfigError, match=f"'3D_PORTO' is unknown; did you mean '3D_PROTO'.; known: {known}, or module:"
    ):
        get_protocol("3D_PORTO")


def test_a_name_can_be_taken_once():
    with pytest.raises(ConfigError, match="'DP_PROTO' exists already"):
        register_protocol(get_protocol("DP_PROTO"))


@given(ROWS, st.integers(1, 9))
def test_padding_repeats_rows_from_the_first_and_keeping_the_first_rows_undoes_it(rows, parts):
    padded = padded_rows(rows, parts)
    assert len(padded) % parts == 0
    assert len(padded) - rows < parts
    assert padded[:rows].tolist() == list(range(rows))
    assert all(row in range(rows) for row in padded.tolist())


def test_the_table_in_the_documentation_is_what_the_protocols_do():
    mesh = Mesh(2, 2, 2, 1, 2)
    page = (DOCS / "transfer.md").read_text()
    for name in protocol_names():
        protocol = get_protocol(name)
        cells = [
            "".join("abcdefgh"[row] for row in rows.tolist()) + "*" * (rank in protocol.collect(mesh))
            for rank, rows in enumerate(protocol.distribute(8, mesh))
        ]
        result = "rows" if protocol.splits else "one per rank"
        assert f"| `{name}` | {' | '.join(cells)} | {result} |" in page


def test_the_drawings_in_the_documentation_are_of_what_the_protocols_and_plans_do():
    drawings = runpy.run_path(str(DOCS / "draw_protocols.py"))
    assert set(drawings["PROTOCOLS"]) == set(protocol_names())
    page = (DOCS / "transfer.md").read_text()
    assert page == drawings["redraw"](page), "run docs/draw_protocols.py"


def answered(protocol: TransferProtocol, rows: int, mesh: Mesh) -> tuple[Batch, list[str]]:
    """Concatenated outputs of ranks that make one row of every row, and the expected texts."""
    made = Batch.of(text=[f"row {row}" for row in range(rows)])
    parts = protocol.distribute(rows, mesh)
    outputs = Batch.concat([made.take(parts[rank]) for rank in protocol.collect(mesh)])
    return outputs, texts(made)


def texts(batch: Batch) -> list[str]:
    column = batch["text"]
    assert isinstance(column, LocalColumn)
    return column.texts


@given(ROWS, MESHES)
def test_a_protocol_that_pads_gives_equal_parts_and_drops_what_came_back_twice(rows, mesh):
    assert len({len(part) for part in Padded().distribute(rows, mesh)}) == 1
    outputs, expected = answered(Padded(), rows, mesh)
    assert texts(Padded().restore(outputs, rows, mesh)) == expected


@given(ROWS, MESHES)
def test_rows_that_were_dealt_in_another_order_come_back_in_their_own(rows, mesh):
    outputs, expected = answered(Interleaved(), rows, mesh)
    assert texts(Interleaved().restore(outputs, rows, mesh)) == expected


@pytest.mark.parametrize(("protocol", "dealt"), [(Padded(), 8), (Interleaved(), 6)])
@pytest.mark.parametrize("each", [0, 2])
def test_where_rows_are_dealt_otherwise_than_they_stand_one_comes_back_for_each(protocol, dealt, each):
    outputs, _ = answered(protocol, 6, Mesh(data=4))
    said = f"{protocol.name} sent {dealt} rows for 6 input rows, and {each * dealt} rows were returned"
    with pytest.raises(InvalidRequest, match=said):
        protocol.restore(Batch.concat([outputs, outputs]).take(np.arange(each * dealt)), 6, Mesh(data=4))


def install(site: Path, name: str, value: str) -> None:
    """An installed package that brings a protocol, as pip leaves one behind."""
    info = site / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlhf_cluster.protocols]\n{name} = {value}\n")


def test_an_installed_package_brings_a_protocol(tmp_path, monkeypatch):
    install(tmp_path, "REVERSED", "their_protocols:reversed_rows")
    (tmp_path / "their_protocols.py").write_text(
        "from nccl_transfer.refs.protocols import DataParallel\n"
        "class Reversed(DataParallel):\n"
        "    name = 'REVERSED'\n"
        "    def part(self, rank, mesh):\n"
        "        return mesh.size - 1 - rank\n"
        "    def collect(self, mesh):\n"
        "        return list(reversed(range(mesh.size)))\n"
        "reversed_rows = Reversed()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "REVERSED" in protocol_names()
    for name in ("REVERSED", "their_protocols:reversed_rows"):
        assert distributed(name, 5, Mesh(data=2)) == [[3, 4], [0, 1, 2]]


def test_a_package_that_cannot_be_imported_is_shown_with_its_cause(tmp_path, monkeypatch):
    install(tmp_path, "BROKEN", "broken_protocols:Broken")
    (tmp_path / "broken_protocols.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"transfer protocol 'broken_protocols:Broken' .* 'a_module_that_is_not_there'"
    ):
        get_protocol("BROKEN")
