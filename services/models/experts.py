"""Weights of mixtures of experts: files have a matrix for each expert, as other programs expect, and transformers
computes with one tensor for all experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_IN_MODEL = ".mlp."
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class ExpertNames:
    """Names in files of a layer's feed-forward part, `mlp` in the model, and of the matrices of an expert. In the
    model, `mlp.experts.gate_up_proj` [experts, 2 units, hidden] has the rows of `gate` and then those of `up` of each
    expert, and `mlp.experts.down_proj` [experts, hidden, units] those of `down`."""

    block: str
    gate: str
    up: str
    down: str

    def stored_name(self, name: str) -> str:
        """Returns the name in a file of a tensor that is no tensor of all experts, given its name in the model."""
        return name.replace(_IN_MODEL, f".{self.block}.")

    def stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the tensors by which a file has a tensor of the model, by name; views of it."""
        layer, names = self._layer(name)
        if not names:
            return {self.stored_name(name): tensor}
        rows = tensor.shape[1] // len(names)
        return {
            f"{layer}.{expert}.{each}.weight": part
            for expert, matrix in enumerate(tensor)
            for each, part in zip(names, matrix.split(rows), strict=True)
        }

    def stacked(self, name: str, files: Mapping[str, Any]) -> StackedExperts | None:
        """Returns a tensor of all experts of a layer as files have it, given its name in the model; None where it is
        none, or the files lack it.

        Args:
            name: Name of the tensor in the model.
            files: Safetensors slices by name.
        """
        layer, names = self._layer(name)
        experts: list[list[Any]] = []
        while names:
            parts = [files.get(f"{layer}.{len(experts)}.{each}.weight") for each in names]
            if None in parts:
                break
            experts.append(parts)
        return StackedExperts(experts) if experts else None

    def _layer(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Returns the name in files of the experts of a layer, and the names of the matrices of an expert that
        tensor `name` of the model consists of; none for a tensor that is no tensor of all experts."""
        for ending, names in ((_GATE_UP, (self.gate, self.up)), (_DOWN, (self.down,))):
            if name.endswith(_IN_MODEL + ending):
                return f"{name.removesuffix(_IN_MODEL + ending)}.{self.block}.experts", names
        return "", ()


@dataclass(frozen=True)
class StackedExperts:
    """A tensor of all experts [experts, rows, columns] in files that have its parts.

    Args:
        experts: Safetensors slices whose rows, concatenated, are the matrix of each expert.
    """

    experts: Sequence[Sequence[Any]]

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        shapes = [part.get_shape() for part in self.experts[0]]
        return [len(self.experts), sum(rows for rows, _ in shapes), shapes[0][1]]

    def fill(self, tensor: Tensor, box: tuple[slice, ...]) -> None:
        """Reads a box of the whole tensor into `tensor`, converted to the type of that, one part of an expert at a
        time."""
        chosen, rows, columns = box
        for matrix, parts in zip(tensor, self.experts[chosen], strict=True):
            first = filled = 0
            for part in parts:
                count = part.get_shape()[0]
                begin, end = (min(max(row - first, 0), count) for row in (rows.start, rows.stop))
                matrix[filled : filled + end - begin].copy_(part[begin:end, columns])
                first, filled = first + count, filled + end - begin


_OF_QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
EXPERTS: Mapping[str, ExpertNames] = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"), _OF_QWEN
    ),
}
"""Names of experts in files, by `model_type`."""
