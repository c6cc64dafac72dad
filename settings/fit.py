"""Checks that the model of a service can be divided over the meshes in its table, and reads rows of a length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from settings import meshes
from settings.actor import ActorTable
from settings.generation import GeneratingTable
from settings.model import LoadedModelTable, ModelTable
from settings.rollout import RolloutServiceTable
from settings.service import ServiceTable

VLLM = "vllm"
"""Name of the rollout engine whose KV cache has a fixed size."""
POSITIONS = "max_position_embeddings"
"""Key of a config.json: maximum number of tokens of a row."""
_ORIGINAL_POSITIONS = "original_max_position_embeddings"
_LONGROPE = {"longrope", "su"}
"""Names of a type of rotary embeddings, new and old."""


def check_model_fits(name: str, table: ServiceTable, response_tokens: int = 0) -> None:
    """Checks that the model of a service can be divided over its meshes, and that a prompt fits into a row beside a
    response. A model whose config.json this host cannot read passes.

    Args:
        name: Name of the service.
        table: Table of the service.
        response_tokens: Maximum length of a response, in tokens. Default: unknown, which passes.

    Raises:
        ConfigError: The model cannot be divided over `mesh` or `generation_mesh`, or the rollout engine cannot generate
            with it, or it has no more positions than a response has tokens. The text says why and, for meshes, lists
            the nearest that fit.
    """
    if not isinstance(table, LoadedModelTable):
        return
    shape = read_shape(table.model_directory)
    if 0 < shape.get(POSITIONS, 0) <= response_tokens:
        key = _ORIGINAL_POSITIONS if shape.get(_ORIGINAL_POSITIONS) == shape[POSITIONS] else POSITIONS
        raise ConfigError(
            f"rollout.max_response_tokens: {response_tokens} leave no room for a prompt in services.{name}, whose "
            f"model {table.model} reads rows of up to {shape[POSITIONS]} tokens in all ({key})"
        )
    if isinstance(table, ModelTable | RolloutServiceTable):
        _check_meshes(name, table, shape)


def sized_for_rows(table: ServiceTable, row_tokens: int) -> ServiceTable:
    """Returns the table with `vllm.max_model_len` where it is 0: the tokens of a row, at most the positions of the
    model.

    Args:
        table: Table of any service, with a directory as model; returned as it is unless vLLM generates in it.
        row_tokens: Most tokens of a prompt and its response together. 0: unknown; the table is returned as it is.
    """
    if not row_tokens or not isinstance(table, GeneratingTable) or table.rollout_engine != VLLM:
        return table
    if table.vllm.max_model_len:
        return table
    most = min(row_tokens, read_shape(table.model).get(POSITIONS, row_tokens))
    return table.model_copy(update={"vllm": table.vllm.model_copy(update={"max_model_len": most})})


def _check_meshes(name: str, table: ModelTable | RolloutServiceTable, shape: meshes.Shape) -> None:
    """Raises ConfigError where a model of this shape cannot be divided over the meshes of its service."""
    try:
        if table.mesh:
            meshes.check(table.mesh, table.ranks, shape)
        if isinstance(table, ModelTable):
            meshes.check_sequence_parallel(table.sequence_parallel, shape)
        if isinstance(table, ActorTable):
            if table.generation_mesh and not table.mesh:
                meshes.check(table.generation_mesh, table.ranks, shape, meshes.GENERATION_KEY)
            table.check_generation_fits(table.mesh, table.generation_mesh, shape)
        elif isinstance(table, RolloutServiceTable):
            table.check_generation_fits(table.mesh, "", shape)
    except ValueError as error:
        raise ConfigError(f"services.{name}: {error}") from None


def read_shape(model: Path) -> meshes.Shape:
    """Reads the integers in the config.json of a model directory, by key. Returns an empty mapping where the file
    cannot be read. With rotary embeddings of type longrope, the positions are `original_max_position_embeddings`, as in
    `services.models.positions`."""
    try:
        config: Any = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return meshes.NO_SHAPE
    if not isinstance(config, dict):
        return meshes.NO_SHAPE
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    for rope in (config.get("rope_scaling"), config.get("rope_parameters")):
        if isinstance(rope, dict) and _LONGROPE & {rope.get("rope_type"), rope.get("type")}:
            original = rope.get(_ORIGINAL_POSITIONS, sizes.get(_ORIGINAL_POSITIONS))
            sizes |= (
                dict.fromkeys((POSITIONS, _ORIGINAL_POSITIONS), original) if isinstance(original, int) else {}
            )
    return sizes
