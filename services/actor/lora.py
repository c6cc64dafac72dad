"""The actor with low-rank adapters on frozen weights; its ranks also serve the reference."""

from __future__ import annotations

from typing import Any

import torch

from rlhf.v1 import reference_pb2
from services.actor.worker import ActorWorker
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.models.loading import Load, load_on_meta
from services.models.tokenizers import check_tokenizer
from services.roles.engine_factory import optimizer_options
from services.roles.log_probs import ref_log_probs
from services.runtime.worker import CallContext, CallResult, CallRows, register
from settings.actor import ActorTable, LoraTable
from settings.model import OptimizerTable


class LoRAActorWorker(ActorWorker):
    """Worker of an actor that trains LoRA adapters. It also serves the reference role, by computing with the adapters
    disabled."""

    also_serves = ("reference",)
    table: ActorTable
    engine: LoRAEngine

    def make_engine(self, load: Load, optimizer: OptimizerTable | None) -> LoRAEngine:
        assert self.table.lora is not None, "the actor's table has adapters"
        assert optimizer is not None, "an actor learns"
        # Frozen weights are kept in the type they are computed in.
        dtype = getattr(torch, self.table.dtype)
        model: Any = load_on_meta(load, self.table.model, dtype)
        check_tokenizer(self.tokenizer, model)
        return LoRAEngine(
            model,
            self.torch_device,
            adapters=_adapter_options(self.table.lora),
            optimizer=optimizer_options(optimizer),
            compute_dtype=dtype,
            activation_checkpointing=self.table.activation_checkpointing,
            directory=self.table.model,
        )

    def engine_name(self) -> str:
        return f"{super().engine_name()} with LoRA"

    @register("3D_PROTO")
    def compute_ref_log_prob(
        self, rows: CallRows, request: reference_pb2.ComputeRefLogProbRequest, call: CallContext
    ) -> CallResult:
        with self.engine.without_adapters():
            return ref_log_probs(self, rows, request, call)


def _adapter_options(table: LoraTable) -> AdapterOptions:
    return AdapterOptions(
        rank=table.rank, alpha=table.alpha, target_modules=table.target_modules, seed=table.seed
    )
