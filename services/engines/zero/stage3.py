"""ZeRO stage 3: weights, gradients and optimizer state partitioned over ranks; modules gather weights to compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from services.engines.zero.deepspeed_internals import (
    STAGE_3,
    DeepSpeedZeRoOffload,
    NoopTimer,
    Stage3Optimizer,
    comm,
    copy_partitions_to_model,
    drop_stage3_gradients,
    gathered,
    offload_options,
    release_weights,
)
from services.engines.zero.flat import cut_each
from services.engines.zero.partitions import (
    Partitions,
    TrainedPartitions,
    bucket_numel,
    weight_shapes,
)
from services.models.loading import Model
from services.models.value_model import transformer_of


class Stage3Partitions(TrainedPartitions):
    """Partitions of a trained model at stage 3: each rank keeps a partition of each weight.

    Args:
        model: the model, whose weights are partitioned already (`partition_weights`).
        root: module that contains all others and is called first in every forward pass.
        adamw: optimizer of all parameters, which DeepSpeed's optimizer wraps.
        offloads: whether master weights and optimizer state are in host memory.
    """

    has_all = False

    def __init__(self, model: Model, root: nn.Module, adamw: torch.optim.AdamW, offloads: bool) -> None:
        self.model, self.offloads = model, offloads
        self.shapes = weight_shapes(model)
        dtype = next(model.parameters()).dtype
        self.zero = Stage3Optimizer(
            root,
            adamw,
            {p: name for name, p in model.named_parameters()},
            timers=NoopTimer(),
            ds_config=STAGE_3,
            dp_process_group=comm.get_world_group(),
            reduce_bucket_size=bucket_numel(model),
            # DeepSpeed reduce-scatters types of at most 32 bits.
            reduce_scatter=dtype != torch.float64,
            offload_optimizer_config=offload_options(offloads),
            offload_ratio=1.0 if offloads else 0.0,
            gradient_accumulation_dtype=dtype,
            communication_data_type=dtype,
            **_gather_options(model),
        )
        self.parameter = self.zero.fp32_partitioned_groups_flat[0]
        numels = {name: p.ds_numel for name, p in _parameters(model)}
        self.pieces = cut_each(numels, comm.get_world_size(), comm.get_rank())
        self.kept = self.cut(self.parameter.detach())

    def resident(self) -> Iterable[Tensor]:
        return (*self.zero.fp16_partitioned_groups_flat, self.zero.grad_partitions_flat_buffer)

    def release(self) -> None:
        release_weights(self.zero)

    def whole(self, parameter: Tensor) -> AbstractContextManager[Tensor]:
        return gathered(parameter)

    def _reduce(self, is_last: bool) -> None:
        self.zero.overlapping_partition_gradients_reduce_epilogue()

    def gradient(self) -> Tensor:
        if (offloaded := self.offloaded_gradient) is not None:
            return offloaded
        return self.zero.grad_partitions_flat_buffer

    def drop_gradient(self) -> None:
        drop_stage3_gradients(self.zero, self.model.parameters(), self.offloaded_gradient)

    def publish(self) -> None:
        copy_partitions_to_model(self.zero)


class FrozenStage3(Partitions):
    """Partitions of a model without optimizer at stage 3: each rank keeps a partition of each weight.

    Args:
        model: the model, whose weights are partitioned already (`partition_weights`).
        root: as in `Stage3Partitions`.
    """

    has_all = False

    def __init__(self, model: Model, root: nn.Module) -> None:
        self.model = model
        self.shapes = weight_shapes(model)
        self._zero = DeepSpeedZeRoOffload(
            root,
            timers=NoopTimer(),
            ds_config=STAGE_3,
            overlap_comm=False,
            dp_process_group=comm.get_world_group(),
            **_gather_options(model),
        )
        numels = {name: p.ds_numel for name, p in _parameters(model)}
        self.pieces = cut_each(numels, comm.get_world_size(), comm.get_rank())
        parts = {name: p.ds_tensor for name, p in _parameters(model)}
        self.kept = {
            name: parts[name].detach()[: piece.last - piece.first] for name, piece in self.pieces.items()
        }

    def release(self) -> None:
        self._zero.partition_all_parameters()

    def whole(self, parameter: Tensor) -> AbstractContextManager[Tensor]:
        return gathered(parameter)


def _gather_options(model: Model) -> dict[str, Any]:
    """Returns DeepSpeed options that limit the gathered weights of a rank to two layers: the current layer and the next
    one, which is prefetched. Without a limit on gathered weights, the modules of one layer, each of which prefetches up
    to a bucket, would together prefetch many layers."""
    num_layers = transformer_of(model).config.get_text_config().num_hidden_layers
    layer = sum(p.ds_numel for _, p in _parameters(model)) // num_layers
    return {
        "prefetch_bucket_size": layer,
        "max_live_parameters": 2 * layer,
        "max_reuse_distance": 0,
        "param_persistence_threshold": 0,
        "model_persistence_threshold": 0,
    }


def _parameters(model: Model) -> Iterator[tuple[str, Any]]:
    """Returns the model's named parameters, typed as Any since DeepSpeed's stage 3 adds attributes to them."""
    return model.named_parameters()
