"""The quickstart's task across two hosts: this one, and a network namespace that stands for another. Ranks on one
host share memory, ranks on two use tcp, be they of one service or of several, and the numbers are those of one host."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from controller.config.config import Config, load
from controller.tracking.metrics import read_metrics
from deploy import state
from deploy.certificates import TABLE, write_certificates
from deploy.peers import PEER_TIMEOUT_S
from integration.conftest import Task
from integration.harness import (
    ROOT,
    Processes,
    Service,
    free_ports,
    is_listening,
    wait_for_line,
    wait_until,
    write_config,
)
from integration.listeners import attack, is_any, listeners
from rlhf.errors import OutOfStep, ServiceLost
from rlhf.security import adopted
from settings.security import SecurityTable, load_security
from settings.strict import read_toml

IP = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        os.geteuid() != 0 or IP is None, reason="making a network namespace needs root and iproute2"
    ),
]
ROLES = ("actor", "critic", "reference", "reward")
TWO_NODES = ROOT / "deploy" / "examples" / "two_nodes.toml"
CERTIFICATE = {
    "ca": "certs/ca.pem",
    "certificate": "certs/service.pem",
    "key": "certs/service.key",
    **{f"{access}_token_file": f"certs/{access}.token" for access in ("read", "call", "administer")},
}
THERE = ("critic", "reward")
"""Roles on the other host; the actor, the reference and the controller run on this one."""
PORT = 29411
"""In a namespace of their own ports are free."""
CALL_S = 20.0
END_S = 40.0
"""Longest that torchrun takes to end once a rank of its host has."""


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
    trusted = SecurityTable(allow_plaintext=True)
    return config.model_copy(update={"services": services, "run": run, "security": trusted})


def run(config: Config, path: Path, processes: Processes) -> Path:
    """A run from start to end; returns its directory."""
    controller = processes.start("rlhf-controller", "--algo", "ppo", "--config", str(path))
    out, err = controller.communicate(timeout=150)
    assert controller.returncode == 0, out + err
    (directory,) = config.run.directory.glob("test-*")
    return directory


def numbers(directory: Path) -> list[dict[str, float]]:
    """The metrics that the seed determines."""
    free = ("time/", "mem/", "transfer/", "rank/")
    return [{k: v for k, v in line.items() if not k.startswith(free)} for line in read_metrics(directory)]


def received(service: Service) -> dict[str, int]:
    """Bytes that reached the service, by transport."""
    totals: dict[str, int] = {}
    for rank in service.ranks:
        for name, traffic in service.ask("Stat", rank).traffic.items():
            totals[name] = totals.get(name, 0) + traffic.bytes
    return {name: count for name, count in totals.items() if count}


@dataclass(frozen=True)
class Outcome:
    """Results of a run that its seed determines: metrics of each step, and a hash of the weights."""

    numbers: list[dict[str, float]]
    sha256: str

    @staticmethod
    def of(directory: Path) -> Outcome:
        sha256 = json.loads((directory / "summary.json").read_text())["actor_sha256"]
        return Outcome(numbers(directory), sha256)


@pytest.fixture(scope="module")
def one_host(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run with all services on one host."""
    directory = tmp_path_factory.mktemp("together")
    addresses = {role: f"127.0.0.1:{port}" for role, port in zip(ROLES, free_ports(len(ROLES)), strict=True)}
    together = addressed(config, addresses, directory)
    path = write_config(together, directory / "together.toml")
    processes = Processes()
    try:
        processes.serve(path, directory / "logs")
        return Outcome.of(run(together, path, processes))
    finally:
        processes.kill()


@pytest.fixture
def apart(hosts: TwoHosts, config: Config, tmp_path: Path) -> Config:
    """The run with services on two hosts."""
    here = iter(free_ports(len(ROLES)))
    addresses = {
        role: f"{hosts.there}:{PORT + number}" if role in THERE else f"{hosts.here}:{next(here)}"
        for number, role in enumerate(ROLES)
    }
    return addressed(config, addresses, tmp_path)


def torchrun(role: str, path: Path, *flags: str) -> tuple[str, ...]:
    return ("torchrun", *flags, "-m", "services", role, "--config", str(path))


def on_one(role: str, config: Config, path: Path) -> tuple[str, ...]:
    """How all ranks of a service are started on one host."""
    return torchrun(role, path, "--rdzv-backend=rlhf", f"--nproc-per-node={config.services[role].ranks}")


