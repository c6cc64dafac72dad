"""Attention over sequences that lie end to end in one row, so that layers compute on no padding; and of one new token.

Transformers would attend over the whole row under a mask of [T, T]. Here the sequences are laid side by side again for
attention alone, those of like length together: no token is compared with one of another sequence, no mask is made, and
fused causal kernels do the rest.

Sequences may begin alike, as the samples of a prompt do. What they have in common lies in the row once: layers compute
it once, it is laid before each of them for attention, and its gradients are the sums of what each of them gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "sdpa_by_sequence"
"""Name in transformers of an attention that is sdpa's, and that knows packed rows."""

MAX_LENGTH_RATIO = 1.5
"""The longest of sequences that attend side by side is at most so many times as long as the shortest."""

TILE = 16
"""Tokens that kernels of CPUs compute together. What is left over takes longer than a whole tile, where it is more than
half of one."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of S sequences lie in a row.

    Args:
        lengths: of the sequences, each at least 1, [S] int64.
        owners: whose beginning each begins with, [S] int64: its own, or that of one before it that has its own.
        common: tokens it has in common with its owner, [S] int64; 0 where it is its own.
        starts: where the tokens begin that are its own, [S] int64; the end of the row where none are left.
    """

    lengths: np.ndarray
    owners: np.ndarray
    common: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(
        cls, lengths: np.ndarray, owners: np.ndarray | None = None, common: np.ndarray | int = 0
    ) -> Places:
        """Sequences end to end, with beginnings in common where owners are given; `common` of owners is not read."""
        own = np.arange(len(lengths))
        owners = own if owners is None else owners
        common = np.where(owners == own, 0, common)
        return cls(lengths, owners, common, np.cumsum(lengths - common) - (lengths - common))

    def cells(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Cells of the row where tokens of sequences are, both by number; the two are broadcast together."""
        common = self.common[sequences]
        in_common = self.starts[self.owners[sequences]] + tokens
        return np.where(tokens < common, in_common, self.starts[sequences] - common + tokens)


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """S neighbouring sequences of a row, side by side.

    Args:
        positions_ST: where each of their tokens lies in the row; in the padding, where the first one does.
        own_N: which cells of [S, T], in order, are tokens that are no other sequence's already.
    """

    positions_ST: Tensor
    own_N: Tensor

    def unpack(self, x_HTD: Tensor) -> Tensor:
        """A row of the packed tensor with all heads, as [S, H, T, D]."""
        x_THD = x_HTD.transpose(0, 1)
        if x_THD.is_cuda:  # where the gradients of index_select are summed in no certain order
            return x_THD[self.positions_ST].transpose(1, 2)
        x_NHD = x_THD.index_select(0, self.positions_ST.flatten())
        return x_NHD.unflatten(0, self.positions_ST.shape).transpose(1, 2)

    def pack(self, x_STHD: Tensor) -> Tensor:
        """The inverse, of each cell of the row once: [N, H, D]."""
        return x_STHD.flatten(0, 1).index_select(0, self.own_N)


@dataclass(frozen=True, eq=False)
class Packing:
    """How sequences lie in a row of T tokens.

    Args:
        position_ids_1T: of each token in its sequence.
        groups: the sequences, in order.
    """

    position_ids_1T: Tensor
    groups: tuple[SequenceGroup, ...]

    @classmethod
    def of(cls, places: Places) -> Packing:
        """Sequences that lie so."""
        own = places.lengths - places.common
        positions = np.arange(own.sum()) - np.repeat(places.starts - places.common, own)
        groups = tuple(_group(places, run) for run in _runs_of_like_length(places.lengths))
        return cls(torch.from_numpy(positions)[None], groups)

    def to(self, device: torch.device) -> Packing:
        groups = (SequenceGroup(each.positions_ST.to(device), each.own_N.to(device)) for each in self.groups)
        return Packing(self.position_ids_1T.to(device), tuple(groups))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a model whose attention is `ATTENTION`, beside the row."""
        # A mask of four dimensions is handed on as it is, where transformers would make one of the positions.
        no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=self.position_ids_1T.device)
        return {
            "position_ids": self.position_ids_1T,
            "attention_mask": no_mask,
            "sequence_groups": self.groups,
        }


