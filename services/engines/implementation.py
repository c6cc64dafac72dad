"""Imports the class of an engine, for training or generation, that its spec names."""

from __future__ import annotations

from typing import TypeVar

import torch

from rlhf.errors import ConfigError
from rlhf.plugins import PluginError, load_class
from services.engines.base import OptimizerOptions
from settings.engines import Spec
from settings.model import LoadedModelTable, ModelTable
from settings.reward import RewardTable

E = TypeVar("E")


def implementation_of(key: str, name: str, spec: Spec, kind: type[E], reference: str = "") -> type[E]:
    """Imports and returns the class that implements an engine.

    Args:
        key: Key that names the engine: engine or rollout_engine.
        name: Name of the engine.
        spec: Spec of the engine.
        kind: Class that the implementation must be a subclass of.
        reference: "module:Class" of another class of the spec. Default: `spec.implementation`.

    Raises:
        ConfigError: The class cannot be imported, for example because a library is not installed, is no subclass of
            `kind`, or does not implement a method.
    """
    try:
        return load_class(reference or spec.implementation, kind)
    except PluginError as error:
        install = f"; {spec.install}" if spec.install and isinstance(error.__cause__, ImportError) else ""
        raise ConfigError(f"{key} {name}: {error}{install}") from error


def compute_dtype(table: LoadedModelTable | RewardTable) -> torch.dtype:
    """Returns the type that a service's model is computed in: `dtype` of its table; for "auto", bfloat16 where the
    process sees a GPU, on which it computes then, and float32 elsewhere."""
    if table.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, table.dtype)


def kept_dtype(table: ModelTable, optimizer: OptimizerOptions | None) -> torch.dtype:
    """Returns the type that a service's weights are kept in: float32 if they are trained, else that of computation."""
    return torch.float32 if optimizer is not None else compute_dtype(table)
