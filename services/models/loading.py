"""Loads models on the meta device, and reads those shards of the weights that this rank keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.compute.torch_internals import registered_tensors
from services.models.export import has_files_by_parts
from services.models.value_model import ValueModel
from services.models.weights import WeightsReader
from services.storage.checkpoint import WeightShard

Model = PreTrainedModel | ValueModel


class Load(Protocol):
    """Type of a function that loads a model from a directory in a dtype, on the meta device if `on_meta`, such as
    `families.load_causal_lm`."""

    def __call__(self, directory: Path, dtype: torch.dtype, /, *, on_meta: bool = False) -> Model: ...


def load_on_meta(load: Load, directory: Path, dtype: torch.dtype) -> Model:
    """Loads a model on the meta device if `read_parts` can read all of its weights from the directory; otherwise,
    such as for files that only transformers can convert, loads it whole in host memory.

    Args:
        load: loads the model.
        directory: Hugging Face directory.
        dtype: type of the weights.

    Raises:
        FileNotFoundError, ValueError: raised by `load`, on every rank alike.
    """
    model = load(directory, dtype, on_meta=True)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if x.is_meta}
    tied = shapes.keys() & repeated_names(model)
    with WeightsReader(directory) as reader:
        if has_files_by_parts(model) and all(
            reader.holds(name, shape) for name, shape in shapes.items() if name not in tied
        ):
            return model
    return load(directory, dtype)


def materialize(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Replaces a model's tensors on the meta device by tensors with memory on `device` but without values. Lazy: each
    tensor is replaced when the iterator reaches it.

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
    """Reads shards of a model's weights from a directory. A value head that the directory lacks is filled with zeros.

    Args:
        directory: Hugging Face directory.
        shards: name in the model and `WeightShard` of each weight, whose tensor is overwritten.

    Raises:
        ValueError: the directory lacks a weight, or has it in a different shape.
    """
    with WeightsReader(directory) as reader:
        for name, shard in shards:
            reader.fill(name, shard)


@torch.no_grad()
def read_first_values(
    load: Load, directory: Path, dtype: torch.dtype, shards: Iterable[tuple[str, WeightShard]]
) -> None:
    """Fills shards of a model's parameters with the values of a newly loaded model. Values are read from the
    files, except where `load_on_meta` returns the parameter with values already, such as a new head.

    Args:
        load: loads the model.
        directory: Hugging Face directory.
        dtype: type of the weights.
        shards: name in the model and `WeightShard` of each parameter, whose tensor is overwritten.

    Raises:
        FileNotFoundError, ValueError: raised by `load` or `read_parts`.
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
    """Returns all names of tied weights but the first of each, under which a checkpoint contains the weight."""
    return {name for names in tied_names(model).values() for name in names}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Returns the further names of each tied weight of a model, by its first name."""
    first: dict[nn.Parameter, str] = {}
    further: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            further.setdefault(first[parameter], []).append(name)
        else:
            first[parameter] = name
    return further


def _like(on_meta: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor like `on_meta` on `device`, without values; a parameter if `on_meta` is one."""
    empty = torch.empty_like(on_meta, device=device)
    if isinstance(on_meta, nn.Parameter):
        return nn.Parameter(empty, requires_grad=on_meta.requires_grad)
    return empty
