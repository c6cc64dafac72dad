"""Runs micro-batches through the stages of a pipeline: forward passes only, or forward and backward passes (1F1B).

All stages of a pipeline have the same micro-batches, so ranks exchange hidden states and their gradients alone. The
schedule allocates its buffers once, so all hidden states of a call are padded to one shape [N, H], N being the tokens
of the largest micro-batch; a stage computes on the tokens of the micro-batch alone, in its own shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch, dummy_micro_batch
from services.engines.three_d.groups import MeshGroups
from services.engines.three_d.stage import ModelStage

Output = TypeVar("Output")


def run_forward(
    stage: ModelStage,
    groups: MeshGroups,
    micro_batches: Sequence[MicroBatch],
    head: Head[Output],
    hidden_template: Tensor,
) -> Iterator[Tensor | Output]:
    """Runs the forward pass of each micro-batch on this stage, as far as the iterator is run. Collective over the
    pipeline: all stages must run the same micro-batches to the end.

    Args:
        stage: This rank's stage.
        groups: Position and process groups of this rank.
        micro_batches: Micro-batches, the same on all stages.
        head: Computes the output on the last stage.
        hidden_template: Any tensor with the type, device and last dimension of hidden states.

    Yields:
        The output for each micro-batch, in order: on the last stage that of the head, on others the hidden states
        [B, T, H], which have been sent to the next stage.
    """
    for micro_batch in micro_batches:
        incoming = None
        if not groups.is_first_stage:
            incoming = hidden_template.new_empty((*micro_batch.input_ids_BT.shape, hidden_template.shape[-1]))
            dist.recv(incoming, group=groups.pipeline, group_src=groups.stage - 1)
        output = stage.forward(incoming, micro_batch, head)
        if not groups.is_last_stage:
            assert isinstance(output, Tensor)
            dist.send(output.contiguous(), group=groups.pipeline, group_dst=groups.stage + 1)
        yield output


def run_forward_backward(
    stage: ModelStage,
    groups: MeshGroups,
    micro_batches: Sequence[MicroBatch],
    loss_head: Head[Tensor],
    hidden_template: Tensor,
) -> None:
    """Runs forward and backward passes of all micro-batches by the 1F1B schedule, and adds the gradient of the sum of
    their losses to `.grad` of this stage's parameters. Collective over the pipeline.

    Args:
        loss_head: Head whose output is the loss of a micro-batch, a scalar. Called on the last stage only, in order,
            and for dummy micro-batches too, of which this function may add some.
        stage, groups, micro_batches, hidden_template: As in `run_forward`.
    """
    num_stages = groups.mesh.pipeline
    if num_stages == 1:
        for micro_batch in micro_batches:
            stage.forward(None, micro_batch, loss_head).backward()
        return
    # 1F1B needs at least as many micro-batches as stages.
    missing = max(num_stages - len(micro_batches), 0)
    every = [*micro_batches, *(dummy_micro_batch().to(hidden_template.device) for _ in range(missing))]
    wired = _StageBetweenWires(stage, groups, every, loss_head)
    # In host memory, so that no stage waits for its device to read them.
    numbers = torch.arange(len(every))
    wire = hidden_template.new_empty((wired.num_tokens, hidden_template.shape[-1]), requires_grad=True)
    first_input = (numbers[:1],) if groups.is_first_stage else (wire,)
    last_output = hidden_template.new_empty((), dtype=torch.float64, requires_grad=True)
    output = (last_output,) if groups.is_last_stage else (wire,)
    pipeline_stage = PipelineStage(
        wired, groups.stage, num_stages, hidden_template.device, first_input, output, group=groups.pipeline
    )
    schedule = Schedule1F1B(
        pipeline_stage, len(numbers), loss_fn=lambda loss, number: loss, scale_grads=False
    )
    # The schedule splits its inputs into micro-batches itself, so its inputs are their numbers.
    arguments = (numbers,) if groups.is_first_stage else ()
    target = numbers if groups.is_last_stage else None
    schedule.step(*arguments, target=target, return_outputs=False, number=numbers)


class _StageBetweenWires(nn.Module):
    """Module for torch's pipeline schedule: a stage whose input and output are hidden states [N, H], padded to the
    same N for all micro-batches. The output of the last stage is the loss."""

    def __init__(
        self,
        stage: ModelStage,
        groups: MeshGroups,
        micro_batches: list[MicroBatch],
        loss_head: Head[Tensor],
    ) -> None:
        super().__init__()
        self._stage, self._groups, self._loss_head = stage, groups, loss_head
        self._micro_batches = micro_batches
        self.num_tokens = max(micro_batch.input_ids_BT.numel() for micro_batch in micro_batches)

    def forward(self, wire_NH: Tensor, number: Tensor) -> Tensor:
        micro_batch = self._micro_batches[int(number)]
        incoming = None if self._groups.is_first_stage else _unpacked(wire_NH, micro_batch)
        output = self._stage.forward(incoming, micro_batch, self._loss_head)
        if self._groups.is_last_stage:
            # The schedule's buffer has one type, whatever type the loss is computed in.
            return output.double()
        hidden_NH = output.flatten(0, 1)
        return F.pad(hidden_NH, (0, 0, 0, self.num_tokens - len(hidden_NH)))


def _unpacked(wire_NH: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Returns the hidden states [B, T, H] of a micro-batch, a view of `wire_NH` without its padding."""
    shape_BT = micro_batch.input_ids_BT.shape
    return wire_NH[: shape_BT.numel()].unflatten(0, shape_BT)
