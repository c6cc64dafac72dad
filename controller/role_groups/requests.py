"""Makes the requests of a call: cuts its rows into parts; all ranks of a part are sent the same bytes.

Columns that the controller holds travel in the request of a part with one rank. For a part of several ranks they are
stored on the first of them, and the request refers to them there: they leave the controller once, whatever the mesh.
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
    """Part of the rows of a call, which is sent to one or more ranks.

    Attributes:
        ranks: The ranks that the part is sent to, ascending.
        places: Indices of the part's rows in the batch of the call [rows] int64.
        batch: The rows of the part.
    """

    ranks: tuple[int, ...]
    places: np.ndarray
    batch: Batch


def cut(batch: Batch, protocol: TransferProtocol, mesh: Mesh) -> list[BatchPart]:
    """Cuts a batch into parts as a transfer protocol distributes its rows over the ranks of a mesh. Ranks that get
    the same rows share a part. Parts are in the order of their first ranks."""
    keys: dict[int, bytes] = {}  # ranks of a part mostly share one array: its bytes are compared once
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
    """Returns the size, in bytes, of those columns of a batch that the controller holds."""
    return sum(column.nbytes for column in batch.columns.values() if isinstance(column, LocalColumn))


async def share_columns(
    parts: Sequence[BatchPart],
    clients: Sequence[RankClient],
    session: str,
    step: StepContext,
    timeout_s: float,
) -> list[BatchPart]:
    """Stores the columns that the controller holds, of each part with several ranks, in the arena of its first rank,
    which the other ranks read them from.

    Args:
        parts: Parts of a call.
        clients: Clients of all ranks of the group, in rank order.
        session: Name of the session that the rows belong to.
        step: Step that the rows are freed with, and that counts the bytes.
        timeout_s: Timeout of each Put, in seconds.

    Returns:
        The parts, in order; in those with several ranks all columns are references.

    Raises:
        RlhfError: A rank cannot store the rows; the text has the cause.
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
    """Makes the serialized request of every rank, in rank order; ranks of one part share one bytes object.

    Args:
        parts: Parts that together have every rank once.
        ranks: Endpoints of the group's ranks, in rank order.
        encode: Function that makes the message of a part from the part and the relays of its ranks.
    """
    requests = [b""] * len(ranks)
    for part in parts:
        message = encode(part, plan_relays(part.batch, [ranks[rank] for rank in part.ranks]))
        request = message.SerializeToString()
        for rank in part.ranks:
            requests[rank] = request
    return requests
