"""Named transfer protocols (HybridFlow, Table 3): pure functions of the number of rows and the mesh.

A protocol says which rows each rank gets (`distribute`) and whose outputs make the result (`collect`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlhf.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A training mesh p-t-d. Rank r has tensor index r % t, pipeline stage r // t % p and data index
    r // (t p), as in Megatron and in section 5 of the paper: tensor ranks are neighbours."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1

    @property
    def size(self) -> int:
        return self.pipeline * self.tensor * self.data

    def position(self, rank: int) -> tuple[int, int, int]:
        """(pipeline stage, tensor index, data index) of a rank."""
        return rank // self.tensor % self.pipeline, rank % self.tensor, rank // (self.tensor * self.pipeline)

    def rank(self, pipeline: int, tensor: int, data: int) -> int:
        """The rank at a position."""
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def __str__(self) -> str:
        return f"{self.pipeline}-{self.tensor}-{self.data}"


class TransferProtocol(ABC):
    """How the rows of a call reach the ranks of a group, and whose rows come back.

    Attributes:
        name: The name in method options and `@register`.
        splits: Whether the ranks' outputs, put end to end in `collect` order, are the rows of the call.
            If not, the result is one batch per collected rank.
    """

    name: ClassVar[str]
    splits: ClassVar[bool]

    @abstractmethod
    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        """Row numbers that each rank gets, one [n] int64 array per rank of the mesh."""

    @abstractmethod
    def collect(self, mesh: Mesh) -> list[int]:
        """Ranks whose outputs make the result, in order."""


def split_rows(rows: int, parts: int) -> list[np.ndarray]:
    """Consecutive rows in `parts` parts whose sizes differ by at most one, the larger ones first."""
    return np.array_split(np.arange(rows, dtype=np.int64), parts)


class OneToAll(TransferProtocol):
    """Broadcast to all ranks; gather from all ranks."""

    name, splits = "ONE_TO_ALL", False

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        return [np.arange(rows, dtype=np.int64)] * mesh.size

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(mesh.size))


class DataParallel(TransferProtocol):
    """Split over all ranks as data ranks; concatenate."""

    name, splits = "DP_PROTO", True

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        return split_rows(rows, mesh.size)

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(mesh.size))


class ThreeD(TransferProtocol):
    """Split over data ranks and broadcast within each of their model-parallel groups; concatenate from the
    last pipeline stage, tensor index 0, of every data rank."""

    name, splits = "3D_PROTO", True

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        parts = split_rows(rows, mesh.data)
        return [parts[mesh.position(rank)[2]] for rank in range(mesh.size)]

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(mesh.pipeline - 1, 0, data) for data in range(mesh.data)]


class AllToAll(TransferProtocol):
    """Every rank gets the rows the caller gave it: the batch is cut evenly in rank order, and the caller
    stacks it so; gather from all ranks. For debugging."""

    name, splits = "ALL_TO_ALL", False

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        if rows % mesh.size:
            raise ConfigError(
                f"ALL_TO_ALL takes the same number of rows for each of {mesh.size} ranks, got {rows}"
            )
        return split_rows(rows, mesh.size)

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(mesh.size))


_REGISTRY: dict[str, TransferProtocol] = {}


def register_protocol(protocol: TransferProtocol) -> None:
    """Makes a protocol known by its name; a name can be taken once."""
    if protocol.name in _REGISTRY:
        raise ConfigError(f"a transfer protocol named {protocol.name!r} exists already")
    _REGISTRY[protocol.name] = protocol


for _protocol in (OneToAll(), DataParallel(), ThreeD(), AllToAll()):
    register_protocol(_protocol)


def get_protocol(name: str) -> TransferProtocol:
    """The protocol of a name.

    Raises:
        ConfigError: The name is unknown; the text lists the known ones.
    """
    if name not in _REGISTRY:
        raise ConfigError(f"unknown transfer protocol {name!r}; known: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def names() -> Sequence[str]:
    """Names of all known protocols, sorted."""
    return sorted(_REGISTRY)
