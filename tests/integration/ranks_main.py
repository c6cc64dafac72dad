"""Ranks of test_ranks.py, of which the second may fail or wait forever, while the first waits for it."""

import signal
import sys
from typing import Any

import torch
import torch.distributed as dist


def main(what: str) -> dict[str, Any]:
    if dist.get_rank() == 1 and what == "fails":
        raise RuntimeError("this rank fails")
    if dist.get_rank() == 1 and what == "waits":
        print("waiting", flush=True)
        signal.pause()
    dist.barrier()
    return {
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "finds imported": "services.engines.three_d.engine" in sys.modules,
    }
