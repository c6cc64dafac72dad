"""Ranks of test_ranks.py, of which the second may fail or wait forever, while the first waits for it."""

import signal

import torch.distributed as dist


def main(what: str) -> list[int]:
    if dist.get_rank() == 1 and what == "fails":
        raise RuntimeError("this rank fails")
    if dist.get_rank() == 1 and what == "waits":
        print("waiting", flush=True)
        signal.pause()
    dist.barrier()
    return [dist.get_rank(), dist.get_world_size()]
