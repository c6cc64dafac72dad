"""How tensors lie on ranks, and how they come from and go to Hugging Face directories."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.models.directory import VALUE_HEAD_FILE
from services.models.weights import WeightsReader, WeightsWriter
from services.storage.checkpoint import WeightShard
from services.storage.layout import Layout

LAYOUTS = [
    Layout((8, 3), 0, parts=4),
    Layout((3, 8), 0, parts=4, transposed=True),
    Layout((61, 3), 0, parts=4, padding=3),
    Layout((5, 3), 0, parts=4, padding=59),
    Layout((8,), 0, parts=2),
    Layout((5, 3), 0),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_end_to_end_are_the_tensor(layout: Layout):
    kept = [torch.randn(layout.kept_shape) for _ in range(max(layout.parts, 1))]
    whole = layout.whole(torch.cat(kept))
    assert whole.shape == layout.shape
    covered = torch.zeros(layout.shape)
    for part, x in enumerate(kept):
        shard = layout.shard(x, part)
        assert shard.whole == layout.shape
        assert shard.tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.tensor.shape, strict=True))
        assert torch.equal(whole[box], shard.tensor)
        covered[box] += 1
    assert torch.equal(covered, torch.ones(layout.shape))


def test_a_tensor_that_cannot_be_cut_evenly_is_refused():
    with pytest.raises(ValueError, match="a tensor of 10 rows cannot be cut into 4 parts"):
        Layout((10, 3), 0, parts=4)


TENSORS = {
    "lm_head.weight": torch.randn(6, 4),
    "model.embed_tokens.weight": torch.randn(6, 4),
    "model.norm.weight": torch.randn(4),
}
SIZES = {name: x.numel() * 4 for name, x in TENSORS.items()}


def written(directory: Path, max_file_bytes: int) -> set[str]:
    writer = WeightsWriter(directory, SIZES, max_file_bytes)
    for name, x in TENSORS.items():
        writer.add(name, x)
    writer.finish()
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("max_file_bytes", [1, 112, 200, 1 << 30])
def test_what_is_written_in_any_number_of_files_is_read_back_box_by_box(tmp_path: Path, max_file_bytes: int):
    written(tmp_path, max_file_bytes)
    with WeightsReader(tmp_path) as reader:
        for name, x in TENSORS.items():
            for begin, end in itertools.combinations(range(len(x) + 1), 2):
                part = torch.full_like(x[begin:end], torch.nan)
                reader.fill(name, WeightShard(part, (begin,) + (0,) * (x.ndim - 1), tuple(x.shape)))
                assert torch.equal(part, x[begin:end])


def test_files_are_as_large_as_allowed_and_indexed(tmp_path: Path):
    assert written(tmp_path, 112) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(SIZES.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_one_file_needs_no_index(tmp_path: Path):
    assert written(tmp_path, 1 << 30) == {"model.safetensors"}


def test_a_backbone_is_found_under_the_names_of_a_causal_model_and_a_missing_value_head_is_zero(
    tmp_path: Path,
):
    save_file(TENSORS, tmp_path / "model.safetensors")
    norm, head = torch.empty(4), torch.full((1, 4), torch.nan)
    with WeightsReader(tmp_path) as reader:
        reader.fill("backbone.norm.weight", WeightShard(norm, (0,), (4,)))
        reader.fill("value_head.weight", WeightShard(head, (0, 0), (1, 4)))
    assert torch.equal(norm, TENSORS["model.norm.weight"])
    assert torch.equal(head, torch.zeros(1, 4))


def test_a_value_head_has_a_file_of_its_own(tmp_path: Path):
    writer = WeightsWriter(tmp_path, {"backbone.norm.weight": 16, "value_head.weight": 16})
    writer.add("backbone.norm.weight", torch.ones(4))
    writer.add("value_head.weight", torch.ones(1, 4))
    writer.finish()
    assert load_file(tmp_path / "model.safetensors").keys() == {"norm.weight"}
    assert load_file(tmp_path / VALUE_HEAD_FILE).keys() == {"weight"}


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("model.norm.bias", (4,), r"lacks weights of its model, one is model\.norm\.bias"),
        ("model.norm.weight", (5,), r"holds model\.norm\.weight as \[4\], expected \[5\]"),
    ],
)
def test_what_is_not_there_as_expected_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], error: str
):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with WeightsReader(tmp_path) as reader, pytest.raises(ValueError, match=error):
        reader.fill(name, WeightShard(torch.empty(shape), (0,), shape))


def test_a_directory_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no safetensors files that can be read"), WeightsReader(tmp_path):
        pass
