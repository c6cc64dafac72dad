"""Named transfer protocols (HybridFlow, Table 3): pure functions of the number of rows and the mesh.

A protocol assigns rows to ranks (`distribute`) and selects the ranks whose outputs form the result (`collect`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError, InvalidRequest

ENTRY_POINTS = "rlhf_cluster.protocols"
"""Group of entry points by which installed packages provide protocols, as instances or classes."""


class TransferProtocol(ABC):
    """Distributes the rows of a call over the ranks of a group, and collects their outputs. Parts are consecutive rows,
    in sizes that differ by at most one, the larger parts first.

    A subclass defines the number of parts, the part of each rank, and the ranks whose outputs are collected; it is
    registered by `register_protocol(MyProtocol())` or by an entry point in the group `rlhf_cluster.protocols`.

    Attributes:
        name: The name in method options and `@register`.
        splits: Whether the ranks' outputs, concatenated in `collect` order, are the rows of the call. If not, the
            result is one batch per collected rank.
        pads: Whether all parts have the same number of rows: the first rows are repeated at the end if the number of
            rows is not divisible, and `restore` drops their second outputs. A method then returns one row for each
            input row.
    """

    name: ClassVar[str]
    splits: ClassVar[bool]
    pads: ClassVar[bool] = False

    @abstractmethod
    def parts(self, mesh: Mesh) -> int:
        """Number of parts; 1: every rank gets all rows."""

    @abstractmethod
    def part(self, rank: int, mesh: Mesh) -> int:
        """The part of a rank; ranks of one part get the same rows."""

    @abstractmethod
    def collect(self, mesh: Mesh) -> list[int]:
        """Ranks whose outputs form the result, in order."""

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        """Row numbers of each rank, one [n] int64 array per rank of the mesh."""
        numbers = np.arange(rows, dtype=np.int64)
        if self.pads:
            numbers = padded_rows(rows, self.parts(mesh))
        parts = np.array_split(numbers, self.parts(mesh))
        return [parts[self.part(rank, mesh)] for rank in range(mesh.size)]

    def restore(self, outputs: Batch, rows: int, mesh: Mesh) -> Batch:
        """Outputs for the rows of the call, in their order, each row once.

        Args:
            outputs: Concatenated outputs of the collected ranks.
            rows: Number of rows of the call.
            mesh: The mesh that the rows were distributed over.

        Raises:
            InvalidRequest: Rows were reordered or repeated, and the number of outputs differs, so outputs cannot be
                matched to rows.
        """
        parts = self.distribute(rows, mesh)
        order = np.concatenate([parts[rank] for rank in self.collect(mesh)])
        if np.array_equal(order, np.arange(rows)):
            return outputs
        if outputs.rows != len(order):
            raise InvalidRequest(
                f"{self.name} dealt {rows} rows as {len(order)}, for which {outputs.rows} came back: a method that is "
                "called by it has to give one row for each"
            )
        return outputs.take(np.unique(order, return_index=True)[1])


def padded_rows(rows: int, parts: int) -> np.ndarray:
    """Row numbers of a batch padded to a multiple of `parts`: all rows, then the first rows again, cyclically."""
    padded = -(-rows // parts) * parts
    return np.arange(padded, dtype=np.int64) % max(rows, 1)


class OneToAll(TransferProtocol):
    """Broadcast to all ranks; gather from all ranks."""

    name, splits = "ONE_TO_ALL", False

    def parts(self, mesh: Mesh) -> int:
        return 1

    def part(self, rank: int, mesh: Mesh) -> int:
        return 0

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(mesh.size))


class DataParallel(TransferProtocol):
    """Split over all ranks as data ranks; concatenate."""

    name, splits = "DP_PROTO", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.size

    def part(self, rank: int, mesh: Mesh) -> int:
        return rank

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(mesh.size))


class DataParallelMetric(DataParallel):
    """Split over all ranks as data ranks; one result per rank, not concatenated. For metrics."""

    name, splits = "DP_METRIC", False


class ThreeD(TransferProtocol):
    """Split over data ranks and broadcast within each of their model-parallel groups; concatenate from the
    last pipeline stage, tensor index 0, of every data rank."""

    name, splits = "3D_PROTO", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.data

    def part(self, rank: int, mesh: Mesh) -> int:
        return mesh.position(rank)[2]

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(mesh.pipeline - 1, 0, data) for data in range(mesh.data)]


class ThreeDAllMicroDP(TransferProtocol):
    """Split over generation replicas, the micro-DP ranks of every data rank, and broadcast within each replica;
    concatenate from its first rank. For the 3D-HybridEngine (section 5)."""

    name, splits = "3D_ALL_MICRO_DP", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.replicas

    def part(self, rank: int, mesh: Mesh) -> int:
        return mesh.generation_position(rank)[2]

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(0, mesh.size, mesh.replica_size))


class ThreeDPPOnly(OneToAll):
    """Broadcast to all ranks; one result per pipeline stage, from its tensor index 0, data index 0. For values equal
    over tensor and data ranks, such as weight names."""

    name, splits = "3D_PP_ONLY", False

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(stage, 0, 0) for stage in range(mesh.pipeline)]


class ThreeDPPAsDP(TransferProtocol):
    """Split over data ranks and, within each, over its pipeline stages, which serve as further data ranks;
    broadcast within tensor groups; concatenate from tensor index 0 of every stage. The paper counts eight
    protocols and names six; this one and DP_METRIC are verl's other two."""

    name, splits = "3D_PP_AS_DP", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.data * mesh.pipeline

    def part(self, rank: int, mesh: Mesh) -> int:
        stage, _, data = mesh.position(rank)
        return data * mesh.pipeline + stage

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(stage, 0, data) for data in range(mesh.data) for stage in range(mesh.pipeline)]


