"""Processes of the tests of transports: a peer with all transports of this project, and a reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.wire import to_proto
from nccl_transfer.testing.peer_process import PeerProcess

TESTS = Path(__file__).parents[1]
GPU, READERS_GPU = "GPU-of-the-peer", "GPU-of-the-reader"


class PausingPeerProcess(PeerProcess):
    """A process of `contract.transport_peer`."""

    def __init__(
        self,
        directory: Path,
        arena_mib: int = 16,
        devices: str = "host",
        checksums: bool = False,
        device_uuid: str = "",
    ) -> None:
        module = "contract.transport_peer"
        super().__init__(directory, [devices, device_uuid], arena_mib, checksums, module=module, cwd=TESTS)

    def release(self) -> None:
        self.ask("go_on")
        super().release()


def run_reader(devices: str, transport: str, batch: Batch, within_s: float) -> subprocess.Popen[bytes]:
    """A process that fetches a batch; `devices` as for the peer."""
    message = to_proto(batch).SerializeToString().hex()
    command = [sys.executable, "-m", "contract.transport_reader", devices, transport, message, str(within_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS)
