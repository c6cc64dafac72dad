"""Ranks without services: one function in several processes with a process group, and what each returns."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection, forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

PRELOADED = "integration.preloaded"


def launch(
    module: str,
    num_ranks: int,
    *arguments: Any,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Calls the `main` of a module with the arguments in every rank: in one thread, and in a group of all ranks.

    Ranks are forked from a server that has imported the engines once, as imports are most of what ranks of tiny models
    do. So they have the environment that the server was started in, and on all of them sets have the same order.

    Args:
        arguments: Anything that can be pickled.
        deadline_s: For all ranks to end.
        environment: Variables that are read when a process starts: ranks are fresh processes, which have them.
        backend: Of the process group. With NCCL in it, the GPU of a rank's number is its current device, and
            `environment` must be given: a process that was forked may not be able to use CUDA.

    Returns:
        What each rank returned, as it comes out of JSON.

    Raises:
        AssertionError: A rank failed, or was too late. None lives any more.
    """
    context: Any = server_context() if environment is None else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ranks: list[BaseProcess] = [
            context.Process(
                target=_run,
                args=(rank, num_ranks, directory, backend, module, arguments, _Output()),
                name=f"rank {rank} of {module}",
            )
            for rank in range(num_ranks)
        ]
        try:
            with mock.patch.dict(os.environ, environment or {}):
                for rank in ranks:
                    rank.start()
            _wait(ranks, time.monotonic() + deadline_s)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                    rank.join()
        return [json.loads(_report(directory, rank).read_text()) for rank in range(num_ranks)]


def import_uncollected(*modules: str) -> list[ModuleType]:
    """Imports modules while the garbage collector rests: its walks over all that is there take a fifth of the time.

    Nor will it walk there later, so what was forked goes on sharing these pages.
    """
    gc.disable()
    try:
        return [importlib.import_module(module) for module in modules]
    finally:
        gc.freeze()
        gc.enable()


def server_context() -> Any:
    """The multiprocessing context whose processes are forked from a server that has imported PRELOADED. The server is
    started unless it runs, and ends when this process and all that were forked have ended."""
    multiprocessing.set_forkserver_preload([PRELOADED])
    # Python 3.11 does not give the server its path of modules.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class _Output:
    """Sent to a rank, makes it write where this process writes now: the server began with another capture."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _write_to, (reduction.DupFd(1), reduction.DupFd(2))


def _write_to(*streams: Any) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.detach(), number)


def _wait(ranks: list[BaseProcess], deadline: float) -> None:
    """Until all have ended well."""
    running = ranks
    while running:
        connection.wait([rank.sentinel for rank in running], timeout=max(0.0, deadline - time.monotonic()))
        # A process says of itself how it ended.
        assert not any(rank.exitcode for rank in ranks), f"failed: {ranks}"
        running = [rank for rank in ranks if rank.exitcode is None]
        assert not running or time.monotonic() < deadline, f"not in time: {ranks}"


def _run(
    rank: int,
    num_ranks: int,
    directory: Path,
    backend: str,
    module: str,
    arguments: tuple[Any, ...],
    _: None,
) -> None:
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    (main_module,) = import_uncollected(module)
    # After the main module has imported it, uncollected.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks)
    _report(directory, rank).write_text(json.dumps(main_module.main(*arguments)))
    # One that ends early would fail those that still talk to it.
    dist.barrier()
    dist.destroy_process_group()
    # To take down all that was imported takes a second.
    atexit.register(os._exit, 0)


def _end_with_launcher() -> None:
    """However that ends: the server outlives it as long as a rank lives."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _report(directory: Path, rank: int) -> Path:
    return directory / f"report-{rank}.json"
