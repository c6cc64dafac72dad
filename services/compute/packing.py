"""Attention over packed rows, in which sequences are concatenated without padding, and of a single new token.

transformers would attend over the whole row with a mask [T, T]. Here sequences are unpacked to padded grids for
attention alone, sequences of similar length together: tokens of different sequences are never compared, no mask is
made, and fused causal kernels compute the rest. A GPU that has a kernel for sequences of any length does without
unpacking.

Sequences may share a prefix, as the samples of one prompt do. The prefix lies in the row once: layers compute it once,
attention reads it for each of the sequences, and its gradient is the sum over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from services.compute.explicit_attention import Scores
from services.compute.sequence_parallel import SequenceRanks
from services.compute.varlen import Spans, attend_spans, fix_order_of_gradient, has_kernel

ATTENTION = "by_sequence"
"""Name under which the attention of this module is registered with transformers: its "sdpa", extended to packed rows,
capped scores and attention sinks."""

MAX_LENGTH_RATIO = 1.5
"""Largest ratio of the longest to the shortest sequence in a group."""

TILE = 16
"""Tokens that CPU attention kernels compute together. A remainder of more than half a tile takes longer than a whole
tile, so it is padded to one."""


@dataclass(frozen=True, eq=False)
class Places:
    """Positions of the tokens of S sequences in a packed row.

    Args:
        lengths: tokens of each sequence, at least 1, [S] int64.
        owners: sequence whose tokens the shared prefix is, [S] int64: an earlier one, or the sequence itself.
        common: tokens of the prefix shared with the owner, [S] int64; 0 where the owner is the sequence itself.
        starts: position of the first token after the shared prefix, [S] int64; the row's end if there is none.
    """

    lengths: np.ndarray
    owners: np.ndarray
    common: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(
        cls, lengths: np.ndarray, owners: np.ndarray | None = None, common: np.ndarray | int = 0
    ) -> Places:
        """Returns the positions of sequences that are concatenated in order, without those tokens of shared prefixes
        that belong to other sequences.

        Args:
            lengths: tokens of each sequence, prefix included, [S] int64.
            owners: for each sequence, the sequence whose prefix it shares, [S] int64. Default: itself.
            common: tokens of the shared prefix of each sequence; ignored where the owner is the sequence itself.
        """
        own = np.arange(len(lengths))
        owners = own if owners is None else owners
        common = np.where(owners == own, 0, common)
        return cls(lengths, owners, common, np.cumsum(lengths - common) - (lengths - common))

    def cells(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the positions in the row of given tokens; the arguments are broadcast.

        Args:
            sequences: numbers of sequences.
            tokens: index of each token in its sequence.
        """
        common = self.common[sequences]
        in_common = self.starts[self.owners[sequences]] + tokens
        return np.where(tokens < common, in_common, self.starts[sequences] - common + tokens)


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """S consecutive sequences of a packed row as a padded grid.

    Args:
        positions_ST: position in the row of each token; in the padding, that of the sequence's first token.
        own_N: flat indices into [S, T], ascending, of the tokens that belong to the sequence itself and not to the
            prefix that it shares with its owner.
    """

    positions_ST: Tensor
    own_N: Tensor

    def unpack(self, x_HTD: Tensor) -> Tensor:
        """Converts a packed tensor [H, T, D] of the whole row to this group's grid [S, H, T, D]."""
        x_THD = x_HTD.transpose(0, 1)
        if x_THD.is_cuda:  # the gradient of index_select adds up in no fixed order there
            return x_THD[self.positions_ST].transpose(1, 2)
        x_NHD = x_THD.index_select(0, self.positions_ST.flatten())
        return x_NHD.unflatten(0, self.positions_ST.shape).transpose(1, 2)

    def pack(self, x_STHD: Tensor) -> Tensor:
        """Converts a grid [S, T, H, D] to packed form [N, H, D], which has the tokens `own_N`, and so each token of
        the row once over all groups."""
        return x_STHD.flatten(0, 1).index_select(0, self.own_N)


