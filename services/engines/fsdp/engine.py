"""Data-parallel training on FSDP2: every rank holds a shard of each weight, its gradient and its moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from services.compute.heads import Head, dummy_head
from services.compute.linear import Linear
from services.compute.logits import DeferredLogits, OutputLayer
from services.compute.microbatch import MicroBatch, dummy_micro_batch
from services.compute.packing import ATTENTION, skip_unread_positions_in_last_layer
from services.compute.recompute import recompute_in_backward
from services.compute.transformers_internals import block_class_names
from services.engines.base import OptimizerOptions
from services.engines.data_parallel import DataParallelEngine
from services.engines.fully_shard import box, local_part, shard_modules, whole
from services.models.families import FAMILIES
from services.models.loading import Load, materialize, read_first_values, read_parts
from services.models.value_model import ValueModel, transformer_of
from services.models.weights import cast
from services.storage.checkpoint import WeightShard

Output = TypeVar("Output")


class FSDPEngine(DataParallelEngine):
    """A model on all ranks of the default process group, which must be initialised (gloo for CPU, nccl for CUDA).

    Args:
        model: in float32 where it is trained; whole, with the same weights on every rank, or of `load_on_meta`.
        device: where this rank computes; the current device, if CUDA.
        optimizer: None for a model that is never trained: it has no optimizer state.
        compute_dtype: of forward and backward, default that of the model; weights, gradients and moments keep
            the model's own.
        reshard_after_forward: gather the weights of a block again for its backward, so that a rank never holds more
            than a few blocks whole. False keeps them from forward to backward: more memory, less communication.
        activation_checkpointing: compute each block again in the backward pass, and keep its input alone.
        directory: where a model on the meta device has its weights; each rank reads the parts it keeps.
        load: what loaded the model from the directory; `start_over` needs both.

    Raises:
        ValueError: the directory lacks some weights, or has them in other shapes.
    """

    def __init__(
        self,
        model: PreTrainedModel | ValueModel,
        device: torch.device,
        *,
        optimizer: OptimizerOptions | None = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        directory: Path | None = None,
        load: Load | None = None,
    ) -> None:
        self._directory, self._load, self._dtype = directory, load, next(model.parameters()).dtype
        self.config = transformer_of(model).config
        self.packs = _know_packed_rows(model)
        self._reader = _ModelAndHead(model)
        if activation_checkpointing:
            recompute_in_backward(_blocks(model))
        casts = compute_dtype is not None and any(p.dtype != compute_dtype for p in model.parameters())
        is_sharded = dist.get_world_size() > 1 or casts
        if is_sharded:
            # Each transformer block on its own, and embeddings, norm and head together as the root.
            shard_modules(
                [*_blocks(model), self._reader],
                init_device_mesh(device.type, (dist.get_world_size(),)),
                dtype=next(model.parameters()).dtype,
                compute_dtype=compute_dtype,
                reshard_after_forward=reshard_after_forward,
            )
        self._fill({name: box(local_part(x), x) for name, x in materialize(model, device)}, directory)
        if is_sharded:
            # FSDP sets itself up in its first forward, and before that it cannot recover from an error in one.
            with torch.no_grad(), self._computing():
                self._reader(dummy_micro_batch().to(device), dummy_head)
        else:
            nn.Module.to(model, device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self._parameters = dict(model.named_parameters())
        trained = [name for name, p in self._parameters.items() if p.requires_grad]
        # AdamW works element by element, so it may as well see the local shards: DTensors would only slow it down.
        shards = {name: local_part(p) for name, p in self._parameters.items()}
        super().__init__(model, device, shards, trained, optimizer)

    def _fill(self, empty: Mapping[str, WeightShard], directory: Path | None) -> None:
        """Gives values to what has none yet of this rank's tensors."""
        if empty:
            assert directory is not None, "a model on the meta device has its weights in files"
            read_parts(directory, empty.items())

    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        if self._directory is None or self._load is None:
            raise RuntimeError("this engine was made of a model in memory, which it cannot load again")
        read_first_values(self._load, self._directory, self._dtype, weights.items())

    @contextmanager
    def _computing(self) -> Iterator[None]:
        try:
            yield
        finally:
            if isinstance(self._reader, FSDPModule):
                self._reader.reset_iter_state()

    def _read(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        return self._reader(micro_batch, head)

    def _store_gradients(self) -> None:
        for name in self._trained_names:
            gradient, shard = self._parameters[name].grad, self._kept[name]
            shard.grad = local_part(gradient) if gradient is not None else torch.zeros_like(shard)

    def _gather(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            yield name, cast(whole(tensor), dtype)

    def _shard(self, name: str, kept: Tensor) -> WeightShard:
        return box(kept, self._parameters[name])

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None


class _ModelAndHead(nn.Module):
    """A model and what a head reads off it, as one forward pass: so the weight of the output layer is gathered while
    the head computes with it, chunk by chunk."""

    def __init__(self, model: PreTrainedModel | ValueModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        return head(self._raw(micro_batch), micro_batch)

    def _raw(self, micro_batch: MicroBatch) -> Tensor | DeferredLogits:
        model: Any = self.model
        inputs = {"input_ids": micro_batch.input_ids_BT, "use_cache": False, **micro_batch.arguments()}
        layer = output_layer(model)
        if layer is None:
            output = model(**inputs, logits_to_keep=micro_batch.num_scored)
            return output if isinstance(output, Tensor) else output.logits
        hidden_BTH = model.get_decoder()(**inputs).last_hidden_state
        return DeferredLogits(hidden_BTH, layer)


def _know_packed_rows(model: PreTrainedModel | ValueModel) -> bool:
    """Have the model understand packed micro-batches, where it is of a family that hands on to its attention whatever
    it is given; returns whether it does."""
    backbone = transformer_of(model)
    if backbone.config.model_type not in FAMILIES:
        return False
    backbone.set_attn_implementation(ATTENTION)
    skip_unread_positions_in_last_layer(_blocks(model)[-1])
    return True


def output_layer(model: PreTrainedModel | ValueModel) -> OutputLayer | None:
    """The output layer of model families whose logits are a plain matrix product; None for other models."""
    if isinstance(model, ValueModel) or model.config.model_type not in FAMILIES:
        return None
    layer = model.get_output_embeddings()
    if type(layer) is nn.Linear or isinstance(layer, Linear):
        return OutputLayer(layer.weight)
    return None


def _blocks(model: PreTrainedModel | ValueModel) -> list[nn.Module]:
    transformer = transformer_of(model)
    names = block_class_names(transformer)
    return [module for module in transformer.modules() if type(module).__name__ in names]
