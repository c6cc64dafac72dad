"""ZeRO stages 1 and 2: optimizer state partitioned over ranks, at stage 2 gradients too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from services.engines.zero.deepspeed_internals import (
    NoopTimer,
    Stage12Optimizer,
    comm,
    drop_stage12_gradients,
    offload_options,
)
from services.engines.zero.flat import cut_together
from services.engines.zero.partitions import TrainedPartitions, bucket_numel, weight_shapes
from services.models.loading import Model


class Stage12Partitions(TrainedPartitions):
    """Partitions of stages 1 and 2: every rank's model has all weights, and each rank updates its partition of them.

    Args:
        model: the model, whole on every rank.
        adamw: optimizer of all parameters, which DeepSpeed's optimizer wraps.
        stage: ZeRO stage, 1 or 2.
        offloads: whether master weights and optimizer state are in host memory.
    """

    def __init__(self, model: Model, adamw: torch.optim.AdamW, stage: int, offloads: bool) -> None:
        self.model, self.offloads = model, offloads
        self.shapes = weight_shapes(model)
        self._is_stage_2 = stage == 2
        dtype = next(model.parameters()).dtype
        self.zero = Stage12Optimizer(
            adamw,
            {p: name for name, p in model.named_parameters()},
            timers=NoopTimer(),
            optimizer_params={},
            dp_process_group=comm.get_world_group(),
            partition_grads=stage == 2,
            reduce_bucket_size=bucket_numel(model),
            allgather_bucket_size=bucket_numel(model),
            # All-reduce, and keep one part: where a bucket has several owners, DeepSpeed does the same.
            reduce_scatter=False,
            gradient_average=False,
            offload_optimizer_config=offload_options(offloads),
            gradient_accumulation_dtype=dtype,
            communication_data_type=dtype,
            check_grad_overflow=False,
            compute_grad_norm=offloads,
        )
        self.parameter = self.zero.single_partition_of_fp32_groups[0]
        numels = {name: p.numel() for name, p in model.named_parameters()}
        self.pieces = cut_together(numels, int(self.zero.partition_size[0]), comm.get_rank())
        self.kept = self.cut(self.parameter.detach())

    def resident(self) -> Iterable[Tensor]:
        buffers = [self.zero.temp_grad_buffer_for_gpu_offload] if self.offloads else []
        return [*self.zero.bit16_groups_flat, *buffers]

    def _reduce(self, is_last: bool) -> None:
        if self._is_stage_2:
            self.zero.overlapping_partition_gradients_reduce_epilogue()
        elif is_last:
            self.zero.reduce_gradients()

    def gradient(self) -> Tensor:
        if (offloaded := self.offloaded_gradient) is not None:
            return offloaded
        parts = torch.cat([part.reshape(-1) for part in self.zero.averaged_gradients[0]])
        flat = torch.zeros_like(self.parameter)
        flat[: len(parts)] = parts
        self.zero.averaged_gradients[0] = [flat]
        return flat

    def drop_gradient(self) -> None:
        drop_stage12_gradients(self.zero, self.offloaded_gradient)

    def publish(self) -> None:
        self.zero.update_lp_params()
