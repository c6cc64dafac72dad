"""Devices and the links between them: a table with sources in `devices.toml`, which users extend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhf.errors import ConfigError
from settings.strict import NotNegative, Strict, read_toml, validate

GB = 1e9
CPU = "CPU"
"""Prefix of the names of devices whose memory is the host's."""


class DeviceTable(Strict):
    """One kind of device, as `devices.toml` describes it."""

    tflops: dict[str, Annotated[float, Field(gt=0)]]
    """Peak rate of dense matrix products by type, bfloat16 and float32, in 10^12 operations per second."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the peak rate in training and forward passes."""
    memory_gb: float = Field(gt=0)
    """Memory in 10^9 bytes."""
    memory_bandwidth_gb: float = Field(gt=0)
    """Peak bandwidth of the memory, in 10^9 bytes per second."""
    memory_efficiency: float = Field(gt=0, le=1)
    """Share of the memory's bandwidth in decoding."""
    link_gb: float = Field(gt=0)
    """Bandwidth to devices of the same machine, one direction, in 10^9 bytes per second."""
    link_latency_us: NotNegative
    """Latency of a message to a device of the same machine, in microseconds."""
    network_gb: float = Field(gt=0)
    """Bandwidth of a machine to others, one direction, in 10^9 bytes per second, which its devices share."""
    network_latency_us: NotNegative
    """Latency of a message to another machine, in microseconds."""
    collective_us: NotNegative
    """Time of a collective beside that of its messages, in microseconds."""
    host_gb: float = Field(gt=0)
    """Bandwidth between device and host memory, one direction, in 10^9 bytes per second."""
    launch_us: NotNegative
    """Time to start one kernel, in microseconds."""
    call_us: NotNegative = 0.0
    """Time of a call beside computation, in microseconds: request, fetch of rows, response."""


@dataclass(frozen=True)
class DeviceGroup:
    """The devices of one kind.

    Attributes:
        name: Name of the kind.
        table: Its rates.
        count: Number of devices.
        per_machine: Number of devices of one machine.
    """

    name: str
    table: DeviceTable
    count: int
    per_machine: int = 8

    def __hash__(self) -> int:
        return hash((self.name, self.count, self.per_machine))

    @property
    def on_gpu(self) -> bool:
        """Whether the devices have memory of their own."""
        return not self.name.startswith(CPU)

    @property
    def capacity(self) -> int:
        """Bytes of memory of one device."""
        return int(self.table.memory_gb * GB)

    def flops(self, dtype: str) -> float:
        """Returns the operations per second that matrix products of a type reach. Raises ConfigError where the table
        of the devices lacks the type."""
        if dtype not in self.table.tflops:
            raise ConfigError(f"devices {self.name}: tflops has no rate for {dtype}")
        return self.table.tflops[dtype] * 1e12 * self.table.efficiency

    @property
    def bandwidth(self) -> float:
        """Bytes per second of memory that decoding reaches."""
        return self.table.memory_bandwidth_gb * GB * self.table.memory_efficiency

    def alignment(self, count: int) -> int:
        """Returns the alignment of a pool of `count` devices: its first device is a multiple of this within a machine.
        It is the largest power of two that divides `count` and the devices of a machine, or all of a machine. Pools
        are laid out in descending order of it, so that aligned blocks never cross machines."""
        if self.count <= self.per_machine or count % self.per_machine == 0:
            return self.per_machine
        common = math.gcd(count, self.per_machine)
        return common & -common

    def within_machine(self, span: int, alignment: int) -> bool:
        """Returns whether each block of `span` consecutive ranks of a pool is on one machine."""
        return self.count <= self.per_machine or (span <= alignment and alignment % span == 0)

    def link(self, span: int, beside: int, alignment: int) -> tuple[float, float]:
        """Returns bandwidth in bytes per second and latency in seconds of a rank's messages to others of a group.

        Args:
            span: Consecutive ranks that contain the group.
            beside: Groups that communicate at the same time among the ranks of a machine, and share its network.
            alignment: Alignment of the pool.
        """
        if self.within_machine(span, alignment):
            return self.table.link_gb * GB, self.table.link_latency_us * 1e-6
        sharing = min(self.per_machine, beside)
        return self.table.network_gb * GB / sharing, self.table.network_latency_us * 1e-6


@cache
def built_in_devices() -> Mapping[str, DeviceTable]:
    """Returns the devices of `devices.toml`, by name."""
    return read_devices(Path(__file__).with_name("devices.toml"))


def read_devices(path: Path) -> dict[str, DeviceTable]:
    """Reads a table of devices, by name.

    Raises:
        ConfigError: The file cannot be read or an entry is invalid.
    """
    return {
        name: validate(DeviceTable, table if isinstance(table, dict) else {}, f"{path}, [{name}]")
        for name, table in read_toml(path).items()
    }


def device_group(
    text: str, per_machine: int = 8, more: Mapping[str, DeviceTable] | None = None
) -> DeviceGroup:
    """Parses "KIND:COUNT", for example "A100-80GB:16".

    Args:
        text: Kind and number of devices.
        per_machine: Devices of one machine.
        more: Devices beside those of `devices.toml`; one of the same name is taken in its place.

    Raises:
        ConfigError: The kind is unknown or the count is no integer of at least 1; the text lists the known kinds.
    """
    known = {**built_in_devices(), **(more or {})}
    name, _, count = text.rpartition(":")
    if name not in known:
        wrong = f"no kind {name!r}" if name else "no count"
        raise ConfigError(f"devices {text!r}: {wrong}; write KIND:COUNT; known kinds: {', '.join(known)}")
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"devices {text!r}: {count!r} is no number of devices of at least 1")
    return DeviceGroup(name, known[name], int(count), per_machine)
