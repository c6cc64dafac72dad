"""The quickstart's task across two hosts: this one, and a network namespace that stands for another. Ranks on one
host share memory, ranks on two use tcp, and the numbers are those of one host."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from controller.config import Config
from controller.tracking.metrics import read_metrics
from integration.harness import Processes, Service, free_ports, is_listening, wait_until, write_config

IP = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        os.geteuid() != 0 or IP is None, reason="making a network namespace needs root and iproute2"
    ),
]
ROLES = ("actor", "critic", "reference", "reward")
THERE = ("critic", "reward")
"""What runs on the other host; the actor, the reference and the controller run on this one."""
PORT = 29411
"""In a namespace of their own ports are free."""


@dataclass(frozen=True)
class TwoHosts:
    """Addresses of this host and of the other, and how commands run there."""

    here: str
    there: str
    namespace: str

    def on_there(self, *command: str) -> tuple[str, ...]:
        program = Path(sys.executable).parent / command[0]
        return (str(IP), "netns", "exec", self.namespace, str(program), *command[1:])


def ip(*arguments: str) -> None:
    subprocess.run((str(IP), *arguments), check=True, capture_output=True, timeout=10)


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    name = f"rlhf{os.getpid()}"
    net = f"10.{random.SystemRandom().randrange(64, 128)}.{random.SystemRandom().randrange(256)}"
    hosts = TwoHosts(f"{net}.1", f"{net}.2", name)
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("address", "add", f"{hosts.here}/24", "dev", name)
        ip("link", "set", name, "up")
        for change in (
            ("address", "add", f"{hosts.there}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", name, *change)
        yield hosts
    finally:
        ip("netns", "delete", name)


def addressed(config: Config, addresses: dict[str, str], directory: Path) -> Config:
    services = {
        role: config.services[role].model_copy(update={"address": address})
        for role, address in addresses.items()
    }
    run = config.run.model_copy(update={"directory": directory, "steps": 2})
    return config.model_copy(update={"services": services, "run": run})


def run(config: Config, path: Path, processes: Processes, *arguments: str) -> Path:
    """A run from start to end; returns its directory."""
    controller = processes.start(
        "rlhf-controller", "--algo", "ppo", "--config", str(write_config(config, path)), *arguments
    )
    out, err = controller.communicate(timeout=150)
    assert controller.returncode == 0, out + err
    (directory,) = config.run.directory.glob("test-*")
    return directory


def numbers(directory: Path) -> list[dict[str, float]]:
    """The metrics that the seed determines."""
    free = ("time/", "mem/", "transfer/")
    return [{k: v for k, v in line.items() if not k.startswith(free)} for line in read_metrics(directory)]


def received(service: Service) -> dict[str, int]:
    """Bytes that reached the service, by transport."""
    totals: dict[str, int] = {}
    for rank in service.ranks:
        for name, traffic in service.ask("Stat", rank).traffic.items():
            totals[name] = totals.get(name, 0) + traffic.bytes
    return {name: count for name, count in totals.items() if count}


def test_a_run_across_two_hosts_gives_the_numbers_of_one(
    hosts: TwoHosts, config: Config, tmp_path: Path
) -> None:
    here = iter(free_ports(2 + len(ROLES)))
    addresses = {
        role: f"{hosts.there}:{PORT + number}" if role in THERE else f"{hosts.here}:{next(here)}"
        for number, role in enumerate(ROLES)
    }
    apart = addressed(config, addresses, tmp_path / "apart")
    together = addressed(config, {role: f"127.0.0.1:{next(here)}" for role in ROLES}, tmp_path / "together")
    path = write_config(apart, tmp_path / "apart.toml")
    processes = Processes()
    try:
        for role in ROLES:
            ranks = str(apart.services[role].ranks)
            command = (
                "torchrun", "--standalone", "--nproc-per-node", ranks, "-m", f"services.{role}", "--config", str(path),
            )  # fmt: skip
            processes.start(*(hosts.on_there(*command) if role in THERE else command))
        for role, address in addresses.items():
            wait_until(lambda address=address: is_listening(address), 60, f"{role} at {address}")
        directory = run(apart, tmp_path / "apart.toml", processes)
        traffic = {}
        for role in ROLES:
            service = Service(role, addresses[role])
            traffic[role] = received(service)
            service.close()
        # Both read the actor's tokens, one on the actor's host and one on the other.
        assert set(traffic["reference"]) == {"memfd"}
        assert set(traffic["critic"]) == {"tcp"}
        processes.kill()
        one_host = run(together, tmp_path / "together.toml", processes, "--launch")
        assert numbers(directory) == numbers(one_host)
        sha256 = [json.loads((d / "summary.json").read_text())["actor_sha256"] for d in (directory, one_host)]
        assert sha256[0] == sha256[1]
    finally:
        processes.kill()
