"""Transports, each of which moves bytes from the arena of one rank into another process.
`nccl_transfer.registry` knows them by name, `nccl_transfer.fetch.Fetcher` chooses one for each source;
docs/transports.md describes them."""

from __future__ import annotations

from nccl_transfer.transports.base import Reader, Reading, Source, Traffic, Transport
from nccl_transfer.transports.host import host_id

__all__ = ["Reader", "Reading", "Source", "Traffic", "Transport", "host_id"]
