"""Processes of a benchmark, and measurements in turns."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import click

TIMEOUT_S = 120.0
"""Longest time of an answer, in seconds."""


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
        if started.is_alive():
            started.kill()


def receive(connection: Connection, timeout_s: float = TIMEOUT_S) -> Any:
    if not connection.poll(timeout_s):
        raise click.ClickException(f"no answer within {timeout_s:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise click.ClickException("a process ended too early; see its output above") from None


def ask(connection: Connection, *request: object) -> Any:
    connection.send(request)
    return receive(connection)


def timed(move: Callable[[], object]) -> Callable[[], float]:
    """The function as one that returns its seconds."""

    def seconds() -> float:
        started = time.perf_counter()
        move()
        return time.perf_counter() - started

    return seconds


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round, after two rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-2, rounds):
        for name, way in ways.items():
            taken = way()
            if number >= 0:
                seconds[name].append(taken)
    return seconds
