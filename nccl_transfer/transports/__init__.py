"""Transports, each of which reads bytes from the arena of one rank into another process.
`nccl_transfer.fetch.Fetcher` chooses one for each source; docs/transports.md describes them."""

from __future__ import annotations

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.transports.base import Reading, Traffic, Transport
from nccl_transfer.transports.byte_server import ByteServer
from nccl_transfer.transports.grpc_stream import (
    GrpcTransport,
    mark_corrupt_response,
    serve_fetch,
    stat_response,
    traffic_to_proto,
)
from nccl_transfer.transports.memfd import ArenaServer, MemfdTransport, host_id
from nccl_transfer.transports.tcp import TcpTransport

__all__ = [
    "ArenaServer",
    "ByteRange",
    "ByteServer",
    "GrpcTransport",
    "MemfdTransport",
    "Reading",
    "TcpTransport",
    "Traffic",
    "Transport",
    "host_id",
    "mark_corrupt_response",
    "serve_fetch",
    "stat_response",
    "traffic_to_proto",
]
