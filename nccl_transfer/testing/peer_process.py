"""Control of the second process of the contract of transports."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.wire import from_proto
from nccl_transfer.refs.wire_ranks import endpoint_from_proto
from rlhf.v1 import common_pb2 as pb

EPOCH = 3
"""Epoch of the process."""

MIB = 1 << 20


class PeerProcess:
    """A process that stores rows on request, and serves them.

    Args:
        directory: Directory for files of rows on their way to the process.
        arguments: Further arguments of the module: of `nccl_transfer.testing.peer` the transports.
        arena_mib: Size of its arena in MiB. Default: 16.
        checksums: Whether it computes checksums. Default: False.
        module: Module that it runs.
        cwd: Its working directory. Default: this process's.

    Attributes:
        endpoint: Its endpoint.
    """

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        arena_mib: int = 16,
        checksums: bool = False,
        *,
        module: str = "nccl_transfer.testing.peer",
        cwd: Path | None = None,
    ) -> None:
        command = [sys.executable, "-m", module, str(arena_mib), str(EPOCH), str(checksums), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd
        )
        self.pid = self.process.pid
        self.directory = directory
        self.steps = itertools.count(1)
        message = pb.Endpoint.FromString(bytes.fromhex(self.answer()["endpoint"]))
        self.endpoint = endpoint_from_proto(message)

    def answer(self) -> dict:
        """Blocks until the process says something, and returns it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def ask(self, op: str, **arguments: object) -> dict:
        """Has the process run a method of its `Peer`, and returns the reply."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        while "event" in (reply := self.answer()):
            pass  # left over from a test that failed
        return reply

    def try_put(self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str) -> dict:
        """Has the process store columns: of each values, element type and lengths of rows, or None. Returns the reply:
        `batch`, or `error` and `message`."""
        step = next(self.steps)
        described = {}
        for number, (name, (array, dtype, lengths)) in enumerate(columns.items()):
            path = self.directory / f"{os.getpid()}-{self.pid}-{step}-{number}.npy"
            np.save(path, array)
            described[name] = {"path": str(path), "dtype": dtype, "lengths": lengths, "layout": layout}
        reply = self.ask("put", step=step, columns=described)
        for column in described.values():
            os.unlink(column["path"])
        return reply

    def put(
        self, array: np.ndarray, dtype: str = "", lengths: list[int] | None = None, layout: str = "as it is"
    ) -> Batch:
        """Has the process store a batch of one column "x", and returns it by reference."""
        return self.put_columns({"x": (array, dtype or str(array.dtype), lengths)}, layout)

    def put_columns(
        self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str = "as it is"
    ) -> Batch:
        """Has the process store columns, as `try_put`; returns the batch by reference."""
        reply = self.try_put(columns, layout)
        assert "batch" in reply, reply
        return from_proto(pb.Batch.FromString(bytes.fromhex(reply["batch"])))

    def release(self) -> None:
        """Frees all rows."""
        self.ask("release")

    def stop(self) -> None:
        """Stops the process, and waits until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends the process, also if it is stopped."""
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate()
