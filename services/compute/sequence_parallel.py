"""Sequence parallelism of packed rows (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509).

The ranks of a sequence-parallel group shard the tokens of a packed row: rank s of S has every S-th token from token s
on, so that all have about as many response tokens, whose logits they compute. Each rank computes the layers for its
shard. Attention is sharded by heads instead: an all-to-all of queries, keys and values gives each rank all tokens for a
part of the heads, and a second one returns the outputs to the shards of tokens. So the activations of a row are sharded
over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from services.compute.collectives import all_to_all


@dataclass(frozen=True, eq=False)
class SequenceRanks:
    """The S ranks of a sequence-parallel group. Of a row of T tokens, rank s has a shard of ceil(T / S) tokens: s,
    s + S, s + 2 S and so on; the last token of a shard may be padding.

    Args:
        group: Process group of the ranks, with a backend for the device that they compute on.
    """

    group: ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks, S."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.group.rank()

    def share(self, num_tokens: int) -> int:
        """Returns the number of this rank's tokens of a row of `num_tokens`, padding included: ceil(T / S)."""
        return -(-num_tokens // self.size)

    def own(self, x_T: Tensor) -> Tensor:
        """Returns this rank's part [ceil(T / S)] of a tensor [T] of a whole row, padded with zeros."""
        x = x_T[self.rank :: self.size]
        return F.pad(x, (0, self.share(len(x_T)) - len(x)))

    def owns(self, positions: np.ndarray) -> np.ndarray:
        """Returns whether the tokens at given positions of a row are this rank's."""
        return positions % self.size == self.rank

    def places(self, positions: np.ndarray) -> np.ndarray:
        """Returns the indices in this rank's shard of its tokens at given positions of a row."""
        return positions // self.size

    def to_heads(self, projections: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
        """Exchanges tokens for heads, all projections in one all-to-all. Collective over the group.

        Args:
            projections: Queries, keys and values of this rank's tokens, each [heads, ceil(T / S), D], with a D of its
                own each. A projection with fewer heads than ranks has each of them repeated for the ranks that share it
                (`settings.meshes.check_sequence_parallel` has the numbers of heads that fit).
            num_tokens: T, the number of tokens of the row.

        Returns:
            Of each projection, this rank's heads of all tokens of the row, [heads / S, T, D], or [1, T, D] of repeated
            heads.
        """
        widths = [x.shape[-1] for x in projections]
        parts = [self._by_rank(F.pad(x, (0, max(widths) - x.shape[-1]))) for x in projections]
        received_SHTD = all_to_all(torch.cat(parts, dim=1), self.group)
        whole_HTD = received_SHTD.permute(1, 2, 0, 3).flatten(1, 2)[:, :num_tokens]
        split = whole_HTD.split([part.shape[1] for part in parts])
        return [x[..., :width] for x, width in zip(split, widths, strict=True)]

    def to_tokens(self, x_THD: Tensor) -> Tensor:
        """Exchanges heads for tokens, the inverse of `to_heads`: from this rank's heads of all tokens [T, heads / S, D]
        to all heads of this rank's tokens [ceil(T / S), heads, D]. Collective over the group."""
        num_tokens, share = len(x_THD), self.share(len(x_THD))
        padded = F.pad(x_THD, (0, 0, 0, 0, 0, share * self.size - num_tokens))
        received_STHD = all_to_all(padded.unflatten(0, (share, self.size)).transpose(0, 1), self.group)
        return received_STHD.transpose(0, 1).flatten(1, 2)

    def _by_rank(self, x_HTD: Tensor) -> Tensor:
        """Returns the heads [S, heads / S, T, D] that each rank gets."""
        if len(x_HTD) < self.size:
            x_HTD = x_HTD.repeat_interleave(self.size // len(x_HTD), dim=0)
        return x_HTD.unflatten(0, (self.size, -1))
