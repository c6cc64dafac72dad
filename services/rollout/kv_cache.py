"""A KV cache for transformers models that appends tokens without copying those before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def reserve(cache: DynamicCache, num_positions: int) -> DynamicCache:
    """Replaces layers of an empty cache, in place, by `ReservedLayer`s for `num_positions` tokens per row; returns the
    cache. New tokens are then written in place, while transformers' own layers copy all earlier tokens at each step.

    Layers that do not keep all tokens, such as those with a sliding window, are left as they are.
    """
    # Exactly this class: subclasses keep other tokens.
    cache.layers = [
        ReservedLayer(num_positions) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class ReservedLayer(DynamicLayer):
    """Layer of a KV cache: its keys and values, each [B, heads, n, head_dim] for the n tokens so far, are views of
    memory that is allocated for `num_positions` tokens at the first update.

    Args:
        num_positions: tokens per row that the memory has room for.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self._num_positions = num_positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        num_rows = len(key_states)
        keys, values = self._memory_like(key_states, num_rows), self._memory_like(value_states, num_rows)
        self._hold(keys, values, num_read=0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_read = self.get_seq_length()
        end = num_read + key_states.shape[-2]
        self._all_keys[:, :, num_read:end] = key_states
        self._all_values[:, :, num_read:end] = value_states
        self._hold(self._all_keys, self._all_values, end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces the rows by copies of those of the given indices, as many as there are; the name is that of
        transformers, whose layers without attention have no other method that does so."""
        keys, values = self._selected(self.keys, beam_idx), self._selected(self.values, beam_idx)
        self._hold(keys, values, self.get_seq_length())

    def _selected(self, states: Tensor, indices: Tensor) -> Tensor:
        """Returns newly allocated memory that begins with the keys or values of the rows `indices`."""
        memory = self._memory_like(states, num_rows=len(indices))
        torch.index_select(states, 0, indices, out=memory[:, :, : states.shape[2]])
        return memory

    def _memory_like(self, states: Tensor, num_rows: int) -> Tensor:
        """Returns new memory for `num_rows` rows and all positions, without values, of the type of `states`."""
        _, num_heads, _, head_dim = states.shape
        return states.new_empty((num_rows, num_heads, self._num_positions, head_dim))

    def _hold(self, all_keys: Tensor, all_values: Tensor, num_read: int) -> None:
        """Sets the layer's memory, of which `keys` and `values` become views of the first `num_read` positions."""
        self._all_keys, self._all_values = all_keys, all_values
        self.keys, self.values = all_keys[:, :, :num_read], all_values[:, :, :num_read]
