"""The interface by which a training engine that shards generation weights tells its rollout engine how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from services.storage.layout import Layout


class GenerationShards(Protocol):
    """The generation shards that `TrainEngine.rollout_weights` yields."""

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
