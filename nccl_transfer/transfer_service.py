"""Responses of TransferService that belong to no transport."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Traffic
from nccl_transfer.transports.common import check_epoch
from rlhf.errors import one_line
from rlhf.v1 import common_pb2
from rlhf.v1 import transfer_pb2 as pb


def mark_corrupt_response(store: TensorStore, request: pb.MarkCorruptRequest) -> pb.MarkCorruptResponse:
    """Handles the MarkCorrupt RPC: marks a shard of the store, and logs the reader's reason. `found` of the response is
    False if the shard was released before.

    Raises:
        Refused: The request is for another epoch of the service.
    """
    check_epoch(store, request.epoch)
    logging.warning("shard %d is marked bad: %s", request.shard, one_line(request.reason))
    return pb.MarkCorruptResponse(found=store.mark_corrupt(request.shard))


def stat_response(
    store: TensorStore,
    traffic: Mapping[str, Traffic],
    unavailable: Mapping[str, str] | None = None,
    failures: Mapping[str, str] | None = None,
) -> pb.StatResponse:
    """Builds the response of the Stat RPC.

    Args:
        store: Store of this rank.
        traffic: Traffic by transport, from `Fetcher.traffic`.
        unavailable: Reasons by transport, from `registry.unavailable`. Default: none.
        failures: Reasons by transport, from `Fetcher.failures`. Default: none.
    """
    stat = store.stat()
    return pb.StatResponse(
        arena_bytes=stat.arena_bytes,
        used_bytes=stat.used_bytes,
        peak_bytes=stat.peak_bytes,
        shards=stat.shards,
        traffic=traffic_to_proto(traffic),
        unavailable_transports=unavailable or {},
        device_arena_bytes=stat.device_arena_bytes,
        device_used_bytes=stat.device_used_bytes,
        spilled_bytes=stat.spilled_bytes,
        host_copied_bytes=stat.host_copied_bytes,
        failed_transports=failures or {},
    )


def traffic_to_proto(traffic: Mapping[str, Traffic]) -> dict[str, common_pb2.Traffic]:
    """Encodes traffic by transport as protobuf messages."""
    return {
        name: common_pb2.Traffic(bytes=moved.bytes, seconds=moved.seconds, transfers=moved.transfers)
        for name, moved in traffic.items()
    }
