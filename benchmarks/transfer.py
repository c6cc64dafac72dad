"""How fast rows reach another process, each way beside its anchor, in turns within one run.

- Hand-off: one column over memfd on one host, from the tensor that a forward pass left to a reader that has
  touched every page; put, plan, attach and first touch apart. Beside a warm memcpy into memory of the same kind.
  Readers keep arenas mapped; where they ask for rows they may write to, pages are faulted in anew: printed apart too.
- Stream: one column over tcp on loopback, beside a raw socket that sends as many bytes.
- Batch: the columns that PPO trains on, 6.3 MB, by DP_PROTO to 1, 4 and 8 ranks that read every byte, beside verl's
  DP_COMPUTE_PROTO over Ray where both are installed.
- cuda_ipc: one column into the reader's device memory, on one GPU, beside a device-to-device copy: see
  `benchmarks.transfer_gpu`.
"""

# ruff: noqa: E402 - gRPC is told how to wait before it is imported

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()  # as ranks do, also in the processes started from here

import grpc
import grpc.aio
import numpy as np
import torch
import uvloop
from rich.table import Table

from benchmarks.processes import TIMEOUT_S, ask, in_turns, process, receive, timed
from benchmarks.report import circumstances, console, json_option, write_json
from benchmarks.transfer_gpu import DeviceTransfer, measure_cuda_ipc
from controller.role_groups.loop import Loop
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.registry import create_transports
from nccl_transfer.rows import FetchedRows
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.store.tensors import to_numpy_carrier
from nccl_transfer.transports import ArenaServer, ByteServer, host_id
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport
from nccl_transfer.transports.gpu.device import own_cuda
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.v1 import common_pb2

MIB = 1 << 20
HAND_OFFS = (64 * MIB, 256 * MIB, 1024 * MIB)
STREAMS = (64 * MIB, 256 * MIB)
DEVICES = (64 * MIB, 256 * MIB, 1024 * MIB)
RANKS = (1, 4, 8)
TURNS = 3
PARTS = ("hand-off", "stream", "batch", "cuda_ipc")
MOST_ATTACH_S, LEAST_OF_MEMCPY, LEAST_OF_SOCKET, LEAST_OF_VERL, LEAST_OF_COPY = 0.005, 0.8, 0.7, 8.0, 0.8

HAND_OFF_PARTS = ("put", "plan", "attach", "first touch", "writable attach", "writable first touch", "memcpy")

SEQUENCES, TOKENS = 512, 512
TOKEN_COLUMNS = {"ids": "int64", "log_probs": "float32", "ref_log_probs": "float32", "values": "float32",
                 "advantages": "float32"}  # fmt: skip
"""24 bytes a token, 6.3 MB in all."""

OURS, WRITABLE = "rlhf-cluster, DP_PROTO", "rlhf-cluster, DP_PROTO, writable rows"
VERL = "verl, DP_COMPUTE_PROTO over Ray"
_TAKE = "/benchmark.Ranks/Take"


@dataclass(frozen=True)
class HandOff:
    """Medians over rounds, in seconds, of the steps of one hand-off.

    Attributes:
        put_s: The tensor's bytes into the arena: the one copy on the way.
        plan_s: References to a message and back.
        attach_s: Until the reader has views of the rows.
        first_touch_s: A byte of every page of this hand-off's views, the first time. The reader has read earlier
            hand-offs from the same pages of the arena.
        writable_attach_s, writable_first_touch_s: The same for views that may be written to.
        total_s: Put, plan, attach and first touch.
        writable_total_s: The same with writable views.
        memcpy_s: A warm copy of as many bytes into a memfd.
    """

    nbytes: int
    rounds: int
    put_s: float
    plan_s: float
    attach_s: float
    first_touch_s: float
    writable_attach_s: float
    writable_first_touch_s: float
    total_s: float
    writable_total_s: float
    memcpy_s: float

    @property
    def put_of_memcpy(self) -> float:
        """Rate of the put over that of the memcpy."""
        return self.memcpy_s / self.put_s


