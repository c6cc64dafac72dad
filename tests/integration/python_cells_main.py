"""Executes the code cells of a notebook in order, as a kernel does: an event loop runs in the main thread, and standard
output is no terminal. Exits with an error where a run has changed the process."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

THREAD_ENDS_S = 10.0


def code_cells(notebook: Path) -> list[str]:
    """The source of each code cell."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def process_state() -> dict[str, Any]:
    """State of the process that a run must not change: signal handlers, search path and garbage collector."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    return {
        "handlers": handlers,
        "garbage": (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()),
        "path": list(sys.path),
    }


async def main(notebook: Path) -> None:
    asyncio.get_running_loop()
    names: dict[str, Any] = {"__name__": "__main__"}
    before, threads = process_state(), set(threading.enumerate())
    for cell in code_cells(notebook):
        exec(compile(cell, "<cell>", "exec"), names)
        await asyncio.sleep(0)
    assert process_state() == before
    for thread in set(threading.enumerate()) - threads:
        if "_poll_wrapper" in thread.name:  # gRPC's own: one in a process, which stays
            continue
        thread.join(THREAD_ENDS_S)
        assert not thread.is_alive(), thread


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
