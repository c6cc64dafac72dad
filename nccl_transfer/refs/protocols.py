"""Named transfer protocols (HybridFlow, Table 3): pure functions of the number of rows and the mesh.

A protocol says which rows each rank gets (`distribute`) and whose outputs make the result (`collect`).
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
"""Group of entry points by which installed packages bring protocols: instances or classes of them."""


class TransferProtocol(ABC):
    """How the rows of a call reach the ranks of a group, and whose rows come back. Parts are consecutive rows, in
    sizes that differ by at most one, the larger ones first.

    A protocol of one's own says into how many parts the rows are cut, which part each rank gets, and which ranks
    answer; then `register_protocol(MyProtocol())`, or an entry point in the group `rlhf_cluster.protocols`.

    Attributes:
        name: The name in method options and `@register`.
        splits: Whether the ranks' outputs, put end to end in `collect` order, are the rows of the call.
            If not, the result is one batch per collected rank.
        pads: Whether all parts have the same number of rows: where they do not divide, the first rows are dealt
            out once more at the end, and `restore` drops what came back for them. A method then returns one row
            for each row it was given.
    """

    name: ClassVar[str]
    splits: ClassVar[bool]
    pads: ClassVar[bool] = False

    @abstractmethod
    def parts(self, mesh: Mesh) -> int:
        """Into how many parts the rows are cut; 1: every rank gets all."""

    @abstractmethod
    def part(self, rank: int, mesh: Mesh) -> int:
        """Which part a rank gets; ranks with the same one get the same rows."""

    @abstractmethod
    def collect(self, mesh: Mesh) -> list[int]:
        """Ranks whose outputs make the result, in order."""

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        """Row numbers that each rank gets, one [n] int64 array per rank of the mesh."""
        numbers = np.arange(rows, dtype=np.int64)
        if self.pads:
            numbers = padded_rows(rows, self.parts(mesh))
        parts = np.array_split(numbers, self.parts(mesh))
        return [parts[self.part(rank, mesh)] for rank in range(mesh.size)]

    def restore(self, outputs: Batch, rows: int, mesh: Mesh) -> Batch:
        """Results for the rows of the call, in their order, each row once.

        Args:
            outputs: Outputs of the collected ranks put end to end.
            rows: Number of rows of the call.
            mesh: The mesh they were dealt to.

        Raises:
            InvalidRequest: Rows were dealt in another order, or some twice, and not one came back for each: which are
                whose cannot be told.
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
    """Row numbers of a batch that `parts` divides: all rows, then the first ones again, as often as it takes."""
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
    """Split over all ranks as data ranks; one result per rank, not concatenated: for metrics."""

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
    """Broadcast to all ranks; one result per pipeline stage, from its tensor index 0, data index 0. For what is
    equal over tensor and data ranks, such as weight names."""

    name, splits = "3D_PP_ONLY", False

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(stage, 0, 0) for stage in range(mesh.pipeline)]


class ThreeDPPAsDP(TransferProtocol):
    """Split over data ranks and, within each, over its pipeline stages, which serve as further data ranks;
    broadcast within tensor groups; concatenate from tensor index 0 of every stage. The paper counts eight
    protocols and names six; this one and DP_METRIC are those that verl has beside them."""

    name, splits = "3D_PP_AS_DP", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.data * mesh.pipeline

    def part(self, rank: int, mesh: Mesh) -> int:
        stage, _, data = mesh.position(rank)
        return data * mesh.pipeline + stage

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(stage, 0, data) for data in range(mesh.data) for stage in range(mesh.pipeline)]


class AllToAll(DataParallel):
    """Every rank gets the rows the caller gave it: the batch is cut evenly in rank order, and the caller
    stacks it so; gather from all ranks. For debugging."""

    name, splits = "ALL_TO_ALL", False

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        if rows % mesh.size:
            raise ConfigError(
                f"ALL_TO_ALL takes the same number of rows for each of {mesh.size} ranks, got {rows}"
            )
        return super().distribute(rows, mesh)


_REGISTRY: dict[str, TransferProtocol] = {}


def register_protocol(protocol: TransferProtocol) -> None:
    """Makes a protocol known by its name; a name can be taken once."""
    if protocol.name in _REGISTRY:
        raise ConfigError(f"a transfer protocol named {protocol.name!r} exists already")
    _REGISTRY[protocol.name] = protocol


for _protocol in (
    OneToAll(), DataParallel(), DataParallelMetric(), AllToAll(),
    ThreeD(), ThreeDAllMicroDP(), ThreeDPPOnly(), ThreeDPPAsDP(),
):  # fmt: skip
    register_protocol(_protocol)


def get_protocol(name: str) -> TransferProtocol:
    """The protocol of a name: built in, registered, or brought by an installed package.

    Raises:
        ConfigError: The name is unknown, and the text lists the known ones; or the package that brings it cannot
            be imported.
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
