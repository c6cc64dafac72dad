"""Memory of a configured service: its table and its model's config.json as a `ModelUse`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlhf.errors import ConfigError
from settings import meshes
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.engines import ROLLOUT_ENGINES, TRAINING_ENGINES, VllmTable
from settings.generation import GeneratingTable
from settings.memory.shape import HeadKind, ModelShape, read_model_shape
from settings.memory.use import VLLM_BATCHED_TOKENS, AdapterSize, ModelUse, RolloutUse
from settings.model import ModelTable
from settings.reference import ReferenceTable
from settings.reward import RewardTable
from settings.rollout import RolloutServiceTable
from settings.service import ServiceTable
from settings.values import ValuesTable

GIB = 1 << 30


class NotPredicted(ValueError):
    """The memory of a service is not predicted; the text says why."""


def service_use(
    table: ServiceTable, *, on_gpu: bool, truncates: bool = False, generates: bool = True
) -> ModelUse:
    """Returns the use of a model by a service. Reads the config.json of its model directory.

    Args:
        table: Table of the service.
        on_gpu: Whether its ranks compute on GPUs.
        truncates: Whether top_k, top_p or min_p truncate the distribution of rollouts.
        generates: Whether an actor generates, and not a rollout service for it.

    Raises:
        NotPredicted: The service has no model, or one of another family, or a role or an engine that is a plug-in; or
            a mixture of experts in another engine than fsdp, or shared by ranks to generate.
        ValueError: A mesh of the table cannot be parsed.
    """
    use = _use(table, on_gpu, truncates, generates)
    meshed = use.mesh[:2] != (1, 1) or (use.rollout is not None and use.rollout.is_shared)
    if use.shape.experts is not None and (use.engine in ("3d", "zero") or meshed):
        raise NotPredicted(
            "mixtures of experts are predicted in engine fsdp, each rank with the whole model to generate"
        )
    return use


def _use(table: ServiceTable, on_gpu: bool, truncates: bool, generates: bool) -> ModelUse:
    match table:
        case RewardTable():
            return _reward_use(table, on_gpu)
        case ActorTable():
            use = _model_use(table, on_gpu)
            return replace(use, rollout=_rollout_use(table, truncates, generates)) if table.generates else use
        case CriticTable() | ReferenceTable():
            return _model_use(table, on_gpu)
        case ValuesTable():
            return replace(_model_use(table, on_gpu), receives=True)
        case RolloutServiceTable():
            return _rollout_service_use(table, on_gpu, truncates)
        case _:
            raise NotPredicted(f"role {table.role} is a plug-in")


def computed_dtype(dtype: str, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """Returns the type that a service computes in, where its table says `dtype`."""
    return "bfloat16" if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else "float32"


def _reward_use(table: RewardTable, on_gpu: bool) -> ModelUse:
    """Returns the use of a reward model: whole on every rank unless it is sharded. If it learns, its engine also holds
    a sharded copy."""
    if table.model_directory is None:
        raise NotPredicted(f"kind {table.kind} has no model of its own")
    return ModelUse(
        _shape(table.model_directory, "score"),
        engine=table.engine if table.has_engine else "whole",
        zero_stage=table.zero.stage,
        offload_optimizer=table.zero.offload_optimizer,
        mesh=(1, 1, table.ranks),
        dtype=computed_dtype(table.dtype, on_gpu),
        learns=table.optimizer is not None,
        packing=False,
        micro_batch_tokens=table.micro_batch_tokens,
        scores_with_copy=table.optimizer is not None and not table.sharded,
        on_gpu=on_gpu,
        arena_bytes=table.arena_mb << 20,
        device_arena_bytes=table.device_arena_bytes if on_gpu else 0,
    )


def _rollout_service_use(table: RolloutServiceTable, on_gpu: bool, truncates: bool) -> ModelUse:
    mesh = meshes.parse(table.mesh) if table.mesh else (1, 1, table.ranks)
    return ModelUse(
        _shape(table.model_directory, "lm"),
        engine="none",
        mesh=mesh,
        dtype=computed_dtype(table.dtype, on_gpu),
        learns=False,
        rollout=RolloutUse(
            engine=_built_in(table),
            pipeline=mesh[0],
            tensor=mesh[1],
            cache_tokens=table.rollout_tokens,
            cache_bytes=int(table.vllm.kv_cache_gb * GIB),
            sequences=table.vllm.max_num_seqs,
            batched_tokens=_batched_tokens(table.vllm),
            truncates=truncates,
        ),
        receives=table.second_buffer,
        on_gpu=on_gpu,
        arena_bytes=table.arena_mb << 20,
        device_arena_bytes=table.device_arena_bytes if on_gpu else 0,
    )


def _model_use(table: ModelTable, on_gpu: bool) -> ModelUse:
    if table.engine not in TRAINING_ENGINES:
        raise NotPredicted(f"engine {table.engine} is a plug-in")
    lora = table.lora if isinstance(table, ActorTable) else None
    targets = lora.target_modules if lora is not None else ()
    return ModelUse(
        _shape(table.model_directory, "value" if isinstance(table, CriticTable | ValuesTable) else "lm"),
        engine=table.engine,  # pyright: ignore[reportArgumentType] - one of the three, as was just checked
        mesh=meshes.parse(table.mesh) if table.mesh else (1, 1, table.ranks),
        sequence_parallel=table.sequence_parallel,
        shards_over_data=table.shards_over_data,
        zero_stage=table.zero.stage,
        offload_optimizer=table.zero.offload_optimizer,
        dtype=computed_dtype(table.dtype, on_gpu),
        learns=table.keeps_state,
        adapters=None
        if lora is None
        else AdapterSize(lora.rank, () if isinstance(targets, str) else targets),
        activation_checkpointing=table.activation_checkpointing,
        packing=table.packing,
        micro_batch_tokens=table.micro_batch_tokens,
        on_gpu=on_gpu,
        arena_bytes=table.arena_mb << 20,
        device_arena_bytes=table.device_arena_bytes if on_gpu else 0,
    )


def _built_in(table: GeneratingTable) -> str:
    """Returns the name of a service's rollout engine, which is no plug-in."""
    if table.rollout_engine not in ROLLOUT_ENGINES:
        raise NotPredicted(f"rollout_engine {table.rollout_engine} is a plug-in")
    return table.rollout_engine


def _rollout_use(table: ActorTable, truncates: bool, generates: bool) -> RolloutUse:
    pipeline, tensor = meshes.generation_sizes(table.generation_mesh, table.mesh)
    return RolloutUse(
        engine=_built_in(table),
        pipeline=pipeline,
        tensor=tensor,
        gathers_all=table.transition != "hybridflow",
        cache_tokens=table.rollout_tokens,
        cache_bytes=int(table.vllm.kv_cache_gb * GIB),
        sequences=table.vllm.max_num_seqs,
        batched_tokens=_batched_tokens(table.vllm),
        truncates=truncates,
        generates=generates,
        sleeps=table.rollout_sleep,
    )


def _batched_tokens(table: VllmTable) -> int:
    """Returns the most tokens of a step of vLLM; the default for what is no number, which vLLM refuses."""
    given = table.engine_args.get("max_num_batched_tokens")
    return given if isinstance(given, int) else VLLM_BATCHED_TOKENS


def _shape(model: Path, head: HeadKind) -> ModelShape:
    try:
        return read_model_shape(model, head)
    except ConfigError as error:
        raise NotPredicted(str(error)) from None
