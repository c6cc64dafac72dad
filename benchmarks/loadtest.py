"""Calls a second of the load tester, beside bare grpc.aio loops.

A server answers every call with the same message, on one core; client processes on another core call it: bare loops
that await one call after another, and `rlhf-loadtest` with as many callers. They take turns, so that drift of the
machine hits both alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc
import grpc.aio
from rich.table import Table

from benchmarks.report import circumstances, console, json_option, write_json
from rlhf.contract import PLAIN_OPTIONS, SERVICES
from rlhf.v1 import reward_pb2

LEAST_OF_BARE = 0.8
START_TIMEOUT_S = 60.0
COMPUTE_REWARD = SERVICES["reward"]["ComputeReward"]


@contextlib.contextmanager
def no_op_server(core: int) -> Iterator[str]:
    """A reward whose answer is always the same, in a process of its own on one core; yields its address."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, core), daemon=True)
    process.start()
    theirs.close()
    try:
        if not mine.poll(START_TIMEOUT_S):
            raise click.ClickException(f"no server within {START_TIMEOUT_S:g} s")
        yield f"127.0.0.1:{mine.recv()}"
    finally:
        mine.close()
        process.join(5)


def _serve(parent: Connection, core: int) -> None:
    """Serves until the other end of the pipe closes."""
    os.sched_setaffinity(0, {core})
    response = reward_pb2.ComputeRewardResponse(scores=[reward_pb2.RowScore(score=1)])

    async def compute_reward(request: Any, context: Any) -> Any:
        return response

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            compute_reward,
            reward_pb2.ComputeRewardRequest.FromString,
            reward_pb2.ComputeRewardResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(
            COMPUTE_REWARD.service, {COMPUTE_REWARD.name: handler}
        )
        server.add_generic_rpc_handlers((handlers,))
        parent.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(parent.recv)
        await server.stop(None)

    asyncio.run(serve())


def bare_rate(address: str, callers: int, seconds: float, core: int) -> float:
    """Calls a second of bare loops, in a process of their own on one core."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_call_bare, args=(theirs, address, callers, seconds, core), daemon=True)
    process.start()
    theirs.close()
    if not mine.poll(START_TIMEOUT_S + seconds):
        raise click.ClickException(f"no answer from the bare loops within {START_TIMEOUT_S:g} s")
    rate = mine.recv()
    process.join(5)
    return rate


def _call_bare(parent: Connection, address: str, callers: int, seconds: float, core: int) -> None:
    os.sched_setaffinity(0, {core})
    # The same number of bytes as the tester sends.
    row = reward_pb2.TextRow(prompt="12345678", response="12345678")
    request = reward_pb2.ComputeRewardRequest(text_rows=[row])

    async def call_on_and_on(stub: Any, stop_s: float) -> int:
        calls = 0
        while time.monotonic() < stop_s:
            await stub(request, timeout=START_TIMEOUT_S)
            calls += 1
        return calls

    async def run() -> float:
        async with grpc.aio.insecure_channel(address, options=PLAIN_OPTIONS) as channel:
            stub = channel.unary_unary(
                COMPUTE_REWARD.path,
                reward_pb2.ComputeRewardRequest.SerializeToString,
                reward_pb2.ComputeRewardResponse.FromString,
            )
            await asyncio.gather(*(call_on_and_on(stub, time.monotonic() + 0.5) for _ in range(callers)))
            began = time.monotonic()
            calls = await asyncio.gather(*(call_on_and_on(stub, began + seconds) for _ in range(callers)))
            return sum(calls) / (time.monotonic() - began)

    parent.send(asyncio.run(run()))


def tester_step(address: str, seconds: float, core: int, *options: str) -> dict[str, Any]:
    """The figures of one step of `rlhf-loadtest`, in a process of its own on one core."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "result.json")
        command = [sys.executable, "-m", "loadtest.cli", "reward", "--target", address, "--method", "ComputeReward",
                   "--duration", str(seconds), "--warmup", "0.5", "--json", str(path), *options]  # fmt: skip
        ran = subprocess.run(
            command,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S + seconds,
            check=False,
        )
        if ran.returncode:
            raise click.ClickException(ran.stderr)
        return json.loads(path.read_text())["steps"][0]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--callers", "sizes", multiple=True, type=click.IntRange(1), default=(1, 8, 64), show_default=True
)
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.1), help="Of each turn.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@json_option
def main(sizes: tuple[int, ...], seconds: float, turns: int, json_path: Path | None) -> None:
    """Time the load tester on a server that does nothing, beside bare grpc.aio loops."""
    cores = sorted(os.sched_getaffinity(0))
    before, figures = circumstances(), []
    with no_op_server(cores[-1]) as address:
        for callers in sizes:
            bare, ours = [], []
            for turn in range(turns):
                click.echo(f"{callers} callers, turn {turn + 1}", err=True)
                bare.append(bare_rate(address, callers, seconds, cores[0]))
                step = tester_step(address, seconds, cores[0], "--concurrency", str(callers))
                ours.append(step["throughput_per_s"])
            figures.append({"callers": callers, "bare_per_s": bare, "tester_per_s": ours})
        rate = LEAST_OF_BARE * statistics.median(figures[-1]["bare_per_s"])
        opened = tester_step(address, 2 * seconds, cores[0], "--rate", str(rate))
    _show(figures, rate, opened)
    open_loop = {
        name: opened[name] for name in ("sent_per_s", "throughput_per_s", "lag_s", "latency_s", "busy")
    }
    write_json(
        json_path,
        {
            "before": before,
            "after": circumstances(),
            "closed_loop": figures,
            "open_loop": {"rate": rate, **open_loop},
        },
    )


def _show(figures: list[dict[str, Any]], rate: float, opened: dict[str, Any]) -> None:
    table = Table(title="Calls a second that do nothing")
    for name in ("callers", "bare loops", "rlhf-loadtest", "tester / bare (turns)", "aim"):
        table.add_column(name, justify="right")
    for figure in figures:
        pairs = zip(figure["tester_per_s"], figure["bare_per_s"], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        median = statistics.median(ratios)
        table.add_row(
            str(figure["callers"]),
            f"{statistics.median(figure['bare_per_s']):,.0f}",
            f"{statistics.median(figure['tester_per_s']):,.0f}",
            f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{LEAST_OF_BARE:g}: {'met' if median >= LEAST_OF_BARE else 'missed'}",
        )
    screen = console()
    screen.print(table)
    lag = opened["lag_s"]
    screen.print(
        f"open loop at {rate:,.0f}/s: {opened['sent_per_s']:,.0f}/s sent, {lag['mean'] * 1e3:.2f} ms late in the mean, "
        f"p99 {lag['p99'] * 1e3:.2f} ms; busy {opened['busy']:.0%}"
    )


if __name__ == "__main__":
    main()
