"""A read into memory of this process's GPU, as the clients of the GPU transports pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports.base import DeviceMemory


@dataclass(frozen=True, eq=False)
class DeviceRead:
    """The arguments of `Reader.receive`, which describes them."""

    source: Endpoint
    ranges: Sequence[ByteRange]
    memory: DeviceMemory
    offsets: Sequence[int]
    deadline: float