@dataclass(frozen=True, eq=False)
class Packing:
    """Layout of the sequences in a packed row of T tokens.

    Args:
        position_ids_1T: position of each token in its sequence; with `ranks`, of each token of this rank.
        groups: groups of consecutive sequences, in order, which are computed together in attention.
        spans: all sequences, for a kernel that computes attention without unpacking the row.
        ranks: sequence-parallel group over which the tokens of the row are sharded; None if this rank computes all.
    """

    position_ids_1T: Tensor
    groups: tuple[SequenceGroup, ...]
    spans: Spans
    ranks: SequenceRanks | None = None

    @classmethod
    def of(cls, places: Places) -> Packing:
        """Returns the layout of a row, given the positions of its sequences; on the CPU."""
        own = places.lengths - places.common
        positions = np.arange(own.sum()) - np.repeat(places.starts - places.common, own)
        groups = tuple(_group(places, run) for run in _runs_of_like_length(places.lengths))
        sequences = np.repeat(np.arange(len(places.lengths)), places.lengths)
        tokens = np.arange(len(sequences)) - np.repeat(
            np.cumsum(places.lengths) - places.lengths, places.lengths
        )
        spans = Spans.of(places.lengths, places.common, places.cells(sequences, tokens))
        return cls(torch.from_numpy(positions)[None], groups, spans)

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the layout."""
        of_groups = [x for group in self.groups for x in (group.positions_ST, group.own_N)]
        return [self.position_ids_1T, *of_groups, *self.spans.tensors()]

    def with_tensors(self, tensors: Iterator[Tensor]) -> Packing:
        """Returns the layout with the next of the given tensors in place of its own, in the order of `tensors`."""
        position_ids_1T = next(tensors)
        groups = tuple(SequenceGroup(next(tensors), next(tensors)) for _ in self.groups)
        spans = self.spans.with_tensors(tensors)
        return replace(self, position_ids_1T=position_ids_1T, groups=groups, spans=spans)

    def shared(self, ranks: SequenceRanks) -> Packing:
        """Returns the layout of a row whose tokens are sharded over a sequence-parallel group, for this rank."""
        return replace(self, position_ids_1T=ranks.own(self.position_ids_1T[0])[None], ranks=ranks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole row, T."""
        return sum(len(group.own_N) for group in self.groups)

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments, besides the token ids, of a model whose attention is `ATTENTION`."""
        # transformers passes a mask of four dimensions on, and without one would make its own from the positions.
        no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=self.position_ids_1T.device)
        return {
            "position_ids": self.position_ids_1T,
            "attention_mask": no_mask,
            "packing": self,
        }


def return_read_positions(layer: Any) -> None:
    """Makes the last layer of a model accept an optional argument `read_N`, positions [N] of a packed row, and return
    its outputs at these positions alone, in this order; without it, at all positions. It computes all positions.

    Replaces the layer's `forward`, not the layer, so that hooks around it stay.
    """
    whole = layer.forward

    @wraps(whole)
    def forward(hidden_states: Tensor, *arguments: Any, read_N: Tensor | None = None, **options: Any) -> Any:
        output = whole(hidden_states, *arguments, **options)
        return output if read_N is None else output.index_select(1, read_N)

    layer.forward = forward


def skip_unread_positions_in_last_layer(layer: Any) -> None:
    """Makes the last layer of a Llama-like model accept an optional argument `read_N`, as `return_read_positions`, and
    compute its outputs at these positions alone. Keys and values are computed at all positions.

    Replaces the layer's `forward`, not the layer, so that its name, weights and hooks stay and FSDP gathers its weights
    as before. A replacement layer would need a subclass for each model family.
    """
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
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes attention, with transformers' interface for attention functions. In a packed row, each token attends to
    itself and the earlier tokens of its own sequence.

    Args:
        module: attention module of the layer.
        query, key, value: [1, heads, T, D] of a packed row, or of this rank's tokens of one; [B, heads, T, D] of rows
            that are not packed.
        attention_mask: mask of rows that are not packed; ignored for a packed row.
        packing: layout of a packed row; None if rows are not packed.
        sliding_window: number of last tokens that a token attends to, itself included; None for all.
        softcap: bound of the scores; None for none.
        s_aux: logits [heads] of attention sinks; None for none.
        options: further arguments of transformers' sdpa attention.

    Returns:
        Outputs [B, T, heads, D], and None in place of attention weights.
    """
    scores = Scores(softcap, s_aux)
    if packing is not None:
        own = (query[0], key[0], value[0])
        return _attend_packed(module, *own, packing, sliding_window, scores, **options)[None], None
    if scores.are_changed:
        return scores.attend(query, key, value, attention_mask, options.get("scaling")), None
    if query.shape[2] == 1 and query.shape[1] > key.shape[1]:
        return _attend_with_one_token(query, key, value, attention_mask, options.get("scaling")), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, sliding_window=sliding_window, **options
    )


