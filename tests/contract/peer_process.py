"""Control of the second process of the transport suite."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.refs.wire_ranks import endpoint_from_proto
from rlhf.v1 import common_pb2 as pb

TESTS = Path(__file__).parents[1]


EPOCH = 3


MIB = 1 << 20


GPU, READERS_GPU = "GPU-of-the-peer", "GPU-of-the-reader"


class PeerProcess:
    """A process that stores rows on request, and serves them."""

    def __init__(
        self,
        directory: Path,
        arena_mib: int = 16,
        epoch: int = EPOCH,
        devices: str = "host",
        checksums: bool = False,
        device_uuid: str = "",
    ) -> None:
        arguments = [str(arena_mib), str(epoch), devices, str(checksums), device_uuid]
        command = [sys.executable, "-m", "contract.transport_peer", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS
        )
        self.pid = self.process.pid
        self.directory = directory
        self.steps = itertools.count(1)
        message = pb.Endpoint.FromString(bytes.fromhex(self.answer()["endpoint"]))
        self.endpoint = endpoint_from_proto(message)

    def answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def ask(self, op: str, **arguments: object) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        while "event" in (reply := self.answer()):
            pass  # left over from a test that failed
        return reply

    def try_put(self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str) -> dict:
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
        """A batch of one column "x"."""
        return self.put_columns({"x": (array, dtype or str(array.dtype), lengths)}, layout)

    def put_columns(
        self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str = "as it is"
    ) -> Batch:
        reply = self.try_put(columns, layout)
        assert "batch" in reply, reply
        return from_proto(pb.Batch.FromString(bytes.fromhex(reply["batch"])))

    def release(self) -> None:
        self.ask("go_on")
        self.ask("release")

    def stop(self) -> None:
        """Stops the process, and waits until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate()


def run_reader(devices: str, transport: str, batch: Batch, within_s: float) -> subprocess.Popen[bytes]:
    """A process that fetches a batch; `devices` as for the peer."""
    message = to_proto(batch).SerializeToString().hex()
    command = [sys.executable, "-m", "contract.transport_reader", devices, transport, message, str(within_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS)
