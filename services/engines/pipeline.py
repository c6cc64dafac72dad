"""Micro-batches through the stages of a pipeline: forwards only, or forwards and backwards (1F1B).

All stages of a pipeline have the same micro-batches, so only hidden states and their gradients travel. Between two
stages all of a call have one shape, [N, H] with N tokens of the largest, because the schedule allocates its buffers
once; a stage computes on the real ones alone, in the micro-batch's own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from services.engines.groups import MeshGroups
from services.engines.microbatch import MicroBatch, blank
from services.engines.stage import ModelStage


def run_forward(
    stage: ModelStage, groups: MeshGroups, micro_batches: Sequence[MicroBatch], like: Tensor
) -> Iterator[Tensor]:
    """What this stage makes of each micro-batch, [B, T, H], in order; further stages have it or will.

    Args:
        like: A tensor of the type, device and last dimension of hidden states.
    """
    for micro_batch in micro_batches:
        incoming = None
        if not groups.is_first_stage:
            incoming = like.new_empty((*micro_batch.input_ids_BT.shape, like.shape[-1]))
            dist.recv(incoming, group=groups.pipeline, group_src=groups.stage - 1)
        hidden_BTH = stage.forward(incoming, micro_batch)
        if not groups.is_last_stage:
            dist.send(hidden_BTH.contiguous(), group=groups.pipeline, group_dst=groups.stage + 1)
        yield hidden_BTH


def run_forward_backward(
    stage: ModelStage,
    groups: MeshGroups,
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[Tensor, int], Tensor],
    like: Tensor,
) -> None:
    """Add the gradient of the sum of all losses to `.grad` of this stage's parameters.

    Args:
        loss_of: From the last stage's hidden states [B, T, H] of a micro-batch and its number to its loss, a scalar.
            Called on the last stage only, in order. Micro-batches beyond those given are blank.
        like: As in `run_forward`.
    """
    num_stages = groups.mesh.pipeline
    if num_stages == 1:
        for number, micro_batch in enumerate(micro_batches):
            loss_of(stage.forward(None, micro_batch), number).backward()
        return
    # With fewer micro-batches than stages 1F1B does not run.
    missing = max(num_stages - len(micro_batches), 0)
    wired = _Wired(stage, groups, [*micro_batches, *(blank().to(like.device) for _ in range(missing))])
    numbers = torch.arange(len(wired.micro_batches), device=like.device)
    wire = like.new_empty((wired.num_tokens, like.shape[-1]), requires_grad=True)
    first_input = (numbers[:1],) if groups.is_first_stage else (wire,)
    pipeline_stage = PipelineStage(
        wired, groups.stage, num_stages, like.device, first_input, (wire,), group=groups.pipeline
    )

    def loss_fn(wire_NH: Tensor, number: Tensor) -> Tensor:
        micro_batch = wired.micro_batches[int(number)]
        return loss_of(_unpacked(wire_NH, micro_batch), int(number))

    schedule = Schedule1F1B(pipeline_stage, len(numbers), loss_fn=loss_fn, scale_grads=False)
    # The schedule cuts its inputs into micro-batches itself: it gets their numbers.
    arguments = (numbers,) if groups.is_first_stage else ()
    target = numbers if groups.is_last_stage else None
    schedule.step(*arguments, target=target, return_outputs=False, number=numbers)


class _Wired(nn.Module):
    """A stage between two wires."""

    def __init__(self, stage: ModelStage, groups: MeshGroups, micro_batches: list[MicroBatch]) -> None:
        super().__init__()
        self._stage, self._is_first = stage, groups.is_first_stage
        self.micro_batches = micro_batches
        self.num_tokens = max(micro_batch.input_ids_BT.numel() for micro_batch in micro_batches)

    def forward(self, wire_NH: Tensor, number: Tensor) -> Tensor:
        micro_batch = self.micro_batches[int(number)]
        incoming = None if self._is_first else _unpacked(wire_NH, micro_batch)
        hidden_NH = self._stage.forward(incoming, micro_batch).flatten(0, 1)
        return F.pad(hidden_NH, (0, 0, 0, self.num_tokens - len(hidden_NH)))


def _unpacked(wire_NH: Tensor, micro_batch: MicroBatch) -> Tensor:
    shape_BT = micro_batch.input_ids_BT.shape
    return wire_NH[: shape_BT.numel()].unflatten(0, shape_BT)