def on_both(role: str, hosts: TwoHosts, path: Path, port: int) -> list[tuple[str, ...]]:
    """How a service is started with a rank on each host, which meet at a port of this one. Here it listens on all
    addresses, as it may."""
    flags = (
        "--rdzv-backend=rlhf",
        f"--rdzv-endpoint={hosts.here}:{port}",
        "--nnodes=2",
        "--nproc-per-node=1",
    )
    here, there = (torchrun(role, path, f"--rdzv-conf=rank={rank}", *flags) for rank in range(2))
    return [(*here, "--set", f"services.{role}.bind_host=0.0.0.0"), hosts.on_there(*there)]


def few_rows(addresses: Mapping[str, str], steps: int) -> tuple[str, ...]:
    """Settings of the shipped config of two nodes: addresses, steps, few rows, and a reward that differs between the
    responses of an untrained model."""
    at = (f"services.{role}.address='{address}'" for role, address in addresses.items())
    # With matmul = "auto" each service measures for itself, and two that are started at different loads may differ.
    same = (f"services.{role}.matmul=mkl" for role in addresses)
    sizes = ("data.prompts_per_step=32", "algorithm.mini_batch_size=16", "run.evaluate_every=0")
    reward = "services.reward.function='toy_rewards:digit_mean'"
    return (*at, *same, *sizes, reward, f"run.steps={steps}")


def flags(settings: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for setting in settings for part in ("--set", setting))


