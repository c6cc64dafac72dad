"""Named transfer protocols (HybridFlow, Table 3): pure functions of the number of rows and the mesh.

A protocol assigns rows to ranks (`distribute`) and selects the ranks whose outputs form the result (`collect`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.plugins import PluginError, find_plugin, plugin_names

GROUP = "rlhf_cluster.protocols"
"""Entry-point group in which installed packages declare protocols, as NAME = "module:object" of a TransferProtocol."""


class TransferProtocol(ABC):
    """Distributes the rows of a call over the ranks of a worker group, and collects their outputs. The rows are split
    into parts of consecutive rows, whose sizes differ by at most one, the larger parts first.

    A subclass defines the number of parts, the part of each rank, and the ranks whose outputs are collected; it is
    registered by `register_protocol(MyProtocol())` or by an entry point in the group `rlhf_cluster.protocols`.

    Attributes:
        name: Name of the protocol in the .proto method options and in `@register`.
        splits: Whether the result is one batch, the outputs of the collected ranks concatenated. If not, the result
            is one batch per collected rank.
        pads: Whether all parts have the same number of rows. Rows that do not divide evenly are padded with the first
            rows again, and `restore` drops the outputs of the padding; a method must then return one row per input
            row.
            Default: False.
    """

    name: ClassVar[str]
    splits: ClassVar[bool]
    pads: ClassVar[bool] = False

    @abstractmethod
    def parts(self, mesh: Mesh) -> int:
        """Returns the number of parts into which rows are split; 1 if every rank gets all rows."""

    @abstractmethod
    def part(self, rank: int, mesh: Mesh) -> int:
        """Returns the index of the part that `rank` gets. Ranks with the same index get the same rows."""

    @abstractmethod
    def collect(self, mesh: Mesh) -> list[int]:
        """Returns the ranks whose outputs form the result, in the order of the result."""

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        """Returns the row numbers of each rank's part, with padding where the protocol pads, as one [n] int64 array per
        rank of the mesh. Default: `parts` consecutive parts of nearly equal size."""
        numbers = np.arange(rows, dtype=np.int64)
        if self.pads:
            numbers = padded_rows(rows, self.parts(mesh))
        parts = np.array_split(numbers, self.parts(mesh))
        return [parts[self.part(rank, mesh)] for rank in range(mesh.size)]

    def restore(self, outputs: Batch, rows: int, mesh: Mesh) -> Batch:
        """Returns the outputs in the order of the call's rows, each row once: reverts any reordering or padding of
        `distribute`. Where it did neither, returns `outputs` itself, of any number of rows.

        Args:
            outputs: Concatenated outputs of the collected ranks.
            rows: Number of input rows of the call.
            mesh: Mesh over which the rows were distributed.

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
                f"{self.name} sent {len(order)} rows for {rows} input rows, and {outputs.rows} rows were returned; a "
                "method with this protocol must return one row for each row it receives"
            )
        return outputs.take(np.unique(order, return_index=True)[1])


class WholeGroups(TransferProtocol):
    """Distributes groups of consecutive rows as another protocol distributes rows, so that every group stays whole. For
    the rows of one call.

    Args:
        inner: Distributes the groups; its `splits` must be true.
        sizes: Number of rows of each group, in the order of the rows [groups] int64.
    """

    name, splits = "WHOLE_GROUPS", True

    def __init__(self, inner: TransferProtocol, sizes: np.ndarray) -> None:
        self._inner = inner
        self._groups = np.split(np.arange(sizes.sum(), dtype=np.int64), np.cumsum(sizes)[:-1])

    def parts(self, mesh: Mesh) -> int:
        return self._inner.parts(mesh)

    def part(self, rank: int, mesh: Mesh) -> int:
        return self._inner.part(rank, mesh)

    def collect(self, mesh: Mesh) -> list[int]:
        return self._inner.collect(mesh)

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        nothing = np.empty(0, np.int64)
        dealt = self._inner.distribute(len(self._groups), mesh)
        return [np.concatenate([nothing, *(self._groups[group] for group in groups)]) for groups in dealt]


def padded_rows(rows: int, parts: int) -> np.ndarray:
    """Returns the row numbers [n] int64 of a batch padded to a multiple of `parts`: all rows, then 0, 1, ...
    again."""
    padded = -(-rows // parts) * parts
    return np.arange(padded, dtype=np.int64) % max(rows, 1)


class OneToAll(TransferProtocol):
    """Sends all rows to every rank; returns one result per rank."""

    name, splits = "ONE_TO_ALL", False

    def parts(self, mesh: Mesh) -> int:
        return 1

    def part(self, rank: int, mesh: Mesh) -> int:
        return 0

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(mesh.size))


