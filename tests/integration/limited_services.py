"""Serves the services of a config as `forked_services.py` does, on CPUs that stand for devices of their own: Offload
moves tensors as on a GPU, and each rank notes what it has on its device. It has the arguments of `forked_services.py`.

After each call a rank appends a line to the file SERVICE-RANK.jsonl beside the log directory: when the call began and
ended, the bytes that the rank's tensors took before it and after it, and at most while it ran. A file SERVICE-RANK.full
there makes the next Onload of the rank run out of memory, and SERVICE-RANK.dies ends the rank soon after its next
Offload.
"""

from __future__ import annotations

import forked_services  # first: it chooses how gRPC polls

import gc  # isort: skip
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from allocations import allocations

from services.engines import offload
from services.engines.sharded import ShardedEngine
from services.rollout.decoder import WholeDecoder
from services.runtime.compute import ComputeThread

MOVES = ("offload", "onload")


def noting(directory: Path) -> None:
    """Changes the classes of services for what this module says."""
    call_method: Callable[..., Any] = ComputeThread._call_method
    grow = offload._grow

    def noted(self: Any, call: Any, rows: Any) -> Any:
        worker, method = self._worker, call.method.snake_name
        name = f"{worker.service}-{worker.ranks.rank}"
        full = directory / f"{name}.full"
        if method == "onload" and full.exists():
            full.unlink()
            offload._grow = _out_of_memory
        began, before = time.time(), resident_bytes()
        try:
            with allocations() as found:
                result = call_method(self, call, rows)
        finally:
            offload._grow = grow
        after = resident_bytes()
        # Copies in host memory are no bytes of the device.
        peak = max(before, after) if method in MOVES else before + found.peak
        line = {"method": method, "began": began, "ended": time.time(), "before": before, "peak": peak}
        with (directory / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({**line, "after": after}) + "\n")
        if method == "offload" and (directory / f"{name}.dies").exists():
            threading.Timer(0.02, os._exit, [1]).start()
        return result

    ComputeThread._call_method = noted  # type: ignore[method-assign]
    ShardedEngine.offload = ShardedEngine._leave_device  # type: ignore[method-assign]
    WholeDecoder.sleep = _sleep  # type: ignore[method-assign]
    make = WholeDecoder.__init__

    def made(decoder: WholeDecoder, model: Any) -> None:
        for x in (*model.parameters(), *model.buffers()):
            x.data = x.data.clone()  # from a mapped file to the device
        make(decoder, model)

    WholeDecoder.__init__ = made  # type: ignore[method-assign]


def resident_bytes() -> int:
    """Returns the bytes of all tensors of this process, storages that tensors share counted once, without those that
    are views of other memory, such as rows in the arena, which on a GPU would be in host memory."""
    plain = (torch.Tensor, torch.nn.Parameter)
    found = [x.untyped_storage() for x in gc.get_objects() if type(x) in plain and x.device.type == "cpu"]
    return sum({each.data_ptr(): each.nbytes() for each in found if each.resizable()}.values())


def _sleep(decoder: Any, *, keep_weights: bool = True) -> int:
    if not keep_weights:
        return decoder._drop(decoder._own_weights())
    return decoder._leave_device([*decoder._model.parameters(), *decoder._model.buffers()])


def _out_of_memory(storage: Any, num_bytes: int) -> None:
    raise torch.OutOfMemoryError(f"tried to allocate {num_bytes} bytes")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    path, logs, *settings = sys.argv[1:]
    noting(Path(logs).parent)
    forked_services.serve(Path(path), Path(logs), settings)
