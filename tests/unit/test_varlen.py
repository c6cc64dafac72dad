"""Attention by the kernel for sequences of any length has the numbers of the gather path.

The kernel runs on GPUs alone, so a plain computation stands for it here, which takes and checks its arguments.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from packed_rows import FEW, RowShapes, row_shapes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from services.compute import packing, varlen
from services.compute.microbatch import pack
from services.compute.packing import Packing, attend
from services.engines.deterministic import deterministic_kernels

HEADS, KEY_HEADS, DIM = 4, 2, 8
SCALING = 0.3


def plain_kernel(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`varlen_attn`, sequence by sequence: queries are the last tokens of each sequence of keys."""
    given = inspect.signature(varlen_attn).bind(query, key, value, *arguments, **options).arguments
    bounds_q, bounds_k = given["cu_seq_q"], given["cu_seq_k"]
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert (int(bounds_q[-1]), int(bounds_k[-1])) == (len(query), len(key))
    assert int(bounds_q.diff().max()) == given["max_q"]
    assert int(bounds_k.diff().max()) == given["max_k"]
    assert int(bounds_q.diff().min()) > 0
    assert given["enable_gqa"] == (query.shape[1] != key.shape[1])
    left, right = given["window_size"]
    assert right == 0, "causal"
    parts = []
    spans = zip(itertools.pairwise(bounds_q.tolist()), itertools.pairwise(bounds_k.tolist()), strict=True)
    for (first_q, end_q), (first_k, end_k) in spans:
        keys, values = (
            x[first_k:end_k].repeat_interleave(HEADS // KEY_HEADS, dim=1).transpose(0, 1)
            for x in (key, value)
        )
        scores = given["scale"] * query[first_q:end_q].transpose(0, 1) @ keys.transpose(1, 2)
        behind = torch.arange(end_k - first_k - (end_q - first_q), end_k - first_k)[:, None] - torch.arange(
            end_k - first_k
        )
        seen = (behind >= 0) & (behind <= (left if left >= 0 else len(behind) + len(keys[0])))
        parts.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts)


def both_ways(layout: Packing, window: int | None) -> list[list[Tensor]]:
    """Outputs and gradients of queries, keys and values: by unpacking the row, and by the kernel."""
    torch.manual_seed(1)
    tokens = layout.position_ids_1T.shape[1]
    inputs = [torch.randn(1, n, tokens, DIM, dtype=torch.float64) for n in (HEADS, KEY_HEADS, KEY_HEADS)]
    weights, found = torch.randn(1, tokens, HEADS, DIM, dtype=torch.float64), []
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = HEADS // KEY_HEADS, True
    for kernel in (False, True):
        own = [x.clone().requires_grad_() for x in inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "has_kernel", lambda query, kernel=kernel: kernel)
            patch.setattr(varlen, "varlen_attn", plain_kernel)
            query, key, value = own
            how: Any = {"packing": layout, "sliding_window": window, "scaling": SCALING, "dropout": 0.0}
            attended, _ = attend(module, query, key, value, None, **how)
        assert attended.shape == weights.shape
        (attended * weights).sum().backward()
        found.append([attended.detach(), *(x.grad for x in own if x.grad is not None)])
    return found


def check(shapes: RowShapes, window: int | None) -> None:
    layout = pack(*shapes.columns(), np.arange(len(shapes.prompts))).packing
    assert layout is not None
    for expected, found in zip(*both_ways(layout, window), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("shapes", FEW, ids=str)
def test_the_kernel_has_the_numbers_of_the_gather_path(shapes: RowShapes, window: int | None) -> None:
    check(shapes, window)


@settings(max_examples=30)
@given(shapes=row_shapes())
def test_it_has_for_rows_of_any_shape(shapes: RowShapes) -> None:
    check(shapes, None)


def test_rows_that_share_nothing_are_read_where_they_are() -> None:
    prompts, responses = RowShapes([0, 1, 2], [3, 1, 2], [1, 7, 0]).columns()
    layout = pack(prompts, responses, np.arange(3)).packing
    assert layout is not None
    assert layout.spans.keys_K is None


def test_the_gather_path_computes_what_the_kernel_does_not_take() -> None:
    assert not varlen.has_kernel(torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16))


def is_strict() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def test_the_gradient_of_the_kernel_is_deterministic_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor) -> Tensor:
            return query.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            strict.append(is_strict())
            return gradients[0]

    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *_, **__: Attention.apply(query))
    layout = pack(*FEW[0].columns(), np.arange(2)).packing
    assert layout is not None
    x = torch.randn(HEADS, layout.position_ids_1T.shape[1], DIM, requires_grad=True)
    with deterministic_kernels(torch.device("cuda")):
        attended = varlen.attend_spans(x, x, x, layout.spans, None, None)
        attended.sum().backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert strict == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_gradient_of_fused_attention_is_too() -> None:
    x = torch.randn(1, HEADS, 5, DIM, requires_grad=True)
    attended = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    view = attended.transpose(1, 2).contiguous()
    strict, kernel = [], attended.grad_fn
    assert kernel is not None
    with deterministic_kernels(torch.device("cuda")):
        varlen.fix_order_of_gradient(view)
        kernel.register_prehook(lambda _: strict.append(is_strict()))
        view.sum().backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert strict == [True]
