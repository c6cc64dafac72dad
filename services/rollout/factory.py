"""Builds the rollout engine that an actor's table of the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError
from services.engines.base import TrainEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.engines.three_d.transition import Transition
from services.models.families import load_causal_lm
from services.rollout.base import RolloutEngine
from services.rollout.hf import HFRollout
from services.rollout.sharded import ShardedDecoder
from settings.actor import ActorTable


def make_rollout(table: ActorTable, engine: TrainEngine, mesh: Mesh, device: torch.device) -> RolloutEngine:
    """Builds the rollout engine named by `table.rollout_engine`. Its weights must be loaded (`load_weights`) before
    it generates. Collective.

    Args:
        table: Table of the actor's service.
        engine: Training engine of this rank.
        mesh: Training and generation mesh of the service.
        device: Device of this rank.

    Raises:
        ConfigError: vLLM is not installed, or cannot run the model.
    """
    dtype = getattr(torch, table.dtype)
    transition = engine.transition if isinstance(engine, ThreeDParallelEngine) else None
    if table.rollout_engine == "vllm":
        return _vllm_rollout(table, dtype, transition, mesh.generation_tensor)
    if transition is not None:
        decoder = ShardedDecoder(table.model, mesh, transition, dtype=dtype, device=device)
        return HFRollout(decoder, token_budget=table.rollout_tokens)
    model: Any = load_causal_lm(table.model, dtype)
    return HFRollout(model.to(device), token_budget=table.rollout_tokens)


def _vllm_rollout(
    table: ActorTable, dtype: torch.dtype, transition: Transition | None, tensor_parallel: int
) -> RolloutEngine:
    try:
        # Imported here: vLLM is an install of its own, and takes seconds to import.
        from services.rollout.vllm import VLLMRollout
    except ImportError as error:
        raise ConfigError(
            f"rollout_engine vllm: {error}; docs/rollout.md says how to install vLLM"
        ) from error
    try:
        return VLLMRollout(
            table.model,
            dtype=dtype,
            table=table.vllm,
            identity=f"rlhf-{table.address.rpartition(':')[2]}",
            layouts=transition.layouts if transition is not None else None,
            tensor_parallel=tensor_parallel,
        )
    except ValueError as error:
        raise ConfigError(f"rollout_engine vllm: {error}") from error