@pytest.fixture
def nodes(hosts: TwoHosts, task: Task, tmp_path: Path) -> dict[str, str]:
    """Addresses of the services of the shipped config, node-0 being this host, and a working directory with all that
    the config names. Paths of the two hosts are the same, as on a file system that they share."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "arithmetic").symlink_to(task.directory)
    write_certificates(tmp_path / "certs", ("rlhf",), days=1)
    places = {"node-0": hosts.here, "node-1": hosts.there}
    tables = load(TWO_NODES).services
    names = {role: table.address.rpartition(":")[0] for role, table in tables.items()}
    here = iter(free_ports(len(tables)))
    return {
        role: f"{places[name]}:{next(here) if name == 'node-0' else PORT + number}"
        for number, (role, name) in enumerate(names.items())
    }


@contextmanager
def up_on_both(
    hosts: TwoHosts, settings: tuple[str, ...], directory: Path
) -> Iterator[tuple[Processes, subprocess.Popen[str], subprocess.Popen[str]]]:
    """`rlhf-deploy up` of the shipped config on both hosts, once both are ready. This host is found by its address; the
    other is told its name."""
    command = ("rlhf-deploy", "up", str(TWO_NODES), *flags(settings))
    processes = Processes()
    try:
        here = processes.start(*command, cwd=directory)
        there = processes.start(*hosts.on_there(*command, "--host", "node-1"), cwd=directory)
        for each in (here, there):
            wait_for_line(each, "ready\n", 110)
        yield processes, here, there
    finally:
        processes.kill()
        for host in ("node-0", "node-1"):  # a killed launcher leaves the file that `down` removes
            if left := state.find(TWO_NODES, host):
                state.stop(left, grace_s=1)


def traffic_of(config: Config) -> dict[str, dict[str, int]]:
    """Bytes that reached each service, by transport."""
    traffic = {}
    for role in ROLES:
        service = Service(role, config.services[role].address)
        traffic[role] = received(service)
        service.close()
    return traffic


@contextmanager
def serving(
    commands: Iterable[tuple[str, ...]], config: Config, roles: Iterable[str] = ROLES
) -> Iterator[Processes]:
    """The services of these roles, which these commands start."""
    processes = Processes()
    try:
        for command in commands:
            processes.start(*command)
        for role in roles:
            address = config.services[role].address
            wait_until(lambda address=address: is_listening(address), 60, f"{role} at {address}")
        yield processes
    finally:
        processes.kill()


@pytest.mark.full
def test_services_on_two_hosts_give_the_numbers_of_one(
    hosts: TwoHosts, apart: Config, one_host: Outcome, tmp_path: Path
) -> None:
    path = write_config(apart, tmp_path / "apart.toml")
    commands = {role: on_one(role, apart, path) for role in ROLES}
    commands |= {role: hosts.on_there(*commands[role]) for role in THERE}
    with serving(commands.values(), apart) as processes:
        outcome = Outcome.of(run(apart, path, processes))
        traffic = traffic_of(apart)
    assert outcome == one_host
    # Both read the actor's tokens, one on the actor's host and one on the other.
    assert set(traffic["reference"]) == {"memfd"}
    assert set(traffic["critic"]) == {"tcp"}


@pytest.mark.full
def test_a_service_over_two_hosts_gives_the_numbers_of_one(
    hosts: TwoHosts, apart: Config, one_host: Outcome, tmp_path: Path
) -> None:
    path = write_config(apart, tmp_path / "apart.toml")
    (port,) = free_ports(1)
    marker = tmp_path / "ran"
    actor = on_both("actor", hosts, path, port)
    others = [
        hosts.on_there(*command) if role in THERE else command
        for role in ROLES[1:]
        for command in [on_one(role, apart, path)]
    ]
    with serving([*actor, *others], apart) as processes:
        outcome = Outcome.of(run(apart, path, processes))
        traffic = traffic_of(apart)
        service = Service("actor", apart.services["actor"].address)
        reached = [address.rpartition(":")[0] for address in service.addresses]
        listening = listeners(processes.living())
        stores = attack(processes.living(), marker)
        assert len(service.versions) == 2
        service.close()
    # What was told to listen everywhere: rank 0 of the actor, for RPCs and for bytes.
    assert sum(is_any(host) for host, _ in listening) == 2
    assert {host for host, _ in listening if not is_any(host)} == {hosts.here, hosts.there, "127.0.0.1"}
    assert stores == [f"{hosts.here}:{port}"]
    assert not marker.exists()
    assert reached == [hosts.here, hosts.there]
    assert outcome == one_host
    # Each reads the tokens of the actor's rank beside it, and of the one on the other host.
    assert set(traffic["reference"]) == set(traffic["critic"]) == {"memfd", "tcp"}


@pytest.mark.full
def test_a_rank_that_dies_on_one_host_ends_the_service_on_both_with_the_next_call(
    hosts: TwoHosts, apart: Config, tmp_path: Path
) -> None:
    path = write_config(apart, tmp_path / "apart.toml")
    (port,) = free_ports(1)
    with serving(on_both("actor", hosts, path, port), apart, ["actor"]) as processes:
        service = Service("actor", apart.services["actor"].address)
        os.kill(service.description.ranks[1].pid, signal.SIGKILL)
        survivor, dead = service.start("offload", timeout_s=CALL_S).outcomes()
        assert isinstance(survivor, OutOfStep)
        assert isinstance(dead, ServiceLost)
        wait_until(lambda: not processes.living(), END_S, "the service's end on both hosts")
        service.close()


@pytest.mark.full
def test_services_with_certificates_on_two_hosts_give_the_numbers_of_one(
    hosts: TwoHosts, apart: Config, one_host: Outcome, tmp_path: Path
) -> None:
    write_certificates(tmp_path / "certificates", (hosts.here, hosts.there), days=1)
    file = tmp_path / "certificates" / TABLE
    secured = SecurityTable.model_validate(read_toml(file)["security"])
    config = apart.model_copy(update={"security": secured})
    path = write_config(config, tmp_path / "secure.toml")
    commands = {role: on_one(role, config, path) for role in ROLES}
    commands |= {role: hosts.on_there(*commands[role]) for role in THERE}
    with serving(commands.values(), config) as processes:
        outcome = Outcome.of(run(config, path, processes))
        with adopted(load_security(file)):
            traffic = traffic_of(config)
        for role in ROLES:
            with (
                grpc.insecure_channel(config.services[role].address) as channel,
                pytest.raises(grpc.RpcError),
            ):
                channel.unary_unary("/rlhf.v1.WorkerService/Describe")(b"", timeout=CALL_S)
    assert outcome == one_host
    assert set(traffic["reference"]) == {"memfd"}
    assert set(traffic["critic"]) == {"tcp"}


def test_one_command_on_each_host_starts_its_ranks_and_gives_the_numbers_of_one_host(
    hosts: TwoHosts, nodes: dict[str, str], tmp_path: Path
) -> None:
    """The shipped config, with certificates and tokens, and its run on one host."""
    run_it = ("rlhf-controller", "--algo", "ppo", "--config", str(TWO_NODES))
    outcomes: list[Outcome] = []

    def run_two_steps(processes: Processes, *arguments: str) -> None:
        directory = tmp_path / "runs" / f"run-{len(outcomes)}"
        controller = processes.start(
            *run_it, *arguments, *flags([f"run.directory={directory}"]), cwd=tmp_path
        )
        out, err = controller.communicate(timeout=150)
        assert controller.returncode == 0, out + err
        (made,) = directory.glob("two-nodes-*")
        outcomes.append(Outcome.of(made))

    settings = few_rows(nodes, steps=2)
    with up_on_both(hosts, settings, tmp_path) as (processes, here, there):
        run_two_steps(processes, *flags(settings))
        security = (*settings, *(f"security.{key}={tmp_path / name}" for key, name in CERTIFICATE.items()))
        with adopted(load_security(TWO_NODES, security)):
            service = Service("actor", nodes["actor"])
            reached = [address.rpartition(":")[0] for address in service.addresses]
            service.close()
        ask = ("rlhf-deploy", "status", str(TWO_NODES), "--host")
        shown = [processes.start(*ask, f"node-{n}", cwd=tmp_path).communicate(timeout=30)[0] for n in (0, 1)]
        for host in ("node-0", "node-1"):
            down = processes.start("rlhf-deploy", "down", str(TWO_NODES), "--host", host)
            assert down.communicate(timeout=60) == (f"{TWO_NODES}: stopped\n", "")
        said = [each.communicate(timeout=10)[1] for each in (here, there)]
        assert not processes.living()
        alone = {role: f"127.0.0.1:{port}" for role, port in zip(ROLES, free_ports(len(ROLES)), strict=True)}
        on_one_host = few_rows(alone, steps=2)
        processes.serve(TWO_NODES, tmp_path / "logs", *on_one_host, cwd=tmp_path)
        run_two_steps(processes, *flags(on_one_host))
    assert outcomes[0] == outcomes[1]
    assert [line["step"] for line in outcomes[0].numbers] == [0, 1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in outcomes[0].numbers[1:])
    assert reached == [hosts.here, hosts.there]
    services = [{line.split()[0] for line in each.splitlines() if "serving" in line} for each in shown]
    assert services == [{"actor", "reference"}, {"actor", "critic", "reward"}]
    assert (here.returncode, there.returncode) == (0, 0)
    assert "actor: started, rank 0 of 2" in said[0]
    assert "actor: started, rank 1 of 2" in said[1]
    logs = tmp_path / "runs" / "logs" / "two_nodes"
    assert {log.stem for log in (logs / "node-0").glob("*.log")} == services[0]
    assert {log.stem for log in (logs / "node-1").glob("*.log")} == services[1]


@pytest.mark.full
def test_a_host_whose_supervisor_is_killed_ends_the_run_and_the_services_of_the_other(
    hosts: TwoHosts, nodes: dict[str, str], tmp_path: Path
) -> None:
    settings = few_rows(nodes, steps=1000)
    with up_on_both(hosts, settings, tmp_path) as (processes, here, there):
        controller = processes.start(
            *("rlhf-controller", "--algo", "ppo", "--config", str(TWO_NODES), *flags(settings)), cwd=tmp_path
        )
        wait_until(lambda: [*tmp_path.glob("runs/two-nodes-*/metrics.jsonl")], 60, "the run's first step")
        there.kill()
        _, err = controller.communicate(timeout=90)
        assert controller.returncode == 1, err
        assert re.search(r"^error: (actor rank 1|critic rank 0|reward rank 0) \(", err, re.MULTILINE), err
        _, said = here.communicate(timeout=END_S)
        assert here.returncode == 1, said
        assert re.search(r"^error: service actor: ", said, re.MULTILINE), said
        wait_until(lambda: not processes.living(), END_S, "the end of all processes on both hosts")


@pytest.mark.full
def test_a_host_that_is_killed_between_runs_ends_the_services_of_the_other(
    hosts: TwoHosts, nodes: dict[str, str], tmp_path: Path
) -> None:
    with up_on_both(hosts, few_rows(nodes, steps=1), tmp_path) as (processes, here, there):
        there.kill()
        _, said = here.communicate(timeout=PEER_TIMEOUT_S + END_S)
        assert here.returncode == 1, said
        assert f"error: service actor: rank 1 on node-1, at {hosts.there}:" in said
        wait_until(lambda: not processes.living(), END_S, "the end of all processes on both hosts")


@pytest.mark.full
def test_hosts_with_different_configs_say_which_keys_differ(
    hosts: TwoHosts, nodes: dict[str, str], tmp_path: Path
) -> None:
    command = ("rlhf-deploy", "up", str(TWO_NODES), "--only", "actor", *flags(few_rows(nodes, steps=1)))
    processes = Processes()
    try:
        here = processes.start(*command, "--host", "node-0", cwd=tmp_path)
        other = hosts.on_there(*command, "--host", "node-1", "--set", "services.actor.threads=2")
        there = processes.start(*other, cwd=tmp_path)
        for each in (here, there):
            _, said = each.communicate(timeout=90)
            assert each.returncode == 1
            assert said.splitlines()[-1] == (
                "error: service actor: rank 1 was started with another config than rank 0: threads is 2 there and 1 on "
                "rank 0"
            )
        assert not processes.living()
    finally:
        processes.kill()
