"""The columns that PPO trains on, dealt to ranks that read every byte: by DP_PROTO, and by verl over Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch
import uvloop

from benchmarks.processes import TIMEOUT_S, ask, in_turns, process, receive, timed
from controller.role_groups.loop import Loop
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.registry import create_readers
from nccl_transfer.rows import FetchedRows
from nccl_transfer.transports import host_id
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.v1 import common_pb2

TURNS = 3
SEQUENCES, TOKENS = 512, 512
TOKEN_COLUMNS = {"ids": "int64", "log_probs": "float32", "ref_log_probs": "float32", "values": "float32",
                 "advantages": "float32"}  # fmt: skip
"""24 bytes a token, 6.3 MB in all."""

OURS, WRITABLE = "rlhf-cluster, DP_PROTO", "rlhf-cluster, DP_PROTO, writable rows"
VERL = "verl, DP_COMPUTE_PROTO over Ray"
_TAKE = "/benchmark.Ranks/Take"


@dataclass(frozen=True)
class Dealt:
    """Median time, in seconds, until all ranks have read their rows of the batch and answered."""

    way: str
    ranks: int
    rounds: int
    median_s: float
    best_s: float


def ppo_columns() -> dict[str, Jagged[np.ndarray]]:
    """Jagged columns of 512 responses of 512 tokens, as verl's padded tensors hold."""
    rng, lengths = np.random.default_rng(0), np.full(SEQUENCES, TOKENS, np.int64)
    return {
        name: Jagged(rng.integers(0, 100, lengths.sum()).astype(dtype), lengths)
        for name, dtype in TOKEN_COLUMNS.items()
    }


class Reader:
    """A rank that fetches its rows and reads every byte of them, for each message of a stream.

    Args:
        writable: Whether it asks for rows it may write to, as ranks do that compute with tensors.
    """

    def __init__(self, writable: bool) -> None:
        self.fetcher = Fetcher(host_id(), create_readers(["memfd"]))
        self.writable = writable

    async def take(self, requests: Any, context: Any) -> None:
        loop = asyncio.get_running_loop()
        while isinstance(request := await context.read(), bytes):
            await context.write(await loop.run_in_executor(None, self._take, request))

    def _take(self, request: bytes) -> bytes:
        batch = from_proto(common_pb2.Batch.FromString(request))
        rows = self.fetcher.fetch(batch, time.monotonic() + TIMEOUT_S, writable=self.writable)
        total = sum(float(flat(rows, name).sum()) for name in TOKEN_COLUMNS)
        rows.verify()
        return str(total).encode()


def flat(rows: FetchedRows, name: str) -> np.ndarray:
    """All entries of a column."""
    values = rows[name]
    return values.values if isinstance(values, Jagged) else np.asarray(values)


def run_reader(writable: bool, parent: Connection) -> None:
    """Body of a process: a reader behind a gRPC server."""

    async def serve() -> None:
        server, reader = (
            grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))),
            Reader(writable),
        )
        handler = grpc.stream_stream_rpc_method_handler(reader.take)
        service, method = _TAKE[1:].split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        parent.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(parent.recv)
        await server.stop(None)
        reader.fetcher.close()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve())


@contextmanager
def our_ranks(message: bytes, ranks: int, writable: bool) -> Iterator[Callable[[], object]]:
    """Yields a call that deals the batch to `ranks` ranks: distribute, one request each, and their answers."""
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(process(run_reader, writable)) for _ in range(ranks)]
        addresses = [receive(pipe) for pipe in pipes]
        loop = stack.enter_context(contextlib.closing(Loop()))

        async def connect() -> tuple[list[grpc.aio.Channel], list[Any]]:
            channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address in addresses]
            return channels, [channel.stream_stream(_TAKE)() for channel in channels]

        channels, streams = loop.run(connect(), TIMEOUT_S)
        batch = from_proto(common_pb2.Batch.FromString(message))
        protocol, mesh = get_protocol("DP_PROTO"), Mesh(data=ranks)

        async def ask(stream: Any, part: np.ndarray) -> bytes:
            await stream.write(to_proto(batch.take(part), part).SerializeToString())
            return await stream.read()

        async def fan_out() -> None:
            parts = protocol.distribute(batch.rows, mesh)
            await asyncio.gather(*(ask(stream, part) for stream, part in zip(streams, parts, strict=True)))

        yield lambda: loop.run(fan_out(), TIMEOUT_S)
        for channel in channels:
            loop.run(channel.close(), TIMEOUT_S)


@contextmanager
def verl_ranks(ranks: int) -> Iterator[Callable[[], object]]:
    """The same with verl's worker group over Ray: the driver holds the batch, workers read every byte."""
    import ray  # type: ignore[import-not-found]
    from verl import DataProto  # type: ignore[import-not-found]
    from verl.single_controller.base import Worker  # type: ignore[import-not-found]
    from verl.single_controller.base.decorator import Dispatch, register  # type: ignore[import-not-found]
    from verl.single_controller.ray import (  # type: ignore[import-not-found]
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
    )

    class Taker(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def take(self, data):  # type: ignore[no-untyped-def]
            total = sum(float(column.sum()) for column in data.batch.values())
            return type(data).from_single_dict({"total": torch.full((len(data),), total)})

    columns = {
        name: torch.from_numpy(column.values.reshape(SEQUENCES, TOKENS))
        for name, column in ppo_columns().items()
    }
    data = DataProto.from_single_dict(columns)
    environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    # A worker of verl's pool asks for ten CPUs on paper, so that ten roles can share it.
    ray.init(
        num_cpus=10 * ranks, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        runtime_env=environment,
    )  # fmt: skip
    try:
        group = RayWorkerGroup(
            RayResourcePool([ranks], use_gpu=False), RayClassWithInitArgs(ray.remote(Taker))
        )
        yield lambda: group.take(data)
    finally:
        ray.shutdown()


def run_verl(ranks: int, parent: Connection) -> None:
    """Body of a process with Ray and verl."""
    with verl_ranks(ranks) as call, contextlib.suppress(KeyboardInterrupt, EOFError):
        parent.send("ready")
        while True:
            parent.recv()
            started = time.perf_counter()
            call()
            parent.send(time.perf_counter() - started)


def measure_batch(producer: Connection, ranks: int, rounds: int, with_verl: bool) -> list[Dealt]:
    """The cluster and verl in turns of some rounds. Each starts for its turn and ends with it, because idle processes
    of the other would slow it down."""
    message = ask(producer, "put_batch")
    ways: dict[str, Callable[[int], list[float]]] = {
        OURS: lambda count: _ours(message, ranks, count, writable=False),
        WRITABLE: lambda count: _ours(message, ranks, count, writable=True),
    }
    if with_verl:
        ways[VERL] = lambda count: _verl(ranks, count)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS):
        for way, measure in ways.items():
            seconds[way] += measure(len(range(turn, rounds, TURNS)))
    return [Dealt(way, ranks, rounds, statistics.median(each), min(each)) for way, each in seconds.items()]


def _ours(message: bytes, ranks: int, rounds: int, writable: bool) -> list[float]:
    with our_ranks(message, ranks, writable) as call:
        return in_turns({OURS: timed(call)}, rounds)[OURS]


def _verl(ranks: int, rounds: int) -> list[float]:
    with process(run_verl, ranks) as verl:
        receive(verl)
        return [ask(verl) for _ in range(-2, rounds)][2:]
