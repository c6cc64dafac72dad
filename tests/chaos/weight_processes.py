"""Processes that hold and read weights, for test_weight_deaths.py: forked from a server that has imported torch."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from contract.weight_source import WeightSource, fetcher_by
from nccl_transfer.process_memory import ProcessMemory
from nccl_transfer.refs.wire_ranks import endpoint_to_proto
from nccl_transfer.refs.wire_weights import transfer_from_proto
from rlhf.errors import RlhfError
from rlhf.v1 import weights_pb2
from services.storage.checkpoint import WeightShard
from services.weights.receive import receive

SIZE = 64
"""Rows of the tensor, which has SIZE columns too."""


def tensor() -> torch.Tensor:
    return torch.randn((SIZE, SIZE), generator=torch.Generator().manual_seed(1))


def read(
    message: bytes, receiver: int, pause_s: float, within_s: float, in_place: bool, parent: Connection
) -> None:
    """Reads all weights of a transfer, with a pause after each piece, where they lie or packed; sends "done", or the
    error's name and text, and waits for its end."""
    if not in_place:
        ProcessMemory.why_not = lambda memory: "not permitted"  # type: ignore[method-assign]
    fetcher = fetcher_by(["memfd"])
    transfer = transfer_from_proto(weights_pb2.WeightTransfer.FromString(message))
    parent.send("ready")
    try:
        for piece, values in receive(transfer, receiver, fetcher, time.monotonic() + within_s):
            found = torch.empty(piece.box.shape)
            values.copy_to(found)
            values.wait()
            assert torch.equal(found, tensor()[tuple(map(slice, piece.box.starts, piece.box.stops))])
            time.sleep(pause_s)
        assert fetcher.traffic().keys() == {"in_place" if in_place else "memfd"}
        parent.send("done")
    except RlhfError as error:
        parent.send(f"{type(error).__name__}: {error}")
    parent.poll(None)


def hold(parent: Connection) -> None:
    """Sends its endpoint, and then the weights of a transfer that it is told."""
    source = WeightSource([("weight", WeightShard.of_whole(tensor()))])
    parent.send(endpoint_to_proto(source.endpoint).SerializeToString())
    transfer = transfer_from_proto(weights_pb2.WeightTransfer.FromString(parent.recv()))
    source.send(transfer)[0].result(60)
    parent.recv()
