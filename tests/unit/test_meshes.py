"""Meshes that a configuration names are refused with a reason and the nearest that fit, or they fit the model."""

import itertools

import pytest

from settings import meshes

LAYERS, HEADS, KEY_VALUE_HEADS = 6, 12, 4


SHAPE = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "intermediate_size": 96,
    "vocab_size": 61,
}


@pytest.mark.parametrize("text", ["", "2", "1-2", "1-2-2-1", "1-0-2", "a-b-c", "1--2", "-1-2-2"])
def test_what_is_no_mesh_is_refused(text: str):
    with pytest.raises(ValueError, match=r"is not p-t-d: .* for example 1-2-2"):
        meshes.parse(text)


def test_sizes_are_pipeline_tensor_data():
    assert meshes.parse("3-2-1") == (3, 2, 1)


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("1-2-2", 8, "has 4 ranks, and ranks is 8; the nearest that fit: 1-2-4, 1-4-2, 2-2-2"),
        (
            "4-1-1",
            4,
            "its 6 layers cannot be dealt out to 4 stages; the nearest that fit: 2-1-2, 2-2-1, 1-1-4",
        ),
        (
            "1-8-1",
            8,
            "its 12 attention heads cannot be dealt out to 8 tensor ranks; the nearest that fit: 1-4-2",
        ),
        ("1-6-1", 6, "its 4 key-value heads cannot be dealt out to 6 tensor ranks; the nearest that fit: "),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_nearest_that_do(text: str, ranks: int, expected: str):
    with pytest.raises(ValueError) as refused:
        meshes.check(text, ranks, SHAPE)
    assert expected in str(refused.value)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 12])
def test_a_mesh_is_accepted_exactly_where_everything_divides(ranks: int):
    for p, t, d in itertools.product(range(1, ranks + 1), repeat=3):
        fits = p * t * d == ranks and LAYERS % p == 0 and HEADS % t == 0 and KEY_VALUE_HEADS % t == 0
        try:
            meshes.check(f"{p}-{t}-{d}", ranks, SHAPE)
        except ValueError as refused:
            assert not fits
            suggested = str(refused).rpartition(": ")[2].split(", ")
            assert suggested
            for other in suggested:
                meshes.check(other, ranks, SHAPE)
        else:
            assert fits


def test_without_a_shape_only_the_number_of_ranks_is_checked():
    meshes.check("1-7-1", 7)
    with pytest.raises(ValueError, match="has 7 ranks, and ranks is 8"):
        meshes.check("1-7-1", 8)


@pytest.mark.parametrize("text", ["", "1-2-2", "1-1-2-2-1", "1-1-0-2", "1-1-2-x"])
def test_what_is_no_generation_mesh_is_refused(text: str):
    with pytest.raises(ValueError, match=r"is not pg-tg-dg-d: .* for example 1-1-2-2"):
        meshes.parse_generation(text)


@pytest.mark.parametrize(
    ("text", "mesh", "expected"),
    [
        (
            "1-4-1-2",
            "1-2-2",
            "its tensor size 4 does not divide 2, that of mesh 1-2-2; the nearest that fit: 1-2-1-2",
        ),
        ("2-1-1-2", "1-2-2", "its 2 pipeline stages do not divide the 1 of mesh 1-2-2"),
        ("1-3-2-1", "1-6-2", "its data size 1 is not 2, that of mesh 1-6-2; the nearest that fit: 1-3-2-2"),
        (
            "1-2-2-2",
            "1-2-2",
            "1 x 2 x 2 is not 2, the ranks of a data rank of mesh 1-2-2; the nearest that fit",
        ),
    ],
)
def test_a_generation_mesh_that_is_no_coarsening_is_refused_with_the_nearest_that_are(
    text: str, mesh: str, expected: str
):
    with pytest.raises(ValueError) as refused:
        meshes.check_generation(text, mesh)
    assert expected in str(refused.value)


@pytest.mark.parametrize("mesh", ["1-2-2", "2-2-2", "4-2-1", "1-6-1"])
def test_a_generation_mesh_is_accepted_exactly_where_training_shards_nest(mesh: str):
    p, t, d = meshes.parse(mesh)
    for pg, tg, dg, data in itertools.product(range(1, 7), repeat=4):
        fits = p % pg == 0 and t % tg == 0 and dg == p * t // (pg * tg) and data == d
        try:
            meshes.check_generation(f"{pg}-{tg}-{dg}-{data}", mesh)
        except ValueError as refused:
            assert not fits
            suggested = str(refused).rpartition(": ")[2].split(", ")
            assert suggested
            for other in suggested:
                meshes.check_generation(other, mesh)
        else:
            assert fits


@pytest.mark.parametrize(
    ("mesh", "generation", "changes", "expected"),
    [
        (
            "2-2-1",
            "",
            {},
            "without pipeline stages, and generation_mesh 2-2-1 has 2; for example generation_mesh 1-2-2-1",
        ),
        ("1-8-1", "", {}, "on 8 tensor ranks does not fit the model, which has num_attention_heads 12"),
        ("1-4-1", "", {"intermediate_size": 98}, "does not fit the model, which has intermediate_size 98"),
        ("1-3-1", "1-3-1-1", {}, "which has num_key_value_heads 4"),
        ("", "1-8-1", {}, "on 8 tensor ranks does not fit the model"),
        ("", "", {"head_dim": 16}, "at least 32 dimensions, and the model's have 16; use rollout_engine hf"),
        ("", "", {"hidden_size": 96}, "and the model's have 8"),
    ],
)
def test_what_vllm_cannot_generate_with_is_refused(
    mesh: str, generation: str, changes: dict[str, int], expected: str
):
    with pytest.raises(ValueError) as refused:
        meshes.check_vllm(mesh, generation, SHAPE | changes)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("mesh", "generation"),
    [
        ("", ""),
        ("", "1-2-2"),
        ("1-2-2", ""),
        ("2-2-2", "1-1-4-2"),
        ("2-2-1", "1-2-2-1"),
        ("1-4-1", "1-4-1-1"),
    ],
)
def test_vllm_generates_on_tensor_groups(mesh: str, generation: str):
    meshes.check_vllm(mesh, generation, SHAPE)


def test_without_a_shape_vllm_may_generate_on_tensor_groups():
    meshes.check_vllm("1-2-1", "")


@pytest.mark.parametrize(
    ("text", "mesh", "sizes"),
    [("", "", (1, 1)), ("2-4-3", "", (2, 4)), ("", "2-4-1", (2, 4)), ("1-2-4-1", "2-4-1", (1, 2))],
)
def test_the_sizes_of_generation_are_those_that_are_given_or_those_of_training(
    text: str, mesh: str, sizes: tuple[int, int]
):
    assert meshes.generation_sizes(text, mesh) == sizes


def test_whole_weights_are_not_shared_by_ranks_without_a_mesh():
    with pytest.raises(ValueError, match="2 ranks share them on generation_mesh 1-2-3; leave it empty"):
        meshes.check_alone("plain", "", "1-2-3")
    meshes.check_alone("plain", "", "")
