"""Who listens where: the TCP sockets of processes, by inode, from the tables of their network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from controller.config.config import Config

LISTENING = "0A"


def listeners(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Host and port of every TCP socket on which one of the processes accepts connections."""
    return {place for process in processes for place in _listeners_of(process.pid)}


def _listeners_of(pid: int) -> Iterator[tuple[str, int]]:
    inodes = set(_socket_inodes(pid))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        # A process may end while it is looked at.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    yield _host(address, family), int(port, 16)


def _socket_inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                    yield found[1]


def _host(text: str, family: int) -> str:
    """The kernel writes each 32 bits of an address as a number of this machine."""
    words = [int(text[first : first + 8], 16) for first in range(0, len(text), 8)]
    host = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return host.removeprefix("::ffff:")


def assert_closed(processes: Iterable[psutil.Process], config: Config) -> None:
    """Checks that the processes, services of a config on loopback, listen there and nowhere else."""
    found = listeners(processes)
    addresses = {
        (host, int(port)) for host, _, port in (t.address.rpartition(":") for t in config.services.values())
    }
    assert addresses <= found
    # Each rank serves RPCs and bytes, and gloo holds two sockets where there are several.
    ranks = [table.ranks for table in config.services.values()]
    assert len(found) >= sum(4 * count if count > 1 else 2 for count in ranks)
    assert {host for host, _ in found} == {host for host, _ in addresses}


def ports_by_process(processes: Iterable[psutil.Process]) -> dict[int, set[tuple[str, int]]]:
    """Host and port of every TCP socket on which a process accepts connections, by process id; without processes that
    have none."""
    found = {process.pid: set(_listeners_of(process.pid)) for process in processes}
    return {pid: places for pid, places in found.items() if places}


def attack(processes: Iterable[psutil.Process], marker: Path) -> list[str]:
    """Writes pickles that make `marker` into every store of torch among the listeners; returns where there were any."""
    places = {f"{'127.0.0.1' if is_any(host) else host}:{port}" for host, port in listeners(processes)}
    command = [sys.executable, str(Path(__file__).with_name("store_attack.py")), str(marker), *sorted(places)]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True, env=environment)
    return ran.stdout.splitlines()


def is_any(host: str) -> bool:
    """Whether who listens there does so on every interface."""
    return host in ("0.0.0.0", "::")