class DataParallel(TransferProtocol):
    """Splits the rows over all ranks; concatenates their outputs."""

    name, splits = "DP_PROTO", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.size

    def part(self, rank: int, mesh: Mesh) -> int:
        return rank

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(mesh.size))


class DataParallelMetric(DataParallel):
    """Splits the rows over all ranks; returns one result per rank, not concatenated. For metrics."""

    name, splits = "DP_METRIC", False


class ThreeD(TransferProtocol):
    """Splits the rows over the data ranks, with equal rows for all pipeline stages and tensor ranks of a data rank;
    concatenates the outputs of the last pipeline stage, tensor index 0, of every data rank."""

    name, splits = "3D_PROTO", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.data

    def part(self, rank: int, mesh: Mesh) -> int:
        return mesh.position(rank)[2]

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(mesh.pipeline - 1, 0, data) for data in range(mesh.data)]


class ThreeDAllMicroDP(TransferProtocol):
    """Splits the rows over the generation replicas, with equal rows for all ranks of a replica; concatenates the
    outputs of the first rank of every replica. For generation with the 3D-HybridEngine (section 5)."""

    name, splits = "3D_ALL_MICRO_DP", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.replicas

    def part(self, rank: int, mesh: Mesh) -> int:
        return mesh.generation_position(rank)[2]

    def collect(self, mesh: Mesh) -> list[int]:
        return list(range(0, mesh.size, mesh.replica_size))


class ThreeDPPOnly(OneToAll):
    """Sends all rows to every rank; returns one result per pipeline stage, from its tensor index 0, data index 0. For
    values that are equal on all tensor and data ranks, such as weight names."""

    name, splits = "3D_PP_ONLY", False

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(stage, 0, 0) for stage in range(mesh.pipeline)]


class ThreeDPPAsDP(TransferProtocol):
    """Splits the rows over data ranks and, within each, over pipeline stages, which serve as further data ranks; the
    tensor ranks of a stage get equal rows; concatenates the outputs of tensor index 0 of every stage. The paper
    counts eight protocols and names six; this one and DP_METRIC are verl's other two."""

    name, splits = "3D_PP_AS_DP", True

    def parts(self, mesh: Mesh) -> int:
        return mesh.data * mesh.pipeline

    def part(self, rank: int, mesh: Mesh) -> int:
        stage, _, data = mesh.position(rank)
        return data * mesh.pipeline + stage

    def collect(self, mesh: Mesh) -> list[int]:
        return [mesh.rank(stage, 0, data) for data in range(mesh.data) for stage in range(mesh.pipeline)]


class AllToAll(DataParallel):
    """Splits rows that the caller has stacked in rank order, equally many per rank; returns one result per rank. For
    debugging. `distribute` raises ConfigError where the number of rows is no multiple of that of the ranks."""

    name, splits = "ALL_TO_ALL", False

    def distribute(self, rows: int, mesh: Mesh) -> list[np.ndarray]:
        if rows % mesh.size:
            raise ConfigError(
                f"ALL_TO_ALL takes the same number of rows for each of {mesh.size} ranks, got {rows}"
            )
        return super().distribute(rows, mesh)


_REGISTRY: dict[str, TransferProtocol] = {}


def register_protocol(protocol: TransferProtocol) -> None:
    """Registers a protocol under its `name`.

    Raises:
        ConfigError: A protocol of this name is registered already.
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
    """Returns a protocol: one that is built in or registered, of an entry point, or named as "module:object".

    Raises:
        PluginError: There is no such protocol (the message lists the known names), it cannot be imported, is no
            TransferProtocol, or has another name than its entry point.
    """
    return _REGISTRY[name] if name in _REGISTRY else _plug_in(name)


def protocol_names() -> list[str]:
    """Returns the names of all known protocols, those of installed packages included, sorted."""
    return plugin_names(GROUP, _REGISTRY)


@functools.cache
def _plug_in(name: str) -> TransferProtocol:
    try:
        protocol = find_plugin(GROUP, name, TransferProtocol, _REGISTRY)  # pyright: ignore[reportAbstractUsage]
    except PluginError as error:
        raise PluginError(f"transfer protocol {error}") from error
    if ":" not in name and protocol.name != name:
        raise PluginError(
            f"entry point {name!r} of {GROUP} declares a protocol of another name, {protocol.name!r}"
        )
    return protocol
