"""Whether the model of a service divides over the meshes that its table names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from settings import meshes
from settings.actor import ActorTable
from settings.model import ModelTable
from settings.service import ServiceTable


def check_model_fits(name: str, table: ServiceTable) -> None:
    """Checks the model of a service against its meshes. A model that this host cannot read fits.

    Raises:
        ConfigError: The model does not divide over `mesh`, or vLLM cannot generate with it; the text says why, and the
            nearest meshes that fit.
    """
    if not isinstance(table, ModelTable):
        return
    shape = read_shape(table.model)
    try:
        if table.mesh:
            meshes.check(table.mesh, table.ranks, shape)
        if isinstance(table, ActorTable) and table.rollout_engine == "vllm":
            meshes.check_vllm(table.mesh, table.generation_mesh, shape)
    except ValueError as error:
        raise ConfigError(f"services.{name}: {error}") from None


def read_shape(model: Path) -> meshes.Shape:
    """The sizes in a model's config.json; none where the file cannot be read."""
    try:
        config: Any = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return meshes.NO_SHAPE
    sizes = config.items() if isinstance(config, dict) else ()
    return {key: value for key, value in sizes if isinstance(value, int)}
