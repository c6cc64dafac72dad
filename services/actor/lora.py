"""The actor with low-rank adapters on frozen weights; its ranks also serve the reference."""

from __future__ import annotations

from rlhf.v1 import reference_pb2
from services.actor.worker import ActorWorker
from services.engines.fsdp.lora import LoRAEngine
from services.roles.log_probs import ref_log_probs
from services.runtime.worker import CallContext, CallResult, CallRows, register
from settings.actor import ActorTable


class LoRAActorWorker(ActorWorker):
    """Worker of an actor that trains LoRA adapters. It also serves the reference role, by computing with the adapters
    disabled."""

    also_serves = (*ActorWorker.also_serves, "reference")
    table: ActorTable
    engine: LoRAEngine

    def engine_name(self) -> str:
        return f"{super().engine_name()} with LoRA"

    @register("3D_PROTO")
    def compute_ref_log_prob(
        self, rows: CallRows, request: reference_pb2.ComputeRefLogProbRequest, call: CallContext
    ) -> CallResult:
        """Implements ComputeRefLogProb with the adapters disabled, and so with the weights from before training."""
        with self.engine.without_adapters():
            return ref_log_probs(self, rows, request, call)
