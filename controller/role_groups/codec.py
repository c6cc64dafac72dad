"""Requests and responses of group calls: how the rows of a call become messages and how responses become rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.plans import Relay
from rlhf.contract import Method
from rlhf.v1 import common_pb2


class BatchCodec:
    """Messages of the methods of a role: rows as batches of references and of values that the controller holds."""

    def request(
        self,
        method: Method,
        header: common_pb2.Call,
        batch: Batch,
        numbers: np.ndarray,
        relays: Sequence[Relay],
        options: dict[str, Any],
    ) -> Any:
        """The request to the ranks of a part.

        Args:
            batch: The part's rows.
            numbers: Their numbers in the call [rows] int64.
            relays: Reads that one of the ranks makes for others.
            options: Further fields.
        """
        return method.request(call=header, batch=wire.to_proto(batch, numbers, relays), **options)

    def rows_of(self, method: Method, responses: Sequence[Any], rows: int) -> Batch:
        """The rows that the collected ranks made, end to end.

        Args:
            responses: Responses of the collected ranks, in their order.
            rows: Rows of the call.
        """
        return Batch.concat([made for each in responses if (made := wire.from_proto(each.batch)).columns])
