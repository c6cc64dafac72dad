"""How long a call that does nothing takes, to 1, 2, 4 and 8 ranks.

`WorkerService.Synchronize` through a role group, so with everything a call has (sequence, epoch, deduplication,
outcome), beside a bare gRPC fan-out and, where Ray is installed, a fan-out to Ray actors. Every system runs in
a client process of its own, and they take short turns, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import grpc.aio
import numpy as np
import tomli_w
from rich.table import Table

from benchmarks.ports import free_port
from benchmarks.processes import receive
from benchmarks.report import circumstances, console, json_option, write_json
from client.session import Session
from controller.config.config import Config
from controller.launch import LaunchedServices
from controller.role_groups.cluster import Cluster
from controller.role_groups.loop import Loop
from rlhf.contract import CHANNEL_OPTIONS, SERVICES
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.server import SERVER_OPTIONS

CLUSTER, RAW, RAW_BLOCKING, RAY = "role group", "raw gRPC", "raw gRPC, blocking", "Ray actors"
MOST_OF_RAW, MOST_OF_RAY = 1.5, 0.5
WARM_UP_CALLS = 50
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 60.0

SYNCHRONIZE = SERVICES["worker"]["Synchronize"]

Calls = Callable[[int], list[float]]
"""Makes a number of calls, one after another; returns the time of each in seconds."""


@contextmanager
def role_group(ranks: int) -> Iterator[Mapping[str, Calls]]:
    """Blocking calls to a service of `ranks` ranks through its role group."""
    tables = {
        "data": {"train": "unused", "heldout": "unused"},
        "services": {"reward": {"role": "reward", "address": f"127.0.0.1:{free_port()}", "ranks": ranks}},
    }
    config = Config.model_validate(tables)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config.toml")
        path.write_text(tomli_w.dumps(tables))
        with LaunchedServices(config, path, Path(directory, "logs")):
            cluster = Cluster(config, Session())
            try:
                cluster.connect()
                group = cluster.group("reward")
                yield {CLUSTER: _timed(lambda: group.synchronize().records(CALL_TIMEOUT_S))}
            finally:
                cluster.close()


@contextmanager
def raw_grpc(ranks: int) -> Iterator[Mapping[str, Calls]]:
    """As many bare grpc.aio servers, each in its own process, with the same messages and channel options:
    asyncio.gather within a loop, and the same from a thread that blocks on the loop's."""
    call = common_pb2.Call(call_id="0" * 32, session="0" * 32, sequence=1, epoch=time.time_ns() // 1_000_000)
    request = worker_pb2.SynchronizeRequest(call=call)
    with _bare_servers(ranks) as addresses, contextlib.closing(Loop()) as loop:

        async def connect() -> tuple[list[grpc.aio.Channel], list[Any]]:
            channels = [grpc.aio.insecure_channel(a, options=CHANNEL_OPTIONS) for a in addresses]
            return channels, [
                channel.unary_unary(
                    SYNCHRONIZE.path,
                    worker_pb2.SynchronizeRequest.SerializeToString,
                    worker_pb2.SynchronizeResponse.FromString,
                )
                for channel in channels
            ]

        async def fan_out() -> None:
            await asyncio.gather(*(stub(request, timeout=CALL_TIMEOUT_S) for stub in stubs))

        async def in_loop(calls: int) -> list[float]:
            seconds = []
            for _ in range(calls):
                started = time.perf_counter()
                await fan_out()
                seconds.append(time.perf_counter() - started)
            return seconds

        channels, stubs = loop.run(connect(), CALL_TIMEOUT_S)
        yield {
            RAW: lambda calls: loop.run(in_loop(calls), CALL_TIMEOUT_S * calls),
            RAW_BLOCKING: _timed(lambda: loop.run(fan_out(), CALL_TIMEOUT_S)),
        }
        for channel in channels:
            loop.run(channel.close(), CALL_TIMEOUT_S)


@contextmanager
def ray_actors(ranks: int) -> Iterator[Mapping[str, Calls]]:
    """`ray.get` of one no-op call to each of `ranks` Ray actors."""
    import ray  # type: ignore[import-not-found]

    class NoOp:
        def call(self) -> None:
            pass

    ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        actors = [ray.remote(NoOp).remote() for _ in range(ranks)]
        yield {RAY: _timed(lambda: ray.get([actor.call.remote() for actor in actors]))}
    finally:
        ray.shutdown()


def _timed(call: Callable[[], object]) -> Calls:
    def calls(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return seconds

    return calls


@contextmanager
def _bare_servers(count: int) -> Iterator[list[str]]:
    spawn = multiprocessing.get_context("spawn")
    ours, processes = [], []
    try:
        for _ in range(count):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve_bare, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            ours.append(mine)
            processes.append(process)
        yield [f"127.0.0.1:{receive(connection, START_TIMEOUT_S)}" for connection in ours]
    finally:
        for connection in ours:
            connection.close()
        for process in processes:
            process.join(5)


def _serve_bare(parent: Connection) -> None:
    """Serves a no-op method until the other end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    timing = common_pb2.Timing(arrived_unix_s=time.time(), queue_s=1e-5, store_s=1e-5)
    response = worker_pb2.SynchronizeResponse(outcome=common_pb2.Outcome(timing=timing))

    async def synchronize(request: Any, context: Any) -> Any:
        return response

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.unary_unary_rpc_method_handler(
            synchronize,
            worker_pb2.SynchronizeRequest.FromString,
            worker_pb2.SynchronizeResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(SYNCHRONIZE.service, {SYNCHRONIZE.name: handler})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        parent.send(port)
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(parent.recv)
        await server.stop(None)

    asyncio.run(serve())


SYSTEMS: Mapping[str, Callable[[int], AbstractContextManager[Mapping[str, Calls]]]] = {
    "cluster": role_group,
    "raw": raw_grpc,
    "ray": ray_actors,
}


class NoOpClient:
    """A system in a process of its own, which makes calls on request. A context manager."""

    def __init__(self, system: str, ranks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_obey, args=(system, ranks, theirs))
        self._process.start()
        theirs.close()
        self.names: list[str] = []

    def __enter__(self) -> NoOpClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        self._process.join(60)

    def wait_until_ready(self) -> None:
        self.names = receive(self._pipe, START_TIMEOUT_S)

    def calls(self, name: str, count: int) -> list[float]:
        self._pipe.send((name, count))
        return receive(self._pipe, START_TIMEOUT_S)


def _obey(system: str, ranks: int, pipe: Connection) -> None:
    with (
        contextlib.suppress(KeyboardInterrupt, EOFError, BrokenPipeError),
        SYSTEMS[system](ranks) as measured,
    ):
        pipe.send(list(measured))
        while True:
            name, count = pipe.recv()
            pipe.send(measured[name](count))


@dataclass(frozen=True)
class Latencies:
    """Latency of one system at one number of ranks.

    Attributes:
        p50_ms, p99_ms: Over all calls.
        turn_p50_ms: Median of each turn, in the order they were taken.
    """

    ranks: int
    system: str
    calls: int
    p50_ms: float
    p99_ms: float
    turn_p50_ms: list[float]


def measure(ranks: int, systems: list[str], calls: int, turns: int) -> list[Latencies]:
    """All systems at one number of ranks, in turns."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(NoOpClient(system, ranks)) for system in systems]
        for client in clients:
            client.wait_until_ready()
        seconds: dict[str, list[list[float]]] = {name: [] for client in clients for name in client.names}
        for client in clients:
            for name in client.names:
                client.calls(name, WARM_UP_CALLS)
        for turn in range(turns):
            first = turn % len(clients)
            for client in clients[first:] + clients[:first]:
                for name in client.names:
                    seconds[name].append(client.calls(name, -(-calls // turns)))
    return [_figure(ranks, name, taken) for name, taken in seconds.items()]


def _figure(ranks: int, system: str, turns: list[list[float]]) -> Latencies:
    milliseconds = np.concatenate(turns) * 1e3
    p50, p99 = np.percentile(milliseconds, [50, 99])
    medians = [round(float(np.median(turn)) * 1e3, 4) for turn in turns]
    return Latencies(ranks, system, len(milliseconds), round(float(p50), 4), round(float(p99), 4), medians)


def ratio(
    figures: list[Latencies], ranks: int, anchor: str, system: str = CLUSTER
) -> tuple[float, float, float] | None:
    """System over anchor at one number of ranks: the median over the turns, the least and the most."""
    found = {figure.system: figure for figure in figures if figure.ranks == ranks}
    if anchor not in found:
        return None
    turns = zip(found[system].turn_p50_ms, found[anchor].turn_p50_ms, strict=True)
    of_turns = [ours / theirs for ours, theirs in turns]
    return statistics.median(of_turns), min(of_turns), max(of_turns)


def show(figures: list[Latencies], without_ray: str) -> None:
    """The table."""
    table = Table(title="A call that does nothing", caption=without_ray or None)
    for name in ("ranks", "system", "calls", "p50 ms", "p99 ms", "role group / this (turns)"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for figure in figures:
        against = None if figure.system == CLUSTER else ratio(figures, figure.ranks, figure.system)
        shown = f"{against[0]:.2f} ({against[1]:.2f} to {against[2]:.2f})" if against else ""
        table.add_row(
            str(figure.ranks),
            figure.system,
            str(figure.calls),
            f"{figure.p50_ms:.2f}",
            f"{figure.p99_ms:.2f}",
            shown,
            end_section=figure.system == _last(figures, figure.ranks),
        )
    screen = console()
    screen.print(table)
    most = max(figure.ranks for figure in figures)
    for anchor, aim in ((RAW, MOST_OF_RAW), (RAY, MOST_OF_RAY)):
        if against := ratio(figures, most, anchor):
            verdict = "met" if against[0] <= aim else "missed"
            screen.print(f"{most} ranks over {anchor}: {against[0]:.2f}, aim at most {aim:g}: {verdict}")
    if floor := ratio(figures, most, RAY, RAW):
        screen.print(f"{most} ranks, {RAW} itself over {RAY}: {floor[0]:.2f}")


def _last(figures: list[Latencies], ranks: int) -> str:
    return [figure.system for figure in figures if figure.ranks == ranks][-1]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--ranks", "sizes", multiple=True, type=click.IntRange(1), default=(1, 2, 4, 8), show_default=True
)
@click.option("--calls", default=600, show_default=True, type=click.IntRange(1), help="Per system and ranks.")
@click.option(
    "--turns", default=20, show_default=True, type=click.IntRange(1), help="Turns they are split into."
)
@json_option
def main(sizes: tuple[int, ...], calls: int, turns: int, json_path: Path | None) -> None:
    """Time a no-op call through a role group beside raw gRPC and Ray."""
    with_ray = importlib.util.find_spec("ray") is not None
    without_ray = "" if with_ray else "Ray is not installed, so its rows are missing: pip install ray"
    systems = [name for name in SYSTEMS if name != "ray" or with_ray]
    # At the end, gRPC would tell of every connection that closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    before, figures = circumstances(), []
    try:
        for ranks in sizes:
            click.echo(f"{ranks} ranks: {', '.join(systems)}", err=True)
            figures.extend(measure(ranks, systems, calls, turns))
    except KeyboardInterrupt:
        raise click.Abort from None
    show(figures, without_ray)
    anchors = sorted({figure.system for figure in figures} - {CLUSTER})
    ratios = {ranks: {anchor: ratio(figures, ranks, anchor) for anchor in anchors} for ranks in sizes}
    written = [asdict(figure) for figure in figures]
    write_json(
        json_path, {"before": before, "after": circumstances(), "figures": written, "role_group_over": ratios}
    )


if __name__ == "__main__":
    main()
