"""Builds response messages: stores the rows of a result, and puts references to them and all other values into the
message."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Space
from nccl_transfer.store.store import Lease, TensorStore
from rlhf.contract import Method
from rlhf.v1 import common_pb2
from services.runtime.worker import CallResult, Worker


class ResponseEncoder:
    """Builds response messages of calls. Thread-safe.

    Args:
        worker: Worker of the rank.
        store: Store that keeps the rows.
    """

    def __init__(self, worker: Worker, store: TensorStore) -> None:
        self._worker = worker
        self._store = store

    def stores(self, method: Method, result: CallResult) -> bool:
        """Returns whether this rank's rows of a result are stored: it has some, and the method's transfer protocol
        collects them from this rank."""
        protocol = get_protocol(method.spec.transfer_protocol)  # type: ignore[union-attr]
        ranks = self._worker.ranks
        return bool(result.columns) and ranks.rank in protocol.collect(ranks.mesh)

    def encode(
        self, method: Method, call: common_pb2.Call, timing: common_pb2.Timing, result: CallResult
    ) -> Any:
        """Returns the response message of a call. Where `stores` is true, the rows of the result are stored and the
        message refers to them, with columns of text in full; elsewhere the message has no rows.

        Args:
            method: Method of the call.
            call: Header of the call.
            timing: Timing of the call so far; its `store_s` and, where rows are stored, `stored_bytes` and
                `spilled_bytes` are set.
            result: Result of the method.

        Raises:
            OutOfSpace: The rows do not fit into the store's arena.
            Refused: The call's session has ended, so its rows are not kept.
        """
        started = time.monotonic()
        response = method.response(**result.fields)
        if self.stores(method, result):
            lease = Lease(call.session, call.step)
            columns: dict[str, RemoteColumn | LocalColumn] = {}
            for name, values in result.columns.items():
                columns[name], spilled = self._put(values, lease)
                timing.spilled_bytes += spilled
            batch = Batch(next(iter(columns.values())).rows, columns)
            response.batch.CopyFrom(wire.to_proto(batch))
            timing.stored_bytes = sum(c.nbytes for c in columns.values() if isinstance(c, RemoteColumn))
        timing.store_s = time.monotonic() - started
        response.outcome.timing.CopyFrom(timing)
        response.outcome.policy_version = self._worker.policy_version
        response.outcome.state_id = self._worker.state_id
        for name, (total, count) in result.metrics.items():
            response.outcome.metrics[name].sum, response.outcome.metrics[name].count = total, count
        return response

    def _put(self, values: Any, lease: Lease) -> tuple[RemoteColumn | LocalColumn, int]:
        """Stores the values of one column, where they are, and returns a reference to them, and the bytes that went
        from the GPU to the host because its arena was full. Lists of strings are returned as they are, for the message
        itself."""
        if isinstance(values, list):
            return LocalColumn(values), 0
        array = values.values if isinstance(values, Jagged) else values
        if isinstance(array, np.ndarray):
            return self._store.put_column(values, str(array.dtype), lease), 0
        device = self._store.device
        if device is not None and device.tensors.holds(array):
            column = device.put_column(values, lease)
            return column, column.nbytes if column.shards[0].space is Space.HOST else 0
        # Imports torch, which services without tensors do without.
        from nccl_transfer.store.tensors import to_numpy_carrier

        carrier, dtype = to_numpy_carrier(values)
        return self._store.put_column(carrier, dtype, lease), 0
