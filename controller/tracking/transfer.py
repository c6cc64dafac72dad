"""What the data plane moved in a step, for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable

from controller.dataflow import CallRecord
from nccl_transfer.transports import Traffic


def transfer_metrics(records: Iterable[CallRecord]) -> dict[str, float]:
    """Totals over all ranks and calls.

    Returns:
        `transfer/NAME/bytes` and `/transfers`, `time/transfer/NAME/seconds` and `/gb_per_s` of each transport that
        moved something, where seconds are added up over ranks and so the rate is that of a rank; and
        `transfer/SERVICE.METHOD/bytes` of each method whose ranks fetched something.
    """
    by_transport: dict[str, Traffic] = {}
    by_method: dict[str, int] = {}
    for record in records:
        method = f"{record.service}.{record.method}"
        for response in record.responses:
            for name, moved in response.outcome.timing.traffic.items():
                count = Traffic(moved.bytes, moved.seconds, moved.transfers)
                by_transport[name] = by_transport.get(name, Traffic()) + count
                by_method[method] = by_method.get(method, 0) + moved.bytes
    metrics = {f"transfer/{method}/bytes": float(nbytes) for method, nbytes in by_method.items()}
    for name, total in by_transport.items():
        metrics |= {
            f"transfer/{name}/bytes": float(total.bytes),
            f"time/transfer/{name}/seconds": total.seconds,
            f"transfer/{name}/transfers": float(total.transfers),
            f"time/transfer/{name}/gb_per_s": total.gb_per_s,
        }
    return metrics
