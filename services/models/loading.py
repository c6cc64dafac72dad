"""Models of which each rank reads no more than it keeps: first they are shapes alone, then parts of weights."""

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
    """A model whose weights are on the meta device, all of them in the directory's files as `read_parts` reads them.
    One that only transformers can read, because it stores tensors in another form, comes whole.

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
    """Puts tensors with memory and without values in the place of those that are on the meta device, one at a time.

    It does so only as far as it is iterated over.

    Yields:
        The new tensors, with their names; tied ones once, under their first.
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
    """Reads boxes of the weights of a model, with their names; of a value head that is not there, zeros.

    Raises:
        ValueError: the directory lacks some, or has them in other shapes.
    """
    with WeightsReader(directory) as reader:
        for name, shard in shards:
            reader.fill(name, shard)


@torch.no_grad()
def read_first_values(
    load: Load, directory: Path, dtype: torch.dtype, shards: Iterable[tuple[str, WeightShard]]
) -> None:
    """Fills boxes of a model's parameters, with their names, with the values that `load_on_meta` and `read_parts` give
    them together: parameters that the files lack, such as a new head, and whole models come from `load`.

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
    """Names under which a weight appears again: a checkpoint holds it once, under its first name."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def _like(on_meta: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(on_meta, device=device)
    if isinstance(on_meta, nn.Parameter):
        return nn.Parameter(empty, requires_grad=on_meta.requires_grad)
    return empty
