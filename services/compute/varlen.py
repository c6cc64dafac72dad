"""Attention over packed rows by one kernel for sequences of any length (FlashAttention, Dao 2023), where a GPU has it.

The row is not unpacked: each sequence's queries are a part of it, and so are its keys, unless sequences share a prefix,
whose keys are then gathered once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8
"""Head dimensions that the kernel takes: at most, and a multiple of."""


@dataclass(frozen=True, eq=False)
class Spans:
    """The S sequences of a packed row that have tokens of their own, in the order of the row.

    Args:
        query_bounds: first own token of each sequence in the row, and the end of the row, [S + 1] int32.
        key_bounds: the same in the keys, which are those of all tokens of each sequence, [S + 1] int32.
        keys_K: position in the row of each key; None if the keys are those of the row, in its order.
        most_queries, most_keys: most tokens between two bounds.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    keys_K: Tensor | None
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, lengths: np.ndarray, common: np.ndarray, keys: np.ndarray) -> Spans:
        """Returns the spans of sequences, in host memory.

        Args:
            lengths: tokens of each sequence, [sequences] int64.
            common: first ones of these that belong to another sequence, [sequences] int64.
            keys: position in the row of each token of each sequence, concatenated.
        """
        own = lengths - common
        has_own = own > 0  # no query reads the keys of other sequences
        is_whole = not common.any()
        return cls(
            _bounds(own[has_own]),
            _bounds(lengths[has_own]),
            None if is_whole else torch.from_numpy(keys[np.repeat(has_own, lengths)]),
            int(own.max()),
            int(lengths[has_own].max()),
        )

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the spans."""
        return [self.query_bounds, self.key_bounds, *([] if self.keys_K is None else [self.keys_K])]

    def with_tensors(self, tensors: Iterator[Tensor]) -> Spans:
        """Returns the spans with the next of the given tensors in place of their own, in the order of `tensors`."""
        query_bounds, key_bounds = next(tensors), next(tensors)
        keys_K = None if self.keys_K is None else next(tensors)
        return replace(self, query_bounds=query_bounds, key_bounds=key_bounds, keys_K=keys_K)


def has_kernel(x: Tensor) -> bool:
    """Returns whether the device has the kernel for queries [..., D] of this type: half precision, on a GPU of compute
    capability 8.0 or higher."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[-1] <= _LARGEST_HEAD
        and x.shape[-1] % _HEAD_MULTIPLE == 0
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def attend_spans(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, window: int | None, scaling: float | None
) -> Tensor:
    """Computes attention in which each token of a packed row attends to itself and the earlier tokens of its sequence.

    Args:
        query: [H, T, D] of the row.
        key, value: [K, T, D], K a divisor of H: each is shared by H / K queries.
        spans: sequences of the row.
        window: number of last tokens that a token attends to, itself included; None for all.
        scaling: factor of the scores. Default: 1 / sqrt(D).

    Returns:
        Outputs [T, H, D].
    """
    key_THD, value_THD = key.transpose(0, 1), value.transpose(0, 1)
    if spans.keys_K is not None:
        # Not index_select, whose gradient adds up in no fixed order on a GPU.
        key_THD, value_THD = key_THD[spans.keys_K], value_THD[spans.keys_K]
    # A sequence's queries are its last tokens: the kernel aligns the ends of queries and keys.
    attended: Any = varlen_attn(
        query.transpose(0, 1),
        key_THD,
        value_THD,
        spans.query_bounds,
        spans.key_bounds,
        spans.most_queries,
        spans.most_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=len(query) != len(key),
    )
    fix_order_of_gradient(attended)
    return attended


def fix_order_of_gradient(attended: Tensor) -> None:
    """Makes the kernel that has computed attention add up its gradient in a fixed order, if `attended` was computed
    within `deterministic_kernels`. The kernels do so where torch may use deterministic ones alone, but not where it
    only warns of others, as it does there.

    Args:
        attended: output of the kernel, or a view or copy of it.
    """
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return
    node = attended.grad_fn
    while node is not None and not any(word in node.name() for word in ("Attention", "attn")):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        node.register_prehook(lambda gradients: torch.use_deterministic_algorithms(True))
        node.register_hook(lambda *gradients: torch.use_deterministic_algorithms(True, warn_only=True))


def _bounds(lengths: np.ndarray) -> Tensor:
    """Returns the first position of each of consecutive spans, and the end of the last, [len(lengths) + 1] int32."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