@dataclass(frozen=True)
class Stream:
    """Medians over rounds, in seconds, of moving so many bytes to another process on loopback."""

    nbytes: int
    rounds: int
    tcp_s: float
    socket_s: float

    @property
    def of_socket(self) -> float:
        """Rate over that of the raw socket."""
        return self.socket_s / self.tcp_s


@dataclass(frozen=True)
class Dealt:
    """Median time, in seconds, until all ranks have read their rows of the batch and answered."""

    way: str
    ranks: int
    rounds: int
    median_s: float
    best_s: float


class Producer:
    """A process that holds tensors, puts them into its arena when told, and serves them."""

    def __init__(self, arena_bytes: int) -> None:
        self.store = TensorStore(arena_bytes)
        self.arena_server = ArenaServer(self.store)
        self.byte_server = ByteServer(self.store, "127.0.0.1")
        self.store.endpoint = Endpoint(
            "127.0.0.1:0",
            host_id(),
            self.arena_server.name,
            1,
            "producer",
            0,
            data_port=self.byte_server.port,
            data_key=self.byte_server.key,
        )
        self.steps = 0
        self.tensor = torch.empty(0)
        self.target = np.empty(0, np.float32)

    def make(self, nbytes: int) -> float:
        """A tensor of so many bytes, and a memfd to copy it to whose pages are there."""
        self.tensor = torch.arange(nbytes // 4, dtype=torch.float32).reshape(64, -1)
        fd = os.memfd_create("benchmark")
        os.posix_fallocate(fd, 0, nbytes)
        self.target = np.frombuffer(mmap.mmap(fd, nbytes), np.float32).reshape(64, -1)
        os.close(fd)
        return self.memcpy()

    def memcpy(self) -> float:
        """Seconds of a plain copy of the tensor into memory of the arena's kind."""
        started = time.perf_counter()
        np.copyto(self.target, self.tensor.numpy())
        return time.perf_counter() - started

    def put(self) -> tuple[float, float, bytes]:
        """Seconds of the put and of the message, and the message."""
        self.store.release("benchmark")
        self.steps += 1
        started = time.perf_counter()
        array, dtype = to_numpy_carrier(self.tensor)
        column = self.store.put_column(array, dtype, Lease("benchmark", self.steps))
        put = time.perf_counter()
        message = to_proto(Batch(column.rows, {"x": column})).SerializeToString()
        return put - started, time.perf_counter() - put, message

    def put_batch(self) -> bytes:
        """The batch of PPO, as a message."""
        self.store.release("benchmark")
        columns = {
            name: self.store.put_column(values, TOKEN_COLUMNS[name], Lease("benchmark", 1))
            for name, values in ppo_columns().items()
        }
        return to_proto(Batch(SEQUENCES, columns)).SerializeToString()

    def close(self) -> None:
        self.byte_server.close()
        self.arena_server.close()
        self.store.close()


def ppo_columns() -> dict[str, Jagged[np.ndarray]]:
    """Jagged columns of 512 responses of 512 tokens, as verl's padded tensors hold."""
    rng, lengths = np.random.default_rng(0), np.full(SEQUENCES, TOKENS, np.int64)
    return {
        name: Jagged(rng.integers(0, 100, lengths.sum()).astype(dtype), lengths)
        for name, dtype in TOKEN_COLUMNS.items()
    }


def run_producer(arena_bytes: int, parent: Connection) -> None:
    """A process: does what it is told until the other end of the pipe closes."""
    producer = Producer(arena_bytes)
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        while True:
            method, *arguments = parent.recv()
            parent.send(getattr(producer, method)(*arguments))
    producer.close()


def run_socket(nbytes: int, parent: Connection) -> None:
    """A process that sends so many bytes to a client each time it receives a byte."""
    source = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection, contextlib.suppress(KeyboardInterrupt, ConnectionError):
            while connection.recv(1):
                connection.sendall(source)


class Reader:
    """A rank that fetches its rows and reads every byte of them, for each message of a stream, as ranks get calls.

    Args:
        writable: Whether it asks for rows it may write to, as ranks do that compute with tensors.
    """

    def __init__(self, writable: bool) -> None:
        self.fetcher = Fetcher(host_id(), create_transports(["memfd"]))
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
    """A process: a reader behind a gRPC server."""

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


def measure_hand_off(producer: Connection, nbytes: int, rounds: int) -> HandOff:
    """From the tensor in the producer to every page read here."""
    ask(producer, "make", nbytes)
    fetcher = Fetcher(host_id(), create_transports(["memfd"]))
    taken: dict[str, list[float]] = {name: [] for name in HAND_OFF_PARTS}
    for number in range(rounds + 1):
        put_s, encode_s, message = ask(producer, "put")
        started = time.perf_counter()
        batch = from_proto(common_pb2.Batch.FromString(message))
        planned = time.perf_counter()
        # The second finds in the caches what the first has read: they take turns at being first.
        reads = {writable: read(fetcher, batch, writable) for writable in (number % 2 == 0, number % 2 == 1)}
        seconds = (put_s, encode_s + planned - started, *reads[False], *reads[True], ask(producer, "memcpy"))
        if number:  # the first round faults the arena's pages in
            for name, part in zip(HAND_OFF_PARTS, seconds, strict=True):
                taken[name].append(part)
    fetcher.close()
    put_s, plan_s, attach_s, touch_s, writable_attach_s, writable_touch_s, memcpy_s = (
        statistics.median(taken[name]) for name in HAND_OFF_PARTS
    )
    total, writable_total = (
        put_s + plan_s + part for part in (attach_s + touch_s, writable_attach_s + writable_touch_s)
    )
    return HandOff(nbytes, rounds, put_s, plan_s, attach_s, touch_s, writable_attach_s, writable_touch_s, total,
                   writable_total, memcpy_s)  # fmt: skip


def read(fetcher: Fetcher, batch: Batch, writable: bool) -> tuple[float, float]:
    """Seconds until there are views, and until a byte of every page was read."""
    started = time.perf_counter()
    rows = fetcher.fetch(batch, time.monotonic() + TIMEOUT_S, writable=writable)
    attached = time.perf_counter()
    touch(rows)
    touched = time.perf_counter()
    rows.verify()
    return attached - started, touched - attached


def touch(rows: FetchedRows) -> int:
    """Reads a byte of every page."""
    values = rows["x"]
    assert isinstance(values, np.ndarray)
    return int(values.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].sum())


