"""Settings of gRPC made before its import, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

VARIABLE = "GRPC_EXPERIMENTS"
RANK = "services.__main__"
COUNT_HANDS = """
import asyncio, os, sys
__import__(sys.argv[1])
import grpc.aio

def switches():
    tasks = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm, open(f"/proc/self/task/{task}/status") as status:
            name, text = comm.read().strip(), status.read()
        tasks[name] = tasks.get(name, 0) + int(text.split("\\nvoluntary_ctxt_switches:")[1].split()[0])
    return tasks.get("event_engine", 0)

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    for call in range(220):
        if call == 20:
            before = switches()
        try:
            await channel.unary_unary("/a/b")(b"")
        except grpc.RpcError:
            pass
    print((switches() - before) / 200)

asyncio.run(main())
"""


def switches_a_call(package: str, **environment: str) -> float:
    """How often the threads of gRPC's EventEngine wait, in a call of a process to itself: the most of three runs, as on
    busy cores some messages are there before a thread would wait."""
    return max(count_switches(package, environment) for _ in range(3))


def count_switches(package: str, environment: Mapping[str, str]) -> float:
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-c", COUNT_HANDS, package],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return float(ended.stdout)


def test_a_rank_hands_messages_on_less_often_than_a_process_that_leaves_grpc_as_it_is() -> None:
    assert switches_a_call(RANK) < 0.75 * switches_a_call("rlhf")


def test_what_the_user_sets_counts() -> None:
    stays = switches_a_call(RANK, GRPC_EXPERIMENTS="-unconstrained_max_quota_buffer_size")
    assert stays > 0.75 * switches_a_call("rlhf")


def test_processes_that_are_started_choose_for_themselves() -> None:
    look = f"import {RANK}, os; print(os.environ.get('{VARIABLE}'))"
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-c", look], env=inherited, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "None"
