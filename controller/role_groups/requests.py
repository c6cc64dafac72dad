"""The requests of a call: its rows are cut into parts, and all ranks of a part get the same bytes.

Columns that the controller holds travel in the request to a rank that needs them alone. Where several ranks need them,
one of the ranks stores them, and the request refers to them there: they leave the controller once, whatever the mesh.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from client.rank import RankClient
from client.session import StepContext
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.plans import Relay, plan_relays
from nccl_transfer.refs.protocols import TransferProtocol
from nccl_transfer.refs.shards import Endpoint
from rlhf.v1 import transfer_pb2


@dataclass(frozen=True, eq=False)
class BatchPart:
    """Rows of a call that some of its ranks need alike.

    Attributes:
        ranks: These ranks, in order.
        places: Where the rows are in the batch of the call, [rows] int64.
        batch: The rows.
    """

    ranks: tuple[int, ...]
    places: np.ndarray
    batch: Batch


def cut(batch: Batch, protocol: TransferProtocol, mesh: Mesh) -> list[BatchPart]:
    """The parts into which a transfer protocol cuts a batch, each once, in the order of their first ranks."""
    keys: dict[int, bytes] = {}  # ranks of a part mostly share one array, which need not be compared
    ranks: dict[bytes, list[int]] = {}
    places: dict[bytes, np.ndarray] = {}
    dealt = protocol.distribute(batch.rows, mesh)
    for rank, rows in enumerate(dealt):
        if id(rows) not in keys:
            keys[id(rows)] = rows.tobytes()
        key = keys[id(rows)]
        places.setdefault(key, rows)
        ranks.setdefault(key, []).append(rank)
    return [BatchPart(tuple(ranks[key]), rows, batch.take(rows)) for key, rows in places.items()]


def local_bytes(batch: Batch) -> int:
    """Bytes of the columns that the controller holds."""
    return sum(column.nbytes for column in batch.columns.values() if isinstance(column, LocalColumn))


async def share_columns(
    parts: Sequence[BatchPart],
    clients: Sequence[RankClient],
    session: str,
    step: StepContext,
    timeout_s: float,
) -> list[BatchPart]:
    """Stores the controller's columns of each part of several ranks in the arena of the first of them.

    Args:
        parts: Parts of a call.
        clients: Of all ranks of the group; they serve Dispatch.
        session: Session that the rows are kept for.
        step: Step with which they are freed, and which counts the bytes.
        timeout_s: Longest time for all.

    Returns:
        The parts, those of several ranks with all columns by reference.

    Raises:
        RlhfError: A rank cannot store them; the text says why.
    """

    async def share(part: BatchPart) -> BatchPart:
        local = [name for name, column in part.batch.columns.items() if isinstance(column, LocalColumn)]
        if len(part.ranks) == 1 or not local or not part.batch.rows:
            return part
        batch = part.batch.select(local)
        step.count_bytes(local_bytes(batch))
        request = transfer_pb2.PutRequest(session=session, step=step.number, batch=wire.to_proto(batch))
        answer = await clients[part.ranks[0]].put(request, timeout_s)
        return replace(part, batch=part.batch | wire.from_proto(answer.batch))

    return await asyncio.gather(*map(share, parts))


def serialized(
    parts: Sequence[BatchPart], ranks: Sequence[Endpoint], encode: Callable[[BatchPart, Sequence[Relay]], Any]
) -> list[bytes]:
    """The request of every rank; those of the ranks of a part are one and the same object.

    Args:
        parts: Parts that together have every rank once.
        ranks: Where the ranks of the group serve.
        encode: Makes the message of a part; the relays are of its ranks.
    """
    requests = [b""] * len(ranks)
    for part in parts:
        message = encode(part, plan_relays(part.batch, [ranks[rank] for rank in part.ranks]))
        request = message.SerializeToString()
        for rank in part.ranks:
            requests[rank] = request
    return requests
