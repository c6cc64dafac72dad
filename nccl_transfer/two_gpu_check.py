"""Checks the `nccl` transport between two GPUs of this machine: `python -m nccl_transfer.two_gpu_check`.

One process holds shards and serves them, another fetches them. Sizes from 1 byte to 1 GiB must arrive bit by bit; a
source that is stopped must end the transfer at its deadline; and once it goes on, the next transfer must succeed
under a new communicator. Prints a line per check with its time and rate, and exits with 1 on the first that fails.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from concurrent import futures
from multiprocessing.connection import Connection

import grpc.aio
import numpy as np

from nccl_transfer.batch import Batch, Endpoint
from nccl_transfer.communicator import why_no_nccl
from nccl_transfer.device import cupy
from nccl_transfer.fetch import Fetcher, Rows
from nccl_transfer.serving import add_transfer_service
from nccl_transfer.sources import DeviceSources
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports import create_transports, host_id
from nccl_transfer.wire import from_proto, to_proto
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import DeadlineExceeded
from rlhf.v1 import common_pb2

SIZES = (1, 4096, 1 << 20, 64 << 20, 1 << 30)
ARENA_BYTES = sum(SIZES) + (1 << 20)
TIMEOUT_S = 120.0
STOPPED_S = 2.0


def expected(nbytes: int) -> np.ndarray:
    """The bytes of the shard of this size, [1, nbytes]."""
    return np.random.default_rng(nbytes).integers(0, 256, (1, nbytes), dtype=np.uint8)


def serve(parent: Connection) -> None:
    """The source: on GPU 1, until it is killed."""
    use_gpu(1)
    asyncio.run(_serve(parent))


async def _serve(parent: Connection) -> None:
    store = TensorStore(ARENA_BYTES, checksums=True)
    sources = DeviceSources.of_this_process(store)
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_transfer_service(server, sources.handlers())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    store.endpoint = Endpoint(
        address,
        host_id(),
        "",
        1,
        "source",
        device_uuid=sources.device_uuid,
        nccl_version=sources.nccl_version,
    )
    await server.start()
    for nbytes in SIZES:
        column = store.put_column(expected(nbytes), "uint8", Lease("check", 1))
        parent.send_bytes(to_proto(Batch(1, {"x": column})).SerializeToString())
    await server.wait_for_termination()


def use_gpu(number: int) -> None:
    """Makes a GPU the current one, before anything else of CUDA is used."""
    reason = why_no_nccl()
    if reason is not None:
        sys.exit(reason)
    runtime = cupy("cuda.runtime")
    if runtime.getDeviceCount() < 2:
        sys.exit("two GPUs are needed")
    runtime.setDevice(number)


def fetch(fetcher: Fetcher, batch: Batch, within_s: float = TIMEOUT_S) -> Rows:
    return fetcher.fetch(batch, time.monotonic() + within_s)


def check(fetcher: Fetcher, batch: Batch, nbytes: int) -> None:
    """Fetches a batch and compares every byte."""
    start = time.perf_counter()
    got = fetch(fetcher, batch)["x"]
    seconds = time.perf_counter() - start
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, expected(nbytes)), f"{nbytes} bytes arrived wrong"
    print(f"{nbytes:>12,} bytes: {seconds * 1e3:9.2f} ms, {nbytes / seconds / 1e9:6.2f} GB/s", flush=True)


def main() -> None:
    """Runs all checks."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    source = context.Process(target=serve, args=(there,), daemon=True)
    source.start()
    use_gpu(0)
    fetcher = Fetcher(host_id(), create_transports(["nccl"]))
    batches = {n: from_proto(common_pb2.Batch.FromString(here.recv_bytes())) for n in SIZES}
    for nbytes, batch in batches.items():
        check(fetcher, batch, nbytes)
        check(fetcher, batch, nbytes)
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: check(fetcher, batches[1 << 20], 1 << 20), range(8)))
    assert source.pid is not None
    os.kill(source.pid, signal.SIGSTOP)
    start = time.monotonic()
    try:
        fetch(fetcher, batches[64 << 20], STOPPED_S)
        sys.exit("a source that is stopped answered")
    except DeadlineExceeded as error:
        late = time.monotonic() - start - STOPPED_S
        print(f"stopped source: {late:.2f} s past the deadline: {error}", flush=True)
    os.kill(source.pid, signal.SIGCONT)
    check(fetcher, batches[64 << 20], 64 << 20)
    source.kill()
    print("all checks passed", flush=True)
    os._exit(0)  # NCCL's threads need not be waited for


if __name__ == "__main__":
    main()