class AllToAll(DataParallel):
    """Split evenly in rank order, as the caller stacked the rows; gather from all ranks. For debugging."""

    name, splits = "ALL_TO_ALL", False

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        if rows % mesh.size:
            raise ConfigError(
                f"ALL_TO_ALL takes the same number of rows for each of {mesh.size} ranks, got {rows}"
            )
        return super().distribute(rows, mesh)


_REGISTRY: dict[str, TransferProtocol] = {}


def register_protocol(protocol: TransferProtocol) -> None:
    """Registers a protocol by its name.

    Raises:
        ConfigError: The name is taken.
    """
    if protocol.name in _REGISTRY:
        raise ConfigError(f"a transfer protocol named {protocol.name!r} exists already")
    _REGISTRY[protocol.name] = protocol


for _protocol in (
    OneToAll(), DataParallel(), DataParallelMetric(), AllToAll(),
    ThreeD(), ThreeDAllMicroDP(), ThreeDPPOnly(), ThreeDPPAsDP(),
):  # fmt: skip
    register_protocol(_protocol)


def get_protocol(name: str) -> TransferProtocol:
    """The protocol of a name: built in, registered, or provided by an installed package.

    Raises:
        ConfigError: The name is unknown (the text lists the known names), or the package that provides it cannot be
            imported.
    """
    if name not in _REGISTRY:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            register_protocol(_load(entry))
    if name not in _REGISTRY:
        raise ConfigError(f"unknown transfer protocol {name!r}; known: {', '.join(protocol_names())}")
    return _REGISTRY[name]


def protocol_names() -> list[str]:
    """Names of all known protocols, those of installed packages included, sorted."""
    return sorted(set(_REGISTRY) | entry_points(group=ENTRY_POINTS).names)


def _load(entry: EntryPoint) -> TransferProtocol:
    try:
        loaded = entry.load()
        protocol = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:
        raise ConfigError(
            f"transfer protocol {entry.name!r} of {entry.value} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(protocol, TransferProtocol) or protocol.name != entry.name:
        raise ConfigError(f"transfer protocol {entry.name!r}: {entry.value} is no protocol of this name")
    return protocol
