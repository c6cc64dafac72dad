"""Encodes the rows of a group call into requests, and decodes responses into rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, Column, concat_columns
from nccl_transfer.refs.plans import Relay
from rlhf.contract import Method
from rlhf.v1 import common_pb2


class BatchCodec:
    """Encodes and decodes the messages of a role's methods. Rows are sent as batches, whose columns are references to
    the ranks' memory, or values where the controller holds them."""

    def request(
        self,
        method: Method,
        header: common_pb2.Call,
        batch: Batch,
        numbers: np.ndarray,
        relays: Sequence[Relay],
        options: dict[str, Any],
    ) -> Any:
        """Makes the request to the ranks of one part of a call.

        Args:
            method: The method.
            header: Header of the call.
            batch: Rows of the part.
            numbers: Number of each of these rows in the whole call [rows] int64; see `RowDistribution.numbers`.
            relays: Reads from other hosts that one of these ranks makes on behalf of the others; see `plan_relays`.
            options: Further fields of the request, by name.

        Returns:
            A message of type `method.request`.
        """
        return method.request(call=header, batch=wire.to_proto(batch, numbers, relays), **options)

    def rows_of(self, method: Method, responses: Sequence[Any], sizes: Sequence[int]) -> Batch:
        """Concatenates the rows in the responses of a call, and returns them as one batch. Responses without columns
        are left out.

        Args:
            method: The method.
            responses: Responses of the ranks whose rows the transfer protocol collects, in its order.
            sizes: Number of rows that each of these ranks was sent; this class does not use it.
        """
        return Batch.concat([made for each in responses if (made := wire.from_proto(each.batch)).columns])

    def joined(self, name: str, chunks: Sequence[Column]) -> Column:
        """Concatenates a column of a call whose rows were sent in chunks.

        Args:
            name: Name of the column.
            chunks: What `rows_of` has made of it for each chunk, in order.
        """
        return concat_columns(chunks)
