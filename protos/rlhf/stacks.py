"""Stacks of a process that hangs: on SIGUSR1 it prints those of all its threads, and of the tasks of its event loop, to
stderr, and continues. The threads are printed by the signal handler itself, so also where Python is blocked in C."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Iterator
from typing import Any

SIGNAL = signal.SIGUSR1
MAX_FRAMES = 20
"""Most coroutines of a task that are printed."""


def dump_on_signal() -> None:
    """Makes this process print the stacks of all threads on `SIGNAL`. Must be called from the main thread."""
    # Not sys.stderr, which may stand for no file.
    faulthandler.register(SIGNAL, file=sys.__stderr__ or 2, all_threads=True)


def dump_tasks_too(loop: asyncio.AbstractEventLoop) -> None:
    """Makes this process, after `dump_on_signal`, also print the stacks of the tasks of an event loop of the main
    thread, as soon as the loop gets to it."""
    faulthandler.unregister(SIGNAL)
    loop.add_signal_handler(SIGNAL, _print_tasks, loop)
    faulthandler.register(SIGNAL, file=sys.__stderr__ or 2, all_threads=True, chain=True)


def _print_tasks(loop: asyncio.AbstractEventLoop) -> None:
    lines = []
    for task in asyncio.all_tasks(loop):
        lines.append(f"Task {task.get_name()} (most recent await last):")
        lines += _awaits(task.get_coro())
    print("\n".join(lines), file=sys.stderr, flush=True)


def _awaits(awaited: Any) -> Iterator[str]:
    """Yields a line for a coroutine, the one that it awaits, and so on. `Task.get_stack` has the first alone."""
    for _ in range(MAX_FRAMES):
        frame = getattr(awaited, "cr_frame", None)
        if frame is None:
            return
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        awaited = awaited.cr_await
