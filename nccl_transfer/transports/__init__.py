"""Transports, each of which moves bytes from the arena of one rank into another process.
`nccl_transfer.fetch.Fetcher` chooses one for each source; docs/transports.md describes them."""

from __future__ import annotations

from nccl_transfer.transports.base import Reader, Reading, Traffic
from nccl_transfer.transports.grpc_stream import GrpcReader, serve_fetch
from nccl_transfer.transports.host import host_id
from nccl_transfer.transports.memfd import MemfdReader
from nccl_transfer.transports.memfd_source import MemfdSource
from nccl_transfer.transports.tcp import TcpReader
from nccl_transfer.transports.tcp_source import TcpSource

__all__ = [
    "GrpcReader",
    "MemfdReader",
    "MemfdSource",
    "Reader",
    "Reading",
    "TcpReader",
    "TcpSource",
    "Traffic",
    "host_id",
    "serve_fetch",
]
