"""The interfaces by which a rollout engine gets its weights: their source, and how they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from services.storage.layout import Layout


class GenerationShards(Protocol):
    """The generation shards that `GenerationWeights.rollout_weights` yields."""

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Layouts of all tensors on the generation mesh, by name in the checkpoint."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the shards stay in permanent memory of the training engine."""
        ...

    def generation_memory(self) -> Callable[[str], Tensor]:
        """Returns a function that maps the name of a generation weight of this rank to its memory, or, without
        `in_place`, to a placeholder of its shape that takes none and must not be written."""
        ...


class GenerationWeights(Protocol):
    """Source of the weights that a rank generates with: its training engine, or what reshards the engine's weights."""

    @property
    def generation_shards(self) -> GenerationShards | None:
        """Sharding of the weights; None for whole tensors."""
        ...

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the tensor of each weight that this rank generates with, one at a time. The iterator is
        collective: run it to its end on every rank."""
        ...