def measure_stream(producer: Connection, nbytes: int, rounds: int) -> Stream:
    """The same bytes through the tcp transport and through a raw socket, into fresh memory."""
    ask(producer, "make", nbytes)
    _, _, message = ask(producer, "put")
    batch = from_proto(common_pb2.Batch.FromString(message))
    fetcher = Fetcher(host_id(), create_transports(["tcp"]))
    with (
        process(run_socket, nbytes) as sender,
        socket.create_connection(("127.0.0.1", receive(sender)), TIMEOUT_S) as connection,
    ):

        def raw() -> None:
            target, filled = np.empty(nbytes, np.uint8).data, 0
            connection.send(b"g")
            while filled < nbytes:
                filled += connection.recv_into(target[filled:])

        def tcp() -> None:
            fetcher.fetch(batch, time.monotonic() + TIMEOUT_S)

        seconds = in_turns({"tcp": timed(tcp), "socket": timed(raw)}, rounds)
    fetcher.close()
    return Stream(nbytes, rounds, statistics.median(seconds["tcp"]), statistics.median(seconds["socket"]))


@contextmanager
def our_ranks(message: bytes, ranks: int, writable: bool) -> Iterator[Callable[[], object]]:
    """A call that deals the batch to so many ranks: distribute, one request each, and their answers."""
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
    """A process: Ray and verl, apart from everything of ours."""
    with verl_ranks(ranks) as call, contextlib.suppress(KeyboardInterrupt, EOFError):
        parent.send("ready")
        while True:
            parent.recv()
            started = time.perf_counter()
            call()
            parent.send(time.perf_counter() - started)


