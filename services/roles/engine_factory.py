"""Builds the training engine that a service's table of the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError
from services.engines.base import OptimizerOptions, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_value_model
from services.models.loading import Load, load_on_meta
from services.models.tokenizers import check_tokenizer, check_vocabulary
from settings.actor import ActorTable
from settings.model import ModelTable, OptimizerTable

if TYPE_CHECKING:
    from services.engines.zero.engine import ZeROEngine  # for types alone: it needs DeepSpeed


def make_engine(
    table: ModelTable,
    mesh: Mesh,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    load: Load,
    optimizer: OptimizerTable | None,
) -> TrainEngine:
    """Builds the engine named by `table.engine` with the model of directory `table.model`. Collective.

    `table.dtype` is the type of computation. Weights of a trained model are kept in float32 whatever it is.

    Args:
        table: Table of the service.
        mesh: Training mesh of the service.
        device: Device of this rank.
        tokenizer: Tokenizer of the model, whose vocabulary must fit the model.
        load: Loads the model from a directory.
        optimizer: Table of the optimizer; None for a model that is not trained.

    Raises:
        ConfigError: The engine's libraries are not installed.
        FileNotFoundError, ValueError: The model cannot be loaded, or does not fit tokenizer or mesh.
    """
    options = optimizer_options(optimizer) if optimizer else None
    match table.engine:
        case "3d":
            return _three_d_engine(table, mesh, device, tokenizer, load, options)
        case "zero":
            return _zero_engine(table, device, tokenizer, load, options)
        case _:
            return _fsdp_engine(table, device, tokenizer, load, options)


def optimizer_options(table: OptimizerTable) -> OptimizerOptions:
    """Converts an optimizer's table of the configuration to the options of an engine."""
    return OptimizerOptions(
        lr=table.learning_rate,
        betas=table.betas,
        eps=table.eps,
        weight_decay=table.weight_decay,
        max_grad_norm=table.max_grad_norm,
        warmup_steps=table.warmup_steps,
        schedule=table.schedule,
        total_steps=table.total_steps,
        min_ratio=table.min_ratio,
    )


def zero_engine_class() -> type[ZeROEngine]:
    """Imports and returns the class `ZeROEngine`.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    try:
        # Imported here: DeepSpeed is an install of its own, and its import configures the process.
        from services.engines.zero.engine import ZeROEngine
    except ImportError as error:
        raise ConfigError(
            f"engine zero: {error}; install it: pip install 'rlhf-cluster[deepspeed]'"
        ) from error
    return ZeROEngine


def _three_d_engine(
    table: ModelTable,
    mesh: Mesh,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    load: Load,
    options: OptimizerOptions | None,
) -> ThreeDParallelEngine:
    generates = isinstance(table, ActorTable)
    engine = ThreeDParallelEngine(
        table.model,
        mesh,
        device,
        dtype=_dtype(table),
        optimizer=options,
        with_value_head=load is load_value_model,
        transition=table.transition if generates else None,
        generates_in_place=generates
        and not table.shards_over_data
        and (table.rollout_engine, table.transition) == ("hf", "hybridflow"),
        activation_checkpointing=table.activation_checkpointing,
        shards_over_data=table.shards_over_data,
    )
    check_vocabulary(tokenizer, engine.config.vocab_size, table.model)
    return engine


def _zero_engine(
    table: ModelTable,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    load: Load,
    options: OptimizerOptions | None,
) -> ZeROEngine:
    engine = zero_engine_class()(
        table.model,
        table.zero.stage,
        device,
        dtype=_kept_dtype(table, options),
        compute_dtype=_dtype(table),
        optimizer=options,
        offloads=table.zero.offload_optimizer,
        with_value_head=load is load_value_model,
    )
    check_vocabulary(tokenizer, engine.config.vocab_size, table.model)
    return engine


def _fsdp_engine(
    table: ModelTable,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    load: Load,
    options: OptimizerOptions | None,
) -> FSDPEngine:
    model = load_on_meta(load, table.model, _kept_dtype(table, options))
    check_tokenizer(tokenizer, model)
    return FSDPEngine(
        model,
        device,
        optimizer=options,
        compute_dtype=_dtype(table),
        activation_checkpointing=table.activation_checkpointing,
        directory=table.model,
        load=load,
    )


def _dtype(table: ModelTable) -> torch.dtype:
    return getattr(torch, table.dtype)


def _kept_dtype(table: ModelTable, options: OptimizerOptions | None) -> torch.dtype:
    return torch.float32 if options else _dtype(table)
