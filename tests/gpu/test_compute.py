"""Kernels and copies of training on a real GPU: attention of packed rows, snapshots, copies of micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from packed_rows import FEW, RowShapes
from torch import Tensor, nn

from services.compute import fused, packing
from services.compute.copies import copy_together
from services.compute.layers import why_not_fused
from services.compute.microbatch import pack
from services.compute.packing import attend
from services.compute.sequence_parallel import SequenceRanks
from services.engines import snapshots
from services.engines.deterministic import deterministic_kernels
from services.engines.snapshots import SnapshotMemory
from services.testing.single_rank import single_rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HEADS, KEY_HEADS, DIM = 8, 4, 128
LONG = RowShapes([0, 0, 1, 2, 2, 2], [700, 300, 1500], [400, 1, 900, 30, 250, 1000])


def attended(
    gpu: torch.device,
    shapes: RowShapes,
    *,
    kernel: bool,
    window: int | None,
    ranks: SequenceRanks | None = None,
) -> list[Tensor]:
    """Output and gradients of queries, keys and values, in bfloat16."""
    micro_batch = pack(*shapes.columns(), np.arange(len(shapes.prompts)), ranks=ranks).to(gpu)
    own = micro_batch.part or micro_batch
    assert own.packing is not None
    torch.manual_seed(1)
    tokens = own.input_ids_BT.shape[1]
    options: Any = {"device": gpu, "dtype": torch.bfloat16}
    inputs = [
        torch.randn(1, n, tokens, DIM, **options).requires_grad_() for n in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weights, module = torch.randn(1, tokens, HEADS, DIM, **options), nn.Module()
    module.num_key_value_groups, module.is_causal = HEADS // KEY_HEADS, True  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch, deterministic_kernels(gpu):
        if not kernel:
            patch.setattr(packing, "has_kernel", lambda query: False)
        query, key, value = inputs
        how: Any = {"packing": own.packing, "sliding_window": window, "scaling": 0.1, "dropout": 0.0}
        output, _ = attend(module, query, key, value, None, **how)
        (output * weights).sum().backward()
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shapes", [*FEW, LONG], ids=str)
def test_the_kernel_has_the_numbers_of_the_gather_path(
    gpu: torch.device, shapes: RowShapes, window: int | None
) -> None:
    expected = attended(gpu, shapes, kernel=False, window=window)
    for x, y in zip(attended(gpu, shapes, kernel=True, window=window), expected, strict=True):
        assert torch.linalg.vector_norm((x - y).float()) <= 0.02 * torch.linalg.vector_norm(y.float()) + 1e-3


@pytest.mark.parametrize("kernel", [False, True])
def test_its_gradient_has_the_same_bits_each_time(gpu: torch.device, kernel: bool) -> None:
    first, second = (attended(gpu, LONG, kernel=kernel, window=None) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("window", [None, 100])
def test_tokens_that_are_exchanged_for_heads_over_nccl_have_the_same_bits(
    gpu: torch.device, window: int | None, tmp_path: Path
) -> None:
    """As one rank that sends to itself; tests/gpu/test_two_gpus.py has two."""
    alone = attended(gpu, LONG, kernel=True, window=window)
    with single_rank(gpu, tmp_path):
        assert dist.group.WORLD is not None
        found = attended(gpu, LONG, kernel=True, window=window, ranks=SequenceRanks(dist.group.WORLD))
    assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("has_room", [True, False])
def test_a_snapshot_has_the_values_from_before_what_waits_for_it(
    gpu: torch.device, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: 1 << 50 if has_room else 0)
    memory = SnapshotMemory(gpu)
    for value in (1.0, 2.0):
        state = {name: torch.full((1 << 24,), value, device=gpu) for name in "abc"}
        copies = memory.copy(state)
        memory.wait()
        for x in state.values():
            x.zero_()
        torch.cuda.synchronize()
        assert {x.device.type for x in copies.values()} == {"cuda" if has_room else "cpu"}
        assert has_room or all(x.is_pinned() for x in copies.values())
        assert all(bool((x == value).all()) for x in copies.values())


def test_tensors_arrive_together_as_they_were(gpu: torch.device) -> None:
    empty = torch.empty_strided((0,), (0,), dtype=torch.int64)
    sent = [torch.arange(7), torch.tensor([True, False]), torch.zeros(0, 3), empty, torch.randn(2, 5).t()]
    for x, y in zip(copy_together(sent, gpu), sent, strict=True):
        assert (x.device, x.dtype, x.shape) == (gpu, y.dtype, y.shape)
        assert torch.equal(x.cpu(), y)


def test_the_compiled_kernels_can_be_used(gpu: torch.device) -> None:
    assert why_not_fused(gpu) == ""


def test_the_compiled_kernels_have_the_same_bits_each_time(gpu: torch.device) -> None:
    def outputs_and_gradients() -> list[Tensor]:
        torch.manual_seed(0)
        options: Any = {"device": gpu, "dtype": torch.bfloat16}
        x, up, weight = (
            torch.randn(shape, **options).requires_grad_()
            for shape in ((1, 5000, 2048), (1, 5000, 2048), (2048,))
        )
        y = fused.gated(fused.rms_norm(x, weight, 1e-6), up)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, up, weight))]

    with deterministic_kernels(gpu):
        assert all(map(torch.equal, outputs_and_gradients(), outputs_and_gradients()))
