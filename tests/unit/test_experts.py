"""Tensors of all experts of a layer, read from and written as the matrices of each expert that files have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from allocations import allocations
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.models.experts import EXPERTS, StackedExperts
from services.models.weights import WeightsReader, write_weights
from services.storage.checkpoint import WeightShard

NAMES = ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj", "layers.0.mlp.gate.weight")
FIRST = {
    "mixtral": "layers.0.block_sparse_moe.experts.0.w1.weight",
    "qwen3_moe": "layers.0.mlp.experts.0.gate_proj.weight",
}


class Slice:
    """A matrix with the interface of a safetensors slice."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def get_shape(self) -> list[int]:
        return list(self._matrix.shape)

    def __getitem__(self, box: tuple[slice, slice]) -> Tensor:
        return self._matrix[box]


@given(st.data())
def test_any_box_of_stacked_experts_is_that_of_the_whole_tensor(data: st.DataObject) -> None:
    whole = torch.arange(4 * 6 * 3).reshape(4, 6, 3)
    stacked = StackedExperts([[Slice(part) for part in matrix.split(3)] for matrix in whole])
    assert stacked.get_shape() == [4, 6, 3]
    box = []
    for size in whole.shape:
        begin = data.draw(st.integers(0, size))
        box.append(slice(begin, data.draw(st.integers(begin, size))))
    expected = whole[tuple(box)]
    found = torch.full(expected.shape, -1.0)
    stacked.fill(found, (box[0], box[1], box[2]))
    assert torch.equal(found.to(whole.dtype), expected)


def test_experts_are_read_one_matrix_at_a_time(tmp_path: Path) -> None:
    """Beside the shard there is at most one matrix of one expert."""
    whole = torch.randn(8, 2 * 64, 96)
    stored = EXPERTS["qwen3_moe"].stored(NAMES[0], whole)
    save_file({name: x.clone() for name, x in stored.items()}, tmp_path / "model.safetensors")
    shard = WeightShard(torch.empty(4, 2 * 64, 96), (2, 0, 0), tuple(whole.shape))
    with WeightsReader(tmp_path) as reader, allocations() as found:
        reader.fill(NAMES[0], shard)
    assert torch.equal(shard.tensor, whole[2:6])
    assert found.peak <= whole[0, :64].nbytes
    assert found.kept == 0


@pytest.mark.parametrize("kind", FIRST)
def test_what_is_written_expert_by_expert_is_read_back(kind: str, tmp_path: Path) -> None:
    tensors = dict(zip(NAMES, (torch.randn(4, 6, 3), torch.randn(4, 3, 3), torch.randn(4, 3)), strict=True))
    sizes = {name: x.nbytes for name, x in tensors.items()}
    write_weights(tmp_path, sizes, tensors.items(), EXPERTS[kind])
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == 3 * 4 + 1
    assert torch.equal(stored[FIRST[kind]], tensors[NAMES[0]][0, :3])
    with WeightsReader(tmp_path) as reader:
        for name, x in tensors.items():
            assert reader.holds(name, tuple(x.shape))
            assert not reader.holds(name, (5, *x.shape[1:]))
            found = WeightShard.of_whole(torch.zeros_like(x))
            reader.fill(name, found)
            assert torch.equal(found.tensor, x)


def test_a_file_that_lacks_a_matrix_of_an_expert_lacks_the_tensor(tmp_path: Path) -> None:
    whole = torch.randn(4, 6, 3)
    stored = EXPERTS["qwen3_moe"].stored(NAMES[0], whole)
    del stored["layers.0.mlp.experts.3.up_proj.weight"]
    save_file({name: x.clone() for name, x in stored.items()}, tmp_path / "model.safetensors")
    with WeightsReader(tmp_path) as reader:
        assert not reader.holds(NAMES[0], (4, 6, 3))
        with pytest.raises(ValueError, match=r"gate_up_proj as \[3, 6, 3\], expected \[4, 6, 3\]"):
            reader.fill(NAMES[0], WeightShard.of_whole(torch.zeros_like(whole)))