def skip_unread_positions_in_last_layer(layer: Any) -> None:
    """Have the last layer of a model of the Llama family know `read_N`, the tokens [N] of a packed row whose output is
    wanted: of what all tokens attend to it computes these alone, and gives them alone, in this order."""
    whole, reading = layer.forward, None

    def select(projection: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor] | None:
        return None if reading is None else (arguments[0].index_select(1, reading),)

    @wraps(whole)
    def forward(hidden_states: Tensor, *, read_N: Tensor | None = None, **arguments: Any) -> Tensor:
        nonlocal reading
        if read_N is None:
            return whole(hidden_states, **arguments)
        reading = read_N
        try:
            attended_1NH, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **arguments)
        finally:
            reading = None
        hidden_1NH = hidden_states.index_select(1, read_N) + attended_1NH
        return hidden_1NH + layer.mlp(layer.post_attention_layernorm(hidden_1NH))

    layer.self_attn.o_proj.register_forward_pre_hook(select)
    layer.forward = forward


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_groups: tuple[SequenceGroup, ...] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, [1, H, T, D] to [1, T, H, D]; of any rows where no groups are given."""
    if sequence_groups is None and query.shape[2] == 1 and query.shape[1] > key.shape[1]:
        return _attend_with_one_token(query, key, value, attention_mask, options["scaling"]), None
    if sequence_groups is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **options
        )
    parts = []
    for group in sequence_groups:
        own_query, own_key, own_value = (group.unpack(x[0]) for x in (query, key, value))
        mask = _window_mask(group.positions_ST, sliding_window)
        attended_STHD, _ = sdpa_attention_forward(module, own_query, own_key, own_value, mask, **options)
        parts.append(group.pack(attended_STHD))
    return torch.cat(parts)[None], None


def _attend_with_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention of one token per row to all before it, [B, H, 1, D] to [B, 1, H, D].

    The query heads that share a key head stand in the place of its tokens, so that keys and values are read once and
    not repeated for each of them. On CPUs plain products read them faster than torch's fused kernel.
    """
    own_query = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    if key.is_cpu and key.dtype in (torch.float32, torch.float64):
        scores = (own_query * (scaling or query.shape[-1] ** -0.5)) @ key.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        attended = scores.softmax(dim=-1) @ value
    else:
        attended = F.scaled_dot_product_attention(own_query, key, value, attn_mask=mask, scale=scaling)
    return attended.flatten(1, 2).unsqueeze(1)


def _window_mask(positions_ST: Tensor, sliding_window: int | None) -> Tensor | None:
    """Which of the last `sliding_window` tokens, itself included, each token sees; None where that is all."""
    length = positions_ST.shape[1]
    if sliding_window is None or sliding_window >= length:
        return None
    whole = torch.ones((1, 1, length, length), dtype=torch.bool, device=positions_ST.device)
    return whole.tril().triu(1 - sliding_window)


def _runs_of_like_length(lengths: np.ndarray) -> Iterator[slice]:
    first, shortest, longest = 0, np.inf, 0.0
    for number, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if longest > MAX_LENGTH_RATIO * shortest:
            yield slice(first, number)
            first, shortest, longest = number, length, length
    yield slice(first, len(lengths))


def _group(places: Places, run: slice) -> SequenceGroup:
    sequences_S1 = np.arange(run.start, run.stop)[:, None]
    longest = int(places.lengths[run].max())
    tokens_T = np.arange(longest + -longest % TILE if longest % TILE > TILE // 2 else longest)
    is_real_ST = tokens_T < places.lengths[sequences_S1]
    # Padding reads the first token of its sequence. The place of a sequence's own tokens would not do: one that has
    # none, because all it reads is in common, may begin where the row ends.
    positions_ST = places.cells(sequences_S1, np.where(is_real_ST, tokens_T, 0))
    is_own_ST = is_real_ST & (tokens_T >= places.common[sequences_S1])
    return SequenceGroup(torch.from_numpy(positions_ST), torch.from_numpy(np.flatnonzero(is_own_ST)))


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
