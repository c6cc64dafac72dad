"""Loads models on the meta device, and reads the shards of weights that a rank keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.compute.torch_internals import registered_tensors
from services.models.export import stored_as_computed
from services.models.value_model import ValueModel
from services.models.weights import WeightsReader
from services.storage.checkpoint import WeightShard

Model = PreTrainedModel | ValueModel


class Load(Protocol):
    """One of the `load_` functions of `services.models.families`."""

    def __call__(self, directory: Path, dtype: torch.dtype, /, *, on_meta: bool = False) -> Model: ...


def load_on_meta(load: Load, directory: Path, dtype: torch.dtype) -> Model:
    """A model on the meta device, all of whose weights `read_parts` can read from the directory. A model whose files
    only transformers can convert is loaded whole.

    Raises:
        FileNotFoundError, ValueError: as `load`, the same on every rank.
    """
    model = load(directory, dtype, on_meta=True)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if x.is_meta}
    tied = shapes.keys() & repeated_names(model)
    with WeightsReader(directory) as reader:
        if stored_as_computed(model) and all(
            reader.holds(name, shape) for name, shape in shapes.items() if name not in tied
        ):
            return model
    return load(directory, dtype)


def materialize(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Replaces tensors on the meta device by tensors with memory and without values, one at a time, as far as the
    iterator is run.

    Yields:
        Name and new tensor; a tied tensor once, under its first name.
    """
    made: dict[Tensor, Tensor] = {}
    for path, owner in model.named_modules():
        for tensors in registered_tensors(owner):
            for name, on_meta in tensors.items():
                if on_meta is None or not on_meta.is_meta:
                    continue
                is_first = on_meta not in made
                if is_first:
                    made[on_meta] = _like(on_meta, device)
                tensors[name] = made[on_meta]
                if is_first:
                    yield f"{path}.{name}" if path else name, made[on_meta]


def read_parts(directory: Path, shards: Iterable[tuple[str, WeightShard]]) -> None:
    """Fills boxes of a model's weights, by name; a value head without weights is filled with zeros.

    Raises:
        ValueError: the directory lacks a weight, or has it in another shape.
    """
    with WeightsReader(directory) as reader:
        for name, shard in shards:
            reader.fill(name, shard)


@torch.no_grad()
def read_first_values(
    load: Load, directory: Path, dtype: torch.dtype, shards: Iterable[tuple[str, WeightShard]]
) -> None:
    """Fills boxes of a model's parameters, by name, with the values of a newly loaded model: those of `load` for
    parameters that the files lack, such as a new head, and for models loaded whole; otherwise those of the files.

    Raises:
        FileNotFoundError, ValueError: as `load` and `read_parts`.
    """
    model = load_on_meta(load, directory, dtype)
    given = {name: x for name, x in model.named_parameters() if not x.is_meta}
    in_files = []
    for name, shard in shards:
        if name in given:
            shard.tensor.copy_(given[name][shard.box])
        else:
            in_files.append((name, shard))
    read_parts(directory, in_files)


def repeated_names(model: nn.Module) -> set[str]:
    """Further names of tied weights: a checkpoint holds a weight once, under its first name."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def _like(on_meta: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(on_meta, device=device)
    if isinstance(on_meta, nn.Parameter):
        return nn.Parameter(empty, requires_grad=on_meta.requires_grad)
    return empty