def measure_batch(producer: Connection, ranks: int, rounds: int, with_verl: bool) -> list[Dealt]:
    """Ours and verl's in turns of some rounds. Each has the machine to itself: it starts for its turn and ends with it,
    because processes of the other that only wait would slow it down."""
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


def size(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def gb_per_s(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}"


def show(
    hand_offs: list[HandOff], streams: list[Stream], dealt: list[Dealt], devices: list[DeviceTransfer]
) -> None:
    """The tables of what was measured, and what came of the aims."""
    if hand_offs:
        console().print(hand_off_table(hand_offs))
    if streams:
        console().print(stream_table(streams))
    if dealt:
        console().print(dealt_table(dealt))
    if devices:
        console().print(device_table(devices))
    for line in aims(hand_offs, streams, dealt, devices):
        console().print(line)


def hand_off_table(hand_offs: list[HandOff]) -> Table:
    table = Table(title="Hand-off over memfd on one host, milliseconds")
    for name in (
        "size",
        "put",
        "plan",
        "attach",
        "first touch",
        "total",
        "memcpy",
        "put / memcpy",
        "writable: attach",
        "first touch",
        "total",
    ):
        table.add_column(name, justify="right")
    for h in hand_offs:
        times = (h.put_s, h.plan_s, h.attach_s, h.first_touch_s, h.total_s, h.memcpy_s)
        writable = (h.writable_attach_s, h.writable_first_touch_s, h.writable_total_s)
        table.add_row(size(h.nbytes), *map(ms, times), f"{h.put_of_memcpy:.2f}", *map(ms, writable))
    return table


def stream_table(streams: list[Stream]) -> Table:
    table = Table(title="Stream over tcp on loopback, milliseconds")
    for name in ("size", "tcp", "GB/s", "raw socket", "rate / raw socket"):
        table.add_column(name, justify="right")
    for s in streams:
        table.add_row(
            size(s.nbytes), ms(s.tcp_s), gb_per_s(s.nbytes, s.tcp_s), ms(s.socket_s), f"{s.of_socket:.2f}"
        )
    return table


def dealt_table(dealt: list[Dealt]) -> Table:
    table = Table(title="6.3 MB batch to all ranks, milliseconds")
    for name in ("ranks", "way", "median", "best"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for d in dealt:
        table.add_row(str(d.ranks), d.way, ms(d.median_s), ms(d.best_s))
    return table


def device_table(devices: list[DeviceTransfer]) -> Table:
    table = Table(title="cuda_ipc on one GPU, from host memory, milliseconds")
    for name in (
        "size",
        "receive",
        "GB/s",
        "staging",
        "out of the slots",
        "allocation",
        "copy on the device",
        "rate / copy",
        "out of the slots / copy",
    ):
        table.add_column(name, justify="right")
    for d in devices:
        parts = (d.staging_s, d.slots_s, d.allocation_s, d.copy_s)
        table.add_row(
            size(d.nbytes), ms(d.receive_s), gb_per_s(d.nbytes, d.receive_s), *map(ms, parts),
            f"{d.of_copy:.2f}", f"{d.slots_of_copy:.2f}",
        )  # fmt: skip
    return table


def aims(
    hand_offs: list[HandOff], streams: list[Stream], dealt: list[Dealt], devices: list[DeviceTransfer]
) -> list[str]:
    """The aims, and whether each was met."""

    def line(what: str, figure: str, met: bool) -> str:
        return f"{what}: {figure}: {'met' if met else 'missed'}"

    lines = []
    if hand_offs:
        attach = max(max(h.attach_s, h.writable_attach_s) for h in hand_offs)
        copy = min(h.put_of_memcpy for h in hand_offs)
        lines.append(line("attach under 5 ms at any size", f"{ms(attach)} ms", attach < MOST_ATTACH_S))
        lines.append(line("put at least 0.8 of memcpy", f"{copy:.2f}", copy >= LEAST_OF_MEMCPY))
    if streams:
        rate = min(s.of_socket for s in streams)
        lines.append(line("tcp at least 0.7 of a raw socket", f"{rate:.2f}", rate >= LEAST_OF_SOCKET))
    verl = {d.ranks: d.median_s for d in dealt if d.way == VERL}
    for d in dealt:
        if d.way != VERL and d.ranks in verl:
            ratio = verl[d.ranks] / d.median_s
            what = f"{d.way} to {d.ranks} ranks at least 8 times as fast as verl over Ray"
            lines.append(line(what, f"{ratio:.1f} times", ratio >= LEAST_OF_VERL))
    if devices:
        for what, rate in (
            ("cuda_ipc, staging included,", min(d.of_copy for d in devices)),
            ("its copies from device to device", min(d.slots_of_copy for d in devices)),
        ):
            what = f"{what} at least 0.8 of a device-to-device copy"
            lines.append(line(what, f"{rate:.2f}", rate >= LEAST_OF_COPY))
    return lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, help="What is timed."
)
@click.option("--hand-off", "hand_offs", multiple=True, type=click.IntRange(MIB), default=HAND_OFFS)
@click.option("--stream", "streams", multiple=True, type=click.IntRange(MIB), default=STREAMS)
@click.option("--cuda-ipc", "devices", multiple=True, type=click.IntRange(MIB), default=DEVICES)
@click.option("--ranks", multiple=True, type=click.IntRange(1), default=RANKS, show_default=True)
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(1), help="Of each way.")
@json_option
def main(
    parts: tuple[str, ...],
    hand_offs: tuple[int, ...],
    streams: tuple[int, ...],
    devices: tuple[int, ...],
    ranks: tuple[int, ...],
    rounds: int,
    json_path: Path | None,
) -> None:
    """Time memfd, tcp, the dealing of a batch and cuda_ipc, each beside its anchor."""
    before = circumstances()
    hand_offs, streams, ranks, devices = (
        chosen if part in parts else ()
        for part, chosen in zip(PARTS, (hand_offs, streams, ranks, devices), strict=True)
    )
    with_verl = all(importlib.util.find_spec(name) for name in ("ray", "verl", "tensordict"))
    if ranks and not with_verl:
        click.echo("verl over Ray is left out: ray, verl and tensordict are not all installed")
    no_cuda_ipc = CudaIpcTransport.unavailable()
    if devices and no_cuda_ipc:
        click.echo(f"cuda_ipc is left out: {no_cuda_ipc}")
    try:
        with process(run_producer, max((0, *hand_offs, *streams)) + 64 * MIB) as producer:
            on_host = (
                [measure_hand_off(producer, nbytes, rounds) for nbytes in hand_offs],
                [measure_stream(producer, nbytes, rounds) for nbytes in streams],
                [figure for n in ranks for figure in measure_batch(producer, n, rounds, with_verl)],
            )
        taken = (*on_host, [] if no_cuda_ipc else measure_cuda_ipc(own_cuda, devices, rounds))
    except KeyboardInterrupt:
        raise click.Abort from None
    show(*taken)
    names = ("hand_offs", "streams", "batches", "cuda_ipc")
    figures = {name: [asdict(f) for f in part] for name, part in zip(names, taken, strict=True)}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    write_json(json_path, {"before": before, "after": circumstances(), "gpu": gpu, **figures})


if __name__ == "__main__":
    main()
