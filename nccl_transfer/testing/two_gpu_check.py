"""Checks the `nccl` transport between two GPUs of this machine: `python -m nccl_transfer.testing.two_gpu_check`.

One process holds rows and serves them, another fetches them:

- sizes from 1 byte to 1 GiB, every element type, and several threads at once, bit by bit;
- rows of another epoch are refused;
- a transfer in which one side does not enter the group, and one whose source is stopped, fail at their deadline, and
  the next transfer succeeds with the next communicator;
- a source that is killed in the middle of a transfer is reported as lost.

Prints a line with the time of each check, and exits with 1 at the first failure.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent import futures
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.cupy_cuda import cupy, own_cuda
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.testing.hooked_nccl import HookedNccl
from nccl_transfer.testing.two_gpu_source import EPOCH, Devices, expected, names, serve
from nccl_transfer.transports import host_id
from nccl_transfer.transports.gpu.communicator import Nccl, own_nccl, why_no_nccl
from nccl_transfer.transports.gpu.nccl import NcclTransport
from rlhf.errors import DeadlineExceeded, Refused, RlhfError, ServiceLost
from rlhf.v1 import common_pb2

SIZES = (1, 4096, 1 << 20, 64 << 20, 1 << 30)
TIMEOUT_S = 120.0
"""Seconds within which transfers should succeed."""

FAILING_S = 2.0
"""Seconds after which transfers should fail, their deadline."""

LATE_S = 1.0
"""Maximum seconds from a deadline to the error that reports it."""


class CheckFailed(Exception):
    """A check failed; the message is one line."""


def gpus(number: int) -> tuple[Nccl, Cuda]:
    """Returns NCCL and GPU `number` of this machine, which becomes the current device. Must be called before CUDA is
    used otherwise.

    Raises:
        CheckFailed: NCCL cannot be used, or there are fewer than two GPUs.
    """
    reason = why_no_nccl()
    if reason is not None:
        raise CheckFailed(reason)
    runtime = cupy("cuda.runtime")
    if runtime.getDeviceCount() < 2:
        raise CheckFailed("two GPUs are needed")
    runtime.setDevice(number)
    return own_nccl(), own_cuda()


class Check:
    """All checks, run by the reader on GPU 0.

    Args:
        nccl, cuda: The reader's NCCL and GPU.
        batch: The source's batch of one row, by reference.
        sizes: Sizes in bytes of the batch's columns of bytes, in ascending order.
        source: Process of the source.
    """

    def __init__(
        self, nccl: Nccl, cuda: Cuda, batch: Batch, sizes: Sequence[int], source: BaseProcess
    ) -> None:
        self._nccl = HookedNccl(nccl)
        self._fetcher = Fetcher(host_id(), [NcclTransport(self._nccl, cuda).reader()])
        self._batch = batch
        self._sizes = sizes
        assert source.pid is not None
        self._source = source.pid

    def run(self) -> None:
        """Runs all checks; the last one kills the source.

        Raises:
            CheckFailed: A check failed.
            RlhfError: A transfer failed that should have succeeded.
        """
        for name in names(self._sizes):
            self._arrives(name)
            self._arrives(name)
        middle, largest = str(self._sizes[len(self._sizes) // 2]), str(self._sizes[-1])
        with futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(self._arrives, [middle] * 8))
        self._fails("rows of another epoch", Refused, of_epoch(self._batch.select([middle]), EPOCH - 1))
        self._recovers("a reader that does not enter the group", largest, self._stay_out, self._enter)
        self._recovers("a source that is stopped", largest, self._stop, self._go_on)
        self._nccl.enter = self._kill
        self._fails("a source that is killed", ServiceLost, self._batch.select([largest]))

    def _arrives(self, name: str) -> None:
        """Fetches column `name` and prints its time. Raises CheckFailed unless its values are `expected`."""
        start = time.perf_counter()
        got = self._fetch(self._batch.select([name]), TIMEOUT_S)
        seconds, row = time.perf_counter() - start, expected(name)
        if not isinstance(got, np.ndarray) or got.dtype != row.dtype or got.tobytes() != row.tobytes():
            raise CheckFailed(f"column {name!r} arrived wrong")
        say(f"{name}: {row.nbytes:,} bytes in {seconds * 1e3:.2f} ms, {row.nbytes / seconds / 1e9:.2f} GB/s")

    def _recovers(self, what: str, name: str, spoil: Callable[[], None], mend: Callable[[], None]) -> None:
        """Checks that a fetch fails at its deadline after `spoil` and succeeds, by a new communicator, after `mend`."""
        before = self._nccl.joined
        spoil()
        self._fails(what, DeadlineExceeded, self._batch.select([name]))
        mend()
        self._arrives(name)
        if self._nccl.joined != before + 1:
            raise CheckFailed(f"{what}: communicator {self._nccl.joined} came after {before}")

    def _fails(self, what: str, kind: type[RlhfError], batch: Batch) -> None:
        """Raises CheckFailed unless a fetch of `batch` raises `kind` at most LATE_S after its deadline, FAILING_S."""
        start = time.monotonic()
        try:
            self._fetch(batch, FAILING_S)
        except kind as error:
            took = time.monotonic() - start
            if took > FAILING_S + LATE_S:
                raise CheckFailed(
                    f"{what}: told after {took:.2f} s, the deadline was {FAILING_S} s"
                ) from error
            say(f"{what}: told after {took:.2f} s: {error}")
        else:
            raise CheckFailed(f"{what}: the rows arrived all the same")

    def _fetch(self, batch: Batch, within_s: float) -> object:
        (name,) = batch.columns
        return self._fetcher.fetch(batch, time.monotonic() + within_s)[name]

    def _stay_out(self) -> None:
        self._nccl.enter = lambda: False

    def _enter(self) -> None:
        self._nccl.enter = lambda: True

    def _stop(self) -> None:
        os.kill(self._source, signal.SIGSTOP)
        os.waitid(os.P_PID, self._source, os.WSTOPPED)

    def _go_on(self) -> None:
        os.kill(self._source, signal.SIGCONT)

    def _kill(self) -> bool:
        """Kills the source; returns True, so that this side enqueues its NCCL group."""
        os.kill(self._source, signal.SIGKILL)
        return True


def of_epoch(batch: Batch, epoch: int) -> Batch:
    """Returns the same rows by reference, with epoch `epoch` in their endpoints."""
    message = to_proto(batch)
    for endpoint in message.endpoints:
        endpoint.epoch = epoch
    return from_proto(message)


def receive(source: BaseProcess, connection: Connection) -> Batch:
    """Blocks until the source serves; returns its batch, by reference.

    Raises:
        CheckFailed: The source died, or did not serve within TIMEOUT_S.
    """
    if not connection.poll(TIMEOUT_S):
        raise CheckFailed(f"the source does not serve after {TIMEOUT_S} s")
    try:
        return from_proto(common_pb2.Batch.FromString(connection.recv_bytes()))
    except EOFError:
        source.join(TIMEOUT_S)
        raise CheckFailed(f"the source has died before it served: exit code {source.exitcode}") from None


def say(line: str) -> None:
    print(line, flush=True)


def main(devices: Devices = gpus, sizes: Sequence[int] = SIZES) -> int:
    """Starts the source process, runs all checks, prints a line for each, and kills the source. Raises no errors.

    Args:
        devices: Returns NCCL and a GPU by number. Default: those of this machine.
        sizes: Sizes in bytes of the columns of bytes, in ascending order. Default: SIZES.

    Returns:
        The exit code: 0 if all checks passed, else 1.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    source = context.Process(target=serve, args=(devices, sizes, there), daemon=True)
    try:
        nccl, cuda = devices(0)
        source.start()
        there.close()  # the source has the only other end, so its death ends the pipe
        Check(nccl, cuda, receive(source, here), sizes, source).run()
    except (CheckFailed, RlhfError) as error:
        say(f"failed: {error}")
        return 1
    except Exception as error:  # noqa: BLE001 - any error of CUDA or NCCL fails the check
        traceback.print_exc()
        say(f"failed: {type(error).__name__}: {error}")
        return 1
    finally:
        if source.pid is not None:
            source.kill()
    say("all checks passed")
    return 0


if __name__ == "__main__":
    os._exit(main())  # does not wait for NCCL's threads
