"""Micro-batches that run through the stages of a pipeline on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_device import DEVICE, pretending
from torch import Tensor, nn

from nccl_transfer.refs.mesh import Mesh
from services.compute.microbatch import MicroBatch, dummy_micro_batch
from services.engines.three_d import pipeline


class OneStage:
    """A schedule that runs the forward passes of one stage, without the others."""

    def __init__(self, stage: nn.Module, num_micro_batches: int, **_: Any) -> None:
        self._stage, self._count = stage, num_micro_batches

    def step(self, *inputs: Tensor, number: Tensor, **_: Any) -> None:
        wires = inputs or (torch.zeros((1, 4), device=DEVICE),)
        for index, each in enumerate(number.chunk(self._count)):
            self._stage(wires[0][index : index + 1] if inputs else wires[0], each)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_does_not_wait_for_its_device(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[MicroBatch] = []

    def forward(incoming: Tensor | None, micro_batch: MicroBatch, head: Any) -> Tensor:
        ran.append(micro_batch)
        return torch.zeros((*micro_batch.input_ids_BT.shape, 4), device=DEVICE)

    monkeypatch.setattr(pipeline, "PipelineStage", lambda stage, *arguments, **keys: stage)
    monkeypatch.setattr(pipeline, "Schedule1F1B", OneStage)
    stage: Any = SimpleNamespace(forward=forward)
    groups: Any = SimpleNamespace(
        mesh=Mesh(pipeline=2), stage=index, is_first_stage=index == 0, is_last_stage=index == 1, pipeline=None
    )
    with pretending() as log:
        micro_batches = [dummy_micro_batch().to(DEVICE) for _ in range(3)]
        template = torch.zeros(4, device=DEVICE)
        log.clear()
        pipeline.run_forward_backward(stage, groups, micro_batches, lambda *_: template, template)
        assert ran == micro_batches
        assert (log.to_host, log.waits) == ([], [])
