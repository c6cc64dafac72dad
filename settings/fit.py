"""Checks that the model of a service can be divided over the meshes in its table, and reads rows of a length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from settings import meshes
from settings.actor import ActorTable
from settings.families import FAMILIES, PACKED
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
        ConfigError: The model cannot be divided over `mesh` or `generation_mesh`, or is of no type that ranks compute
            together, or the rollout engine cannot generate with it, or it has no more positions than a response has
            tokens. The text says why and, for meshes, lists the nearest that fit.
    """
    if not isinstance(table, LoadedModelTable):
        return
    config = _read_config(table.model_directory)
    shape = _integers(config)
    if 0 < shape.get(POSITIONS, 0) <= response_tokens:
        key = _ORIGINAL_POSITIONS if shape.get(_ORIGINAL_POSITIONS) == shape[POSITIONS] else POSITIONS
        raise ConfigError(
            f"rollout.max_response_tokens: {response_tokens} leave no room for a prompt in services.{name}, whose "
            f"model {table.model} reads rows of up to {shape[POSITIONS]} tokens in all ({key})"
        )
    if isinstance(table, ModelTable | RolloutServiceTable):
        _check_meshes(name, table, shape)
        _check_type(name, table, config.get("model_type"))


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


def _check_type(name: str, table: ModelTable | RolloutServiceTable, model_type: Any) -> None:
    """Raises ConfigError where ranks compute a model together whose type does not allow it. A type that is unknown
    (None) passes."""
    for key, types in _computed_together(table):
        if model_type is not None and model_type not in types:
            known = (
                f"of type {', '.join(types)}"
                if types is FAMILIES
                else "whose rows are packed (docs/models.md)"
            )
            raise ConfigError(
                f"services.{name}: {key} is for models {known}, and model {table.model} is of type {model_type}"
            )


def _computed_together(table: ModelTable | RolloutServiceTable) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the keys of a table by which several ranks compute one model together, each with its value and the types
    of models for which they can."""
    if isinstance(table, RolloutServiceTable):
        if meshes.generation_sizes(table.mesh, "") != (1, 1):
            yield f"mesh {table.mesh}", FAMILIES
        return
    if table.engine == "3d":
        yield "engine 3d", FAMILIES
    if table.sequence_parallel > 1:
        yield f"sequence_parallel {table.sequence_parallel}", PACKED
    own = table.generation_mesh if isinstance(table, ActorTable) and not table.mesh else ""
    if meshes.generation_sizes(own, "") != (1, 1):
        yield f"generation_mesh {own}", FAMILIES


def read_shape(model: Path) -> meshes.Shape:
    """Reads the integers in the config.json of a model directory, by key. Returns an empty mapping where the file
    cannot be read. With rotary embeddings of type longrope, the positions are those of `longrope_positions`."""
    return _integers(_read_config(model))


def _read_config(model: Path) -> Mapping[str, Any]:
    """Reads the config.json of a model directory; returns an empty mapping where that cannot be read."""
    try:
        config: Any = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _integers(config: Mapping[str, Any]) -> meshes.Shape:
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    if originals := longrope_positions(config):
        sizes |= dict.fromkeys((POSITIONS, _ORIGINAL_POSITIONS), min(originals))
    return sizes


def longrope_positions(config: Mapping[str, Any]) -> list[int]:
    """Returns `original_max_position_embeddings` of each kind of layer with rotary embeddings of type longrope (Phi 3
    and 4), in a config.json or in the dictionary of a configuration of transformers. Rows have no more tokens: if one
    row of a micro-batch has more, transformers rotates all positions of all its rows differently, so that a row's
    numbers would depend on its neighbours."""
    given = [rope for key in ("rope_scaling", "rope_parameters") if isinstance(rope := config.get(key), dict)]
    kinds = [each for rope in given for each in (rope, *rope.values()) if isinstance(each, dict)]
    found = [
        each.get(_ORIGINAL_POSITIONS) or config.get(_ORIGINAL_POSITIONS)
        for each in kinds
        if _LONGROPE & {each.get("rope_type"), each.get("type")}
    ]
    return [positions for positions in found if isinstance(positions, int)]
