"""Data-parallel training with FSDP2: every rank holds a shard of each weight, its gradient and its moments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from services.compute.heads import Head, dummy_head, whole_output
from services.compute.linear import Linear
from services.compute.logits import DeferredLogits, OutputLayer
from services.compute.microbatch import MicroBatch, dummy_micro_batch
from services.compute.packing import ATTENTION, return_read_positions, skip_unread_positions_in_last_layer
from services.compute.recompute import recompute_in_backward
from services.compute.sequence_parallel import SequenceRanks
from services.compute.transformers_internals import block_class_names
from services.engines.base import EngineSetup, OptimizerOptions
from services.engines.data_parallel import DataParallelEngine
from services.engines.fully_shard import box, local_part, shard_modules, whole
from services.engines.implementation import compute_dtype, kept_dtype
from services.models.loading import Load, load_on_meta, materialize, read_first_values, read_parts
from services.models.value_model import ValueModel, transformer_of
from services.models.weights import cast
from services.runtime.process_groups import own_group
from services.storage.checkpoint import WeightShard
from settings import meshes
from settings.families import LLAMA_LIKE, PACKED
from settings.model import ModelTable

Output = TypeVar("Output")


class FSDPEngine(DataParallelEngine):
    """Training engine on FSDP2, on all ranks of the default process group, which must be initialized (gloo for CPU,
    nccl for CUDA). Construction is collective.

    Args:
        model: the model, in float32 if it is trained; whole with the same weights on every rank, or on the meta
            device (`load_on_meta`).
        device: device of this rank; the current device, if CUDA.
        optimizer: options of AdamW; None for a model that is not trained and has no optimizer state.
        compute_dtype: type of forward and backward passes. Default: that of the model, which is also the type of
            weights, gradients and moments.
        reshard_after_forward: whether a block's gathered weights are freed after its forward pass and gathered again
            for its backward pass. False takes more memory and less communication.
        activation_checkpointing: whether a block saves only its input, and is recomputed in the backward pass.
        directory: Hugging Face directory from which each rank reads its shards of a model on the meta device.
        load: function that loaded the model from the directory. `start_over` needs `directory` and `load`.
        sequence_parallel: size of the sequence-parallel groups of consecutive ranks, which have the same rows and
            shard the tokens of packed micro-batches (`services.compute.sequence_parallel`). Above 1, the engine
            computes only packed micro-batches that have a `part`.

    Raises:
        ValueError: the directory lacks weights, or has them in different shapes; or the model does not support
            `sequence_parallel` ranks.
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
        sequence_parallel: int = 1,
    ) -> None:
        self._directory, self._load, self._dtype = directory, load, next(model.parameters()).dtype
        self.config = transformer_of(model).config
        self.packs = _enable_packed_rows(model)
        if sequence_parallel > 1:
            self.sequence_ranks = self._sequence_ranks(sequence_parallel)
        self._reader = _ModelAndHead(model)
        if activation_checkpointing:
            recompute_in_backward(_blocks(model))
        casts = compute_dtype is not None and any(p.dtype != compute_dtype for p in model.parameters())
        is_sharded = dist.get_world_size() > 1 or casts
        if is_sharded:
            # One FSDP group per transformer block; embeddings, norm and head form the root group.
            fixed = [p for p in model.parameters() if optimizer is None or not p.requires_grad]
            shard_modules(
                [*_blocks(model), self._reader],
                init_device_mesh(device.type, (dist.get_world_size(),)),
                dtype=self._dtype,
                compute_dtype=compute_dtype,
                reshard_after_forward=reshard_after_forward,
                unsharded=[p for p in fixed if p.dtype != self._dtype],
            )
        self._fill({name: box(local_part(x), x) for name, x in materialize(model, device)})
        if is_sharded:
            # FSDP initializes in its first forward pass, and cannot recover from an error in it.
            with torch.no_grad(), self._computing():
                self._reader(dummy_micro_batch().to(device), dummy_head)
        else:
            nn.Module.to(model, device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self._parameters = dict(model.named_parameters())
        trained = [name for name, p in self._parameters.items() if p.requires_grad]
        # AdamW is element-wise, so it gets the local shards, which are faster than DTensors.
        shards = {name: local_part(p) for name, p in self._parameters.items()}
        super().__init__(model, device, shards, trained, optimizer)
        self.data_rank, self.data_size = (
            self.data_rank // sequence_parallel,
            self.data_size // sequence_parallel,
        )
        self._counts_loss = self.sequence_ranks is None or self.sequence_ranks.rank == 0

    @classmethod
    def create(cls, table: ModelTable, options: Any, setup: EngineSetup) -> Self:
        return cls(
            load_on_meta(setup.load, table.model, kept_dtype(table, setup.optimizer)),
            setup.device,
            optimizer=setup.optimizer,
            compute_dtype=compute_dtype(table),
            activation_checkpointing=table.activation_checkpointing,
            directory=table.model,
            load=setup.load,
            sequence_parallel=table.sequence_parallel,
        )

    def _sequence_ranks(self, size: int) -> SequenceRanks:
        """Creates sequence-parallel groups of `size` consecutive ranks; returns that of this rank. Collective.

        Raises:
            ValueError: the model is not packed, or its attention heads cannot be sharded over the group.
        """
        if not self.packs:
            raise ValueError(f"sequence_parallel: models of type {self.config.model_type} are not packed")
        heads = ("num_attention_heads", "num_key_value_heads")
        found = {key: getattr(self.config, key, None) for key in heads}
        meshes.check_sequence_parallel(size, {key: x for key, x in found.items() if x is not None})
        ranks = range(dist.get_world_size())
        return SequenceRanks(own_group([ranks[first : first + size] for first in ranks[::size]]))

    def _fill(self, empty: Mapping[str, WeightShard]) -> None:
        """Reads the values of this rank's tensors that have none yet, given as `WeightShard`s by name, from the model
        directory, which is None only if there are none."""
        if empty:
            assert self._directory is not None, "the weights of a model on the meta device are in files"
            read_parts(self._directory, empty.items())

    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        if self._directory is None or self._load is None:
            raise RuntimeError("this engine was built from a model in memory, which it cannot load again")
        read_first_values(self._load, self._directory, self._dtype, weights.items())

    @contextmanager
    def _computing(self) -> Iterator[None]:
        try:
            yield
        finally:
            if isinstance(self._reader, FSDPModule):
                self._reader.reset_iter_state()

    def _read(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        is_divided = micro_batch.part is not None
        assert self.sequence_ranks is None or is_divided or micro_batch.is_dummy, "every gradient counts once"
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
    """Module that runs a model and a head in one forward pass, so that FSDP keeps the output layer's weight gathered
    while the head computes logits chunk by chunk."""

    def __init__(self, model: PreTrainedModel | ValueModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        if (part := micro_batch.part) is None:
            return head(self._raw(micro_batch), micro_batch)
        return whole_output(head(self._raw(part), part), part)

    def _raw(self, micro_batch: MicroBatch) -> Tensor | DeferredLogits:
        """Runs the model on a micro-batch; returns the raw output that heads take."""
        model: Any = self.model
        inputs = {"input_ids": micro_batch.input_ids_BT, "use_cache": False, **micro_batch.arguments()}
        layer = output_layer(model)
        if layer is None:
            output = model(**inputs, logits_to_keep=micro_batch.num_scored)
            return output if isinstance(output, Tensor) else output.logits
        hidden_BTH = model.get_decoder()(**inputs).last_hidden_state
        return DeferredLogits(hidden_BTH, layer)


def _enable_packed_rows(model: PreTrainedModel | ValueModel) -> bool:
    """Prepares a model for packed micro-batches, if it is of one of the types `PACKED`; returns whether it is."""
    backbone = transformer_of(model)
    if backbone.config.model_type not in PACKED:
        return False
    backbone.set_attn_implementation(ATTENTION)
    skips = backbone.config.model_type in LLAMA_LIKE
    (skip_unread_positions_in_last_layer if skips else return_read_positions)(_blocks(model)[-1])
    return True


def output_layer(model: PreTrainedModel | ValueModel) -> OutputLayer | None:
    """Returns the output layer of a model of one of the types `PACKED`, if that layer is a plain product of hidden
    states and weight; None for any other model, and for value models."""
    if isinstance(model, ValueModel) or model.config.model_type not in PACKED:
        return None
    layer, config = model.get_output_embeddings(), model.config
    if (type(layer) is nn.Linear or isinstance(layer, Linear)) and layer.bias is None:
        scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        return OutputLayer(layer.weight, scale=scale, cap=getattr(config, "final_logit_softcapping", None))
    return None


def _blocks(model: PreTrainedModel | ValueModel) -> list[nn.Module]:
    """Returns the transformer blocks of a model, from the first to the last; of blocks within blocks the outer ones."""
    transformer = transformer_of(model)
    names = block_class_names(transformer)
    found: dict[str, nn.Module] = {}
    for path, module in transformer.named_modules():
        parents = itertools.accumulate(path.split("."), lambda parent, name: f"{parent}.{name}")
        if type(module).__name__ in names and found.keys().isdisjoint(parents):
            found[path] = module
    return list(found.values())
