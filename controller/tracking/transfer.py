"""Metrics of a step about the bytes that ranks fetched from each other, for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable

from controller.role_groups.dataflow import CallRecord
from controller.role_groups.residency import OFFLOAD, ONLOAD
from controller.role_groups.weights import SYNC
from nccl_transfer.transports import Traffic


def transfer_metrics(records: Iterable[CallRecord]) -> dict[str, float]:
    """Sums the traffic of calls over ranks and calls, by transport and by method.

    Returns:
        Metrics `transfer/NAME/bytes`, `time/transfer/NAME/seconds` and `time/transfer/NAME/gb_per_s`, where NAME is a
        transport, or SERVICE.METHOD of a method whose ranks fetched bytes. Seconds are summed over ranks, so that the
        rate is that of one rank. For transports also `transfer/NAME/transfers`, the number of transfers. Where arenas
        on GPUs were full, `transfer/spilled_bytes`, the bytes that went to the host instead. Where weights were moved
        to a rollout service, `transfer/weights/bytes`, `time/transfer/weights/seconds` and its gb_per_s: the bytes that
        all of its ranks got, and the time of the whole transfer. Where services were offloaded or onloaded,
        `transfer/offload/...` and `transfer/onload/...` likewise: the bytes that their ranks moved, and the time of
        these calls.
    """
    spilled = 0
    by_transport: dict[str, Traffic] = {}
    by_method: dict[str, Traffic] = {}
    for record in records:
        method = f"{record.service}.{record.method}"
        if record.method == SYNC:
            moved = Traffic(int(record.metrics["weights_bytes"]), record.metrics["weights_seconds"], 1)
            by_method["weights"] = by_method.get("weights", Traffic()) + moved
        if record.method in (OFFLOAD, ONLOAD):
            nbytes = sum(response.moved_bytes for response in record.responses)
            moved = Traffic(nbytes, record.ended_s - record.started_s, 1)
            by_method[record.method] = by_method.get(record.method, Traffic()) + moved
        for response in record.responses:
            spilled += response.outcome.timing.spilled_bytes
            for name, moved in response.outcome.timing.traffic.items():
                count = Traffic(moved.bytes, moved.seconds, moved.transfers)
                by_transport[name] = by_transport.get(name, Traffic()) + count
                by_method[method] = by_method.get(method, Traffic()) + count
    metrics = {f"transfer/{name}/transfers": float(total.transfers) for name, total in by_transport.items()}
    for name, total in (by_transport | by_method).items():
        metrics |= {
            f"transfer/{name}/bytes": float(total.bytes),
            f"time/transfer/{name}/seconds": total.seconds,
            f"time/transfer/{name}/gb_per_s": total.gb_per_s,
        }
    return metrics | ({"transfer/spilled_bytes": float(spilled)} if spilled else {})
