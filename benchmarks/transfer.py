"""How fast rows of one process reach another, beside a plain copy of as many bytes within one process.

Two parts. Sizes: one column of each size, from one process to another. Readers: a jagged batch as PPO makes it, from
one process to 1, 2, 4 and 8 that ask for all of it at the same time. Through memfd a fetch copies nothing, so
its time is taken until the reader has copied the bytes out; tcp and memcpy end with a copy anyway. All of them take
turns, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import grpc.aio
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import circumstances, json_option, write_json
from nccl_transfer.batch import Batch, Endpoint
from nccl_transfer.columns import Jagged
from nccl_transfer.fetch import Fetcher, Rows
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports import TRANSPORTS, ArenaServer, create_transports, host_id, serve_fetch
from nccl_transfer.wire import from_proto, to_proto
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.v1 import common_pb2, transfer_pb2_grpc

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
READERS = (1, 2, 4, 8)
MEMCPY = "memcpy"
FETCH_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0

SEQUENCES, MEAN_TOKENS = 512, 512
TOKEN_COLUMNS = {"ids": "int64", "log_probs": "float32", "ref_log_probs": "float32", "values": "float32",
                 "advantages": "float32"}  # fmt: skip
"""24 bytes a token, 6.3 MB in all."""


@dataclass(frozen=True)
class Figure:
    """Time of one way to move so many bytes to so many readers.

    Attributes:
        median_s, best_s: Until the last reader has its copy.
        gb_per_s: Bytes that arrived, at all readers together, per second of the median.
        memcpy_ratio: Median over that of a plain copy of the same bytes; None where none was taken.
    """

    part: str
    way: str
    nbytes: int
    readers: int
    rounds: int
    median_s: float
    best_s: float
    gb_per_s: float
    memcpy_ratio: float | None


def ppo_batch(rng: np.random.Generator) -> dict[str, Jagged[np.ndarray]]:
    """Jagged columns of 512 sequences, 512 tokens long on average."""
    lengths = rng.multinomial(SEQUENCES * MEAN_TOKENS, np.full(SEQUENCES, 1 / SEQUENCES)).astype(np.int64)
    return {
        name: Jagged(rng.integers(0, 100, lengths.sum()).astype(dtype), lengths)
        for name, dtype in TOKEN_COLUMNS.items()
    }


class Source(transfer_pb2_grpc.TransferServiceServicer):
    """A rank that holds a column of each size and the jagged batch."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.store = TensorStore(sum(sizes) + 64 * MIB)
        self.arena_server = ArenaServer(self.store)

    async def Fetch(self, request: Any, context: Any) -> Any:
        async for response in serve_fetch(self.store, 1, request):
            yield response

    async def serve(self, sizes: tuple[int, ...], parent: Connection) -> None:
        server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        self.store.endpoint = Endpoint(f"127.0.0.1:{port}", host_id(), self.arena_server.name, 1, "source", 0)
        await server.start()
        parent.send([to_proto(batch).SerializeToString() for batch in self.batches(sizes)])
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(parent.recv)
        await server.stop(None)
        self.arena_server.close()
        self.store.close()

    def batches(self, sizes: tuple[int, ...]) -> Iterator[Batch]:
        """One of each size, then the jagged one."""
        rng, lease = np.random.default_rng(0), Lease("benchmark", 1)
        for nbytes in sizes:
            column = rng.integers(0, 256, (16, nbytes // 16), np.uint8)
            yield Batch(16, {"x": self.store.put_column(column, "uint8", lease)})
        columns = ppo_batch(rng)
        yield Batch(
            SEQUENCES, {n: self.store.put_column(c, TOKEN_COLUMNS[n], lease) for n, c in columns.items()}
        )


def run_source(sizes: tuple[int, ...], parent: Connection) -> None:
    """A process: serves until the other end of the pipe closes, however that happens."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Source(sizes).serve(sizes, parent))


def run_reader(message: bytes, parent: Connection) -> None:
    """A process: fetches a batch by the transport it is told, and copies it out."""
    batch = from_proto(common_pb2.Batch.FromString(message))
    target = np.empty(batch.nbytes, np.uint8)
    fetchers = {name: Fetcher(host_id(), create_transports([name])) for name in TRANSPORTS}
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        parent.send("ready")
        while True:
            name = parent.recv()
            copy_out(fetchers[name].fetch(batch, time.monotonic() + FETCH_TIMEOUT_S), target, name)
            parent.send("done")
    for fetcher in fetchers.values():
        fetcher.close()


def copy_out(rows: Rows, target: np.ndarray, transport: str) -> None:
    """Ends a fetch: what memfd mapped is copied to `target` [bytes]; what tcp brought is a copy already."""
    if transport != "memfd":
        return
    end = 0
    for values in rows.values.values():
        array = values.values if isinstance(values, Jagged) else np.asarray(values)
        begin, end = end, end + array.nbytes
        np.copyto(target[begin:end], array.reshape(-1).view(np.uint8))
    rows.verify()


@contextmanager
def process(target: Callable[..., None], argument: object) -> Iterator[Connection]:
    """A process of its own, which ends when its pipe closes."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    started = spawn.Process(target=target, args=(argument, theirs), daemon=True)
    started.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        started.join(10)


def receive(connection: Connection) -> Any:
    if not connection.poll(START_TIMEOUT_S):
        raise click.ClickException(f"no answer within {START_TIMEOUT_S:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise click.ClickException("a process ended too early; see its output above") from None


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each way, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, move in ways.items():
            started = time.perf_counter()
            move()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def measure_size(batch: Batch, rounds: int) -> list[Figure]:
    """One column into this process."""
    source, target = (np.ones(batch.nbytes, np.uint8) for _ in range(2))
    fetchers = {name: Fetcher(host_id(), create_transports([name])) for name in TRANSPORTS}

    def fetch(name: str) -> None:
        copy_out(fetchers[name].fetch(batch, time.monotonic() + FETCH_TIMEOUT_S), target, name)

    ways: dict[str, Callable[[], object]] = {MEMCPY: lambda: np.copyto(target, source)}
    ways |= {name: lambda name=name: fetch(name) for name in TRANSPORTS}
    seconds = in_turns(ways, rounds)
    for fetcher in fetchers.values():
        fetcher.close()
    return figures("sizes", batch.nbytes, 1, seconds)


def measure_readers(message: bytes, readers: int, rounds: int) -> list[Figure]:
    """The jagged batch into so many processes at the same time."""
    nbytes = from_proto(common_pb2.Batch.FromString(message)).nbytes
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(process(run_reader, message)) for _ in range(readers)]
        for pipe in pipes:
            receive(pipe)

        def fetch_everywhere(name: str) -> None:
            for pipe in pipes:
                pipe.send(name)
            for pipe in pipes:
                receive(pipe)

        ways = {name: lambda name=name: fetch_everywhere(name) for name in TRANSPORTS}
        return figures("readers", nbytes, readers, in_turns(ways, rounds))


def figures(part: str, nbytes: int, readers: int, seconds: Mapping[str, list[float]]) -> list[Figure]:
    medians = {way: float(np.median(taken)) for way, taken in seconds.items()}
    memcpy = medians.get(MEMCPY)
    return [
        Figure(part, way, nbytes, readers, len(taken), medians[way], min(taken),
               nbytes * readers / medians[way] / 1e9, medians[way] / memcpy if memcpy else None)
        for way, taken in seconds.items()
    ]  # fmt: skip


def size(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / KIB:g} KiB"


def show(taken: list[Figure]) -> None:
    """The table."""
    table = Table(
        title="Rows from one process to others", caption="time until the last reader has its own copy"
    )
    for name in ("size", "readers", "way", "rounds", "median ms", "best ms", "GB/s", "over memcpy"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for figure, following in zip(taken, [*taken[1:], None], strict=True):
        ratio = "" if figure.memcpy_ratio is None else f"{figure.memcpy_ratio:.1f} x"
        last = following is None or (following.nbytes, following.readers) != (figure.nbytes, figure.readers)
        table.add_row(size(figure.nbytes), str(figure.readers), figure.way, str(figure.rounds),
                      f"{figure.median_s * 1e3:.3f}", f"{figure.best_s * 1e3:.3f}", f"{figure.gb_per_s:.2f}",
                      ratio, end_section=last)  # fmt: skip
    Console().print(table)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", "sizes", multiple=True, type=click.IntRange(16), default=SIZES, show_default=True)
@click.option("--readers", multiple=True, type=click.IntRange(1), default=READERS, show_default=True)
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1), help="Of each way.")
@json_option
def main(sizes: tuple[int, ...], readers: tuple[int, ...], rounds: int, json_path: Path | None) -> None:
    """Time memfd and tcp beside memcpy."""
    before, taken = circumstances(), []
    try:
        with process(run_source, sizes) as pipe:
            *columns, jagged = receive(pipe)
            for message in columns:
                taken += measure_size(from_proto(common_pb2.Batch.FromString(message)), rounds)
            for count in readers:
                taken += measure_readers(jagged, count, rounds)
    except KeyboardInterrupt:
        raise click.Abort from None
    show(taken)
    write_json(
        json_path,
        {"before": before, "after": circumstances(), "figures": [asdict(figure) for figure in taken]},
    )


if __name__ == "__main__":
    main()