def _attend_packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    window: int | None,
    scores: Scores,
    **options: Any,
) -> Tensor:
    """Computes attention in a packed row, as `attend`; arguments [heads, T, D], result [T, heads, D]."""
    if (ranks := packing.ranks) is not None:
        query, key, value = ranks.to_heads((query, key, value), packing.num_tokens)
        # Where ranks share a key head, they have fewer queries for it than the whole layer has.
        own_heads = SimpleNamespace(num_key_value_groups=len(query) // len(key), is_causal=True)
        own_scores = scores.of_heads(slice(ranks.rank * len(query), (ranks.rank + 1) * len(query)))
        alone = replace(packing, ranks=None)
        attended = _attend_packed(own_heads, query, key, value, alone, window, own_scores, **options)
        return ranks.to_tokens(attended)
    if has_kernel(query) and query.shape[-1] == value.shape[-1] and not scores.are_changed:
        return attend_spans(query, key, value, packing.spans, window, options.get("scaling"))
    parts = []
    for group in packing.groups:
        own_query, own_key, own_value = (group.unpack(x) for x in (query, key, value))
        mask = _window_mask(group.positions_ST, window)
        if scores.are_changed:
            attended_STHD = scores.attend(own_query, own_key, own_value, mask, options.get("scaling"))
        else:
            attended_STHD, _ = sdpa_attention_forward(module, own_query, own_key, own_value, mask, **options)
            fix_order_of_gradient(attended_STHD)
        parts.append(group.pack(attended_STHD))
    return torch.cat(parts)


def _attend_with_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Computes attention of one new token per row to all tokens before it, with grouped queries: queries [B, H, 1, D]
    to outputs [B, 1, H, D].

    Query heads that share a key head are treated as tokens of one head, so keys and values are read once instead of
    once per query head. On CPUs, plain products are faster than torch's fused kernel.
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
    """Returns the mask [1, 1, T, T] by which each token attends to the last `sliding_window` tokens, itself included;
    None if these are all tokens, so that causal attention needs no mask."""
    length = positions_ST.shape[1]
    if sliding_window is None or sliding_window >= length:
        return None
    whole = torch.ones((1, 1, length, length), dtype=torch.bool, device=positions_ST.device)
    return whole.tril().triu(1 - sliding_window)


def _runs_of_like_length(lengths: np.ndarray) -> Iterator[slice]:
    """Yields slices of consecutive sequences whose lengths differ by at most a factor of `MAX_LENGTH_RATIO`."""
    first, shortest, longest = 0, np.inf, 0.0
    for number, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if longest > MAX_LENGTH_RATIO * shortest:
            yield slice(first, number)
            first, shortest, longest = number, length, length
    yield slice(first, len(lengths))


def _group(places: Places, run: slice) -> SequenceGroup:
    """Returns the group of the sequences that slice `run` selects; on the CPU. Its grid is as long as the longest
    sequence, rounded up to a multiple of TILE where the remainder is more than half a tile."""
    sequences_S1 = np.arange(run.start, run.stop)[:, None]
    longest = int(places.lengths[run].max())
    tokens_T = np.arange(longest + -longest % TILE if longest % TILE > TILE // 2 else longest)
    is_real_ST = tokens_T < places.lengths[sequences_S1]
    # Padding reads the first token of its sequence, and not of its own tokens: a sequence without any, because its
    # prefix is shared whole, may start at the end of the row.
    positions_ST = places.cells(sequences_S1, np.where(is_real_ST, tokens_T, 0))
    is_own_ST = is_real_ST & (tokens_T >= places.common[sequences_S1])
    return SequenceGroup(torch.from_numpy(positions_ST), torch.from_numpy(np.flatnonzero(is_own_ST)))


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
