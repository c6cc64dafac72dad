"""The weights that a rank generates with: which slices of the checkpoint's tensors it wants, and the memory that
received pieces of them are written to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.weight_plans import WeightSlice
from services.engines.three_d.stage import layouts_of_directory
from services.models.loading import tied_names
from services.models.meta import model_on_meta
from services.storage.checkpoint import WeightShard
from services.storage.layout import Layout
from services.weights.copying import Incoming
from services.weights.packing import slice_of
from services.weights.receive import Piece


@dataclass(frozen=True)
class WantedWeights:
    """The tensors that a rank generates with, each in the form in which its rollout engine loads it: whole, or a
    tensor-parallel shard.

    Attributes:
        layouts: Layout of each tensor that the rank keeps, by name in the checkpoint; tied tensors under the first
            name.
        part: The rank's part of the tensors that are cut.
        dtype: Type of the weights.
        device: Device of the weights.
        whole_numel: Number of parameters of the whole model.
        aliases: For each further name of a tied tensor under which the engine loads it too, its first name.
    """

    layouts: Mapping[str, Layout]
    part: int
    dtype: torch.dtype
    device: torch.device
    whole_numel: int
    aliases: Mapping[str, str] = field(default_factory=dict)

    def slices(self) -> list[WeightSlice]:
        """Returns the slices of the checkpoint's tensors, without padding."""
        kept = {
            name: torch.empty(layout.kept_shape, dtype=self.dtype, device="meta")
            for name, layout in self.layouts.items()
        }
        shards = {name: self._shard(name, tensor) for name, tensor in kept.items()}
        return [slice_of(name, shard) for name, shard in shards.items() if shard.tensor.numel()]

    def allocate(self) -> dict[str, Tensor]:
        """Returns new memory for all tensors by name, without values but for zeros where they are padded."""
        return {name: self._empty(name) for name in self.layouts}

    def write(self, memory: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
        """Copies pieces into tensors, given by name, as they arrive; they are there when all have arrived."""
        for slice_, values in pieces:
            self._write(memory[slice_.name], slice_, values)

    def named(self, memory: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors by all names, as `RolloutEngine.load_weights` takes them."""
        yield from memory.items()
        for alias, name in self.aliases.items():
            yield alias, memory[name]

    def assembled(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors as `named` does, each as soon as all of its pieces have arrived. Those whose pieces are
        incomplete are in memory, the others are not kept."""
        missing = {each.name: each.box.numel for each in self.slices()}
        begun: dict[str, Tensor] = {}
        for slice_, values in pieces:
            tensor = begun.get(slice_.name)
            if tensor is None:
                tensor = begun[slice_.name] = self._empty(slice_.name)
            self._write(tensor, slice_, values)
            values.wait()
            missing[slice_.name] -= slice_.box.numel
            if not missing[slice_.name]:
                yield slice_.name, begun.pop(slice_.name)
                yield from ((alias, tensor) for alias, name in self.aliases.items() if name == slice_.name)

    def _empty(self, name: str) -> Tensor:
        layout = self.layouts[name]
        tensor = torch.empty(layout.kept_shape, dtype=self.dtype, device=self.device)
        if layout.padding:
            tensor[self._shard(name, tensor).tensor.shape[0] :].zero_()
        return tensor

    def _shard(self, name: str, kept: Tensor) -> WeightShard:
        return self.layouts[name].shard(kept, self.part)

    def _write(self, kept: Tensor, slice_: WeightSlice, values: Incoming) -> None:
        """Copies a piece into the tensor that the rank keeps."""
        shard = self._shard(slice_.name, kept)
        values.copy_to(shard.tensor[slice_.box.within(shard.place)])


def whole_weights(directory: Path, dtype: torch.dtype, device: torch.device) -> WantedWeights:
    """Returns what a rank wants that generates with the whole model of a directory."""
    model = model_on_meta(AutoModelForCausalLM, directory, dtype)
    aliases = {name: first for first, names in tied_names(model).items() for name in names}
    layouts = {
        name: Layout(tuple(x.shape), 0) for name, x in model.state_dict().items() if name not in aliases
    }
    return WantedWeights(layouts, 0, dtype, device, _numel(layouts), aliases)


def weight_shards(
    directory: Path, mesh: Mesh, rank: int, dtype: torch.dtype, device: torch.device
) -> WantedWeights:
    """Returns what a rank wants that generates with a shard of the model of a directory.

    Args:
        mesh: Mesh of generation.
        rank: The rank.

    Raises:
        ValueError: The model does not divide over the mesh.
    """
    layouts = layouts_of_directory(
        directory, pipeline=mesh.generation_pipeline, tensor=mesh.generation_tensor
    )
    return generation_shards(layouts, mesh, rank, dtype, device)


def generation_shards(
    layouts: Mapping[str, Layout], mesh: Mesh, rank: int, dtype: torch.dtype, device: torch.device
) -> WantedWeights:
    """Returns what a rank wants that generates with a shard of a model, from the layouts of all of its tensors on the
    mesh of generation. Other arguments as for `weight_shards`."""
    stage, part, _ = mesh.generation_position(rank)
    last = mesh.generation_pipeline - 1
    own = {
        name: layout
        for name, layout in layouts.items()
        if layout.stage == stage or (layout.tied and stage == last)
    }
    return WantedWeights(own, part, dtype, device, _numel(layouts))


def _numel(layouts: Mapping[str, Layout]) -> int:
    return sum(math.prod(layout.shape) for layout in layouts.values())
