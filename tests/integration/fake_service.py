"""A real process with gRPC health and Describe at an address, and the manners its flags give it."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rlhf.v1 import worker_pb2, worker_pb2_grpc

EPOCH = 7
STOP_S = 2.0


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Knows its epoch and that it has one rank, and nothing else."""

    def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(epoch=EPOCH, ranks=[worker_pb2.RankInfo()])


def serve(
    address: str, status: Any = health_pb2.HealthCheckResponse.SERVING, linger: Path | None = None
) -> None:
    """Serves until SIGTERM, and keeps the address until there is a file `linger`."""
    # Before gRPC starts threads: one that handled the signal would not wake up this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    server = grpc.server(ThreadPoolExecutor(), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(FakeWorker(), server)
    server.add_insecure_port(address)
    server.start()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        threading.Event().wait()
    signal.sigwait({signal.SIGTERM})
    servicer.enter_graceful_shutdown()
    while linger and not linger.exists():
        time.sleep(0.02)
    server.stop(grace=None).wait(STOP_S)
    os._exit(0)


def main() -> None:
    """Behaves as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument(
        "--fatal", help="Say this fatal line and exit with 2, as a service that refuses its configuration."
    )
    parser.add_argument("--crash", help="Say this line and exit with 3.")
    parser.add_argument("--once", type=Path, help="Exit with 3 if this file exists; else make it.")
    parser.add_argument("--ignore-sigterm", action="store_true", help="Have to be killed, and a child too.")
    parser.add_argument("--linger", type=Path, help="After SIGTERM, keep the address until this file exists.")
    parser.add_argument("--hide-environment", action="store_true", help="Overwrite it, as setproctitle does.")
    parser.add_argument("--not-serving", action="store_true", help="Never become healthy.")
    flags = parser.parse_args()
    if flags.fatal:
        print(f"fatal: {flags.fatal}", file=sys.stderr)
        sys.exit(2)
    if flags.crash:
        print(flags.crash, file=sys.stderr)
        sys.exit(3)
    if flags.once:
        if flags.once.exists():
            sys.exit(3)
        flags.once.touch()
    if flags.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Ignored signals stay ignored across exec. The child has a session and an environment of its own.
        subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    if flags.hide_environment:
        begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
        ctypes.memset(begin, 0, end - begin)
    states = health_pb2.HealthCheckResponse
    serve(flags.address, states.NOT_SERVING if flags.not_serving else states.SERVING, flags.linger)


if __name__ == "__main__":
    main()
