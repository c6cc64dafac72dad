"""One config for several hosts: which ranks `rlhf-deploy` starts on which of them, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from controller.cli import main as rlhf_controller
from controller.config.config import Config
from controller.config.devices import host_of
from controller.config.hosts import rank_hosts
from deploy import cli, hosts, memory, peers, preflight, state, supervisor
from deploy.devices import gpus_by_service
from deploy.hosts import HostPlan, check_stores, store_address, store_listens_on
from deploy.launch import LaunchOptions
from deploy.peers import PeerWatch
from deploy.state import Deployment
from deploy.supervisor import Supervisor
from integration.harness import free_ports
from rlhf.errors import ConfigError, OutOfStep, Refused, RlhfError, ServiceLost
from rlhf.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.runtime import stores
from settings.strict import override, read_toml, validate

CONFIG = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
AT = {
    "actor": "10.0.0.1:7101",
    "critic": "10.0.0.2:7102",
    "reference": "10.0.0.1:7103",
    "reward": "10.0.0.2:7104",
}
"""Addresses on two hosts."""
POOLS = ("pools={both=['a/cpu:0','b/cpu:0'],a=['a/cpu:1'],b=['b/cpu:1']}", "services.actor.pool=both",
         "services.critic.pool=b", "services.reference.pool=a", "services.reward.pool=b")  # fmt: skip
NAMES = list(AT)


def at(**addresses: str) -> tuple[str, ...]:
    return tuple(f"services.{name}.address='{address}'" for name, address in {**AT, **addresses}.items())


def configured(*settings: str) -> Config:
    return validate(Config, override(read_toml(CONFIG), settings), "of the test")


def of(config: Config, given: str | None = None, names: list[str] | None = None) -> HostPlan:
    return HostPlan.of(config, names or NAMES, given)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has none of the addresses and names."""

    def probe(address: str) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(hosts, "probe", probe)
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")


def test_a_device_may_name_its_host() -> None:
    assert [host_of(each) for each in ("a/gpu:0", "rack/1/cpu:12", "gpu:0", "cpu:0", "actor/0", "a/gpu:01")] == [
        "a", "rack/1", "", "", "", "",
    ]  # fmt: skip


def test_ranks_are_on_the_hosts_of_their_devices_and_services_without_on_that_of_their_address() -> None:
    config = configured(*at(), *POOLS, "services.reference.pool=''", "services.reward.external=true")
    assert rank_hosts(config) == {"actor": ("a", "b"), "critic": ("b",), "reference": ("a",)}
    assert rank_hosts(configured(*at()))["actor"] == ("10.0.0.1", "10.0.0.1")
    assert rank_hosts(configured())["actor"] == ("", "")
    placed = configured(*at(critic="10.0.0.1:1"), "placement=colocate", "devices=['a/gpu:0','b/gpu:0']")
    assert rank_hosts(placed)["reward"] == ("a",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("pools.both=['a/gpu:0','gpu:1']",), r"services.actor: a/gpu:0 names a host and gpu:1 does not"),
        (
            ("services.actor.ranks=3", "pools.both=['a/gpu:0','b/gpu:0','a/gpu:1']", "algorithm.mini_batch_size=96",
             "data.prompts_per_step=96"),
            r"services.actor: ranks of a are not consecutive \(devices in rank order: a/gpu:0, b/gpu:0, a/gpu:1\)",
        ),
        (
            ("services.critic.address=10.0.0.1:7102",),
            r"services.critic.address: 10.0.0.1 is the host of services.actor, whose rank 0 is on a, and rank 0 of "
            r"this service is on b",
        ),
    ],
)  # fmt: skip
def test_devices_that_do_not_say_where_ranks_are_are_refused(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rank_hosts(configured(*at(), *POOLS, *settings))


def test_each_rank_is_started_on_one_host_and_numbered_as_torchrun_does() -> None:
    four = "pools.both=['a/cpu:0','a/cpu:1','b/cpu:0','b/cpu:2']"
    config = configured(*at(), *POOLS, "services.actor.ranks=4", four)
    a, b = of(config, "a"), of(config, "b")
    assert (a.names, b.names) == (["actor", "reference"], ["actor", "critic", "reward"])
    assert (a.elsewhere, b.elsewhere) == (set(), {"actor"})
    assert (a.ranks("actor"), b.ranks("actor"), b.ranks("critic")) == (range(0, 2), range(2, 4), range(1))
    assert (a.number("actor"), b.number("actor"), b.number("critic")) == (0, 1, 0)
    assert (a.first_ranks_elsewhere("actor"), b.first_ranks_elsewhere("actor")) == ({"b": 2}, {"a": 0})
    assert a.spans("actor")
    assert not b.spans("critic")
    assert of(config, "b", ["critic"]).names == ["critic"]


@pytest.mark.parametrize(
    "settings",
    [
        (),
        at(critic="10.0.0.1:7102", reward="127.0.0.1:7104"),
        ("pools={both=['a/cpu:0','b/cpu:0']}", "services.actor.pool=both"),
        ("pools={both=['a/cpu:0','left']}", "services.actor.pool=both"),
    ],
)
def test_a_config_of_one_host_is_started_whole_whatever_its_name(
    settings: tuple[str, ...], nowhere: None
) -> None:
    plan = of(configured(*settings))
    assert (plan.host, plan.names, plan.elsewhere, plan.ranks("actor")) == ("", NAMES, set(), range(2))
    assert not any(map(plan.spans, NAMES))


@pytest.mark.parametrize(
    ("hostname", "has", "expected"),
    [("a", (), "a"), ("b.cluster.example", (), "b"), ("x", ("10.0.0.1",), "a"), ("x", ("b",), "b")],
)
def test_this_host_is_found_by_its_name_or_its_addresses(
    hostname: str, has: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch, nowhere: None
) -> None:
    elsewhere = hosts.probe
    monkeypatch.setattr(
        hosts, "probe", lambda address: None if address.rpartition(":")[0] in has else elsewhere(address)
    )
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    assert of(configured(*at(), *POOLS)).host == expected


def test_this_host_has_the_same_name_whichever_services_are_started(
    monkeypatch: pytest.MonkeyPatch, nowhere: None
) -> None:
    config = configured(*at(), *POOLS)

    def has_address(address: str) -> None:
        if not address.startswith("10.0.0.2:"):
            raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(hosts, "probe", has_address)
    assert of(config).host == "b"
    for names in (["critic"], ["actor"], ["actor", "critic"]):
        assert (of(config, names=names).host, of(config, names=names).names) == ("b", names)
    with pytest.raises(
        ConfigError, match="this host is b: no rank is on this host; hosts of the services: a"
    ):
        of(config, names=["reference"])


def test_where_the_name_of_this_host_is_unclear_the_services_that_are_started_decide(
    monkeypatch: pytest.MonkeyPatch, nowhere: None
) -> None:
    assert of(configured(*at(), *POOLS), names=["critic"]).host == ""
    monkeypatch.setattr(hosts, "probe", lambda address: None)  # it has all addresses
    assert of(configured(*at(), *POOLS), names=["critic", "reward"]).host == ""


def test_all_services_are_started_where_all_addresses_are_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "probe", lambda address: None)
    assert of(configured(*at())).names == NAMES
    with pytest.raises(
        ConfigError, match="hosts a, b, of which a and b are both this host; name it by --host"
    ):
        of(configured(*at(), *POOLS))


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        ((*at(), *POOLS), None, r"on hosts a, b, of which none is this host, laptop; name it by --host"),
        ((*at(), *POOLS), "c", r"--host c: no rank is on this host; hosts of the services: a, b"),
        ((), "a", r"--host a: the config names no hosts: no devices are HOST/gpu:N or HOST/cpu:N"),
        ((*at(reward="127.0.0.1:7104"), *POOLS), "a", r"services.reward.address: 127.0.0.1:7104 is reached from its"),
        (POOLS, "a", r"services.actor.address: 127.0.0.1:7101 is reached from its own host alone, .*: a, b"),
        (
            (*at(reward="10.0.0.3:7104"), *POOLS, "services.reward.pool=''"),
            "b",
            r"services.reward.address: 10.0.0.3:7104 is on none of the hosts that devices name: a, b; place the",
        ),
    ],
)  # fmt: skip
def test_hosts_that_are_not_clear_are_refused(
    settings: tuple[str, ...], given: str | None, said: str, nowhere: None
) -> None:
    with pytest.raises(ConfigError, match=said):
        of(configured(*settings), given)


def test_ranks_see_the_gpus_of_their_own_host() -> None:
    gpus = ("pools={both=['a/gpu:1','a/gpu:0','b/gpu:3','b/gpu:2','b/gpu:0'],b=['b/gpu:1']}",
            "services.actor.pool=both", "services.actor.ranks=4", "services.critic.pool=b")  # fmt: skip
    on = tuple(f"services.{name}.device=auto" for name in ("actor", "critic"))
    config = configured(*at(), *gpus, *on)
    names = ["actor", "critic"]
    assert gpus_by_service(config, ["actor"], ["4", "5"], "a") == {"actor": ("5", "4")}
    assert gpus_by_service(config, names, ["0", "1", "2", "3"], "b") == {
        "actor": ("3", "2", "0"),
        "critic": ("1",),
    }
    with pytest.raises(ConfigError, match=r"services.actor: there is no b/gpu:3 on this host, which shows 2"):
        gpus_by_service(config, names, ["0", "1"], "b")


def test_the_store_of_several_hosts_has_a_place_of_its_own() -> None:
    table = configured(*at()).services["actor"]
    assert store_address(table) == "10.0.0.1:17101"
    for bind, expected in (
        ("", "10.0.0.1"),
        ("0.0.0.0", "10.0.0.1"),
        ("[::]", "10.0.0.1"),
        ("10.9.9.9", "10.9.9.9"),
    ):
        assert store_listens_on(table.model_copy(update={"bind_host": bind})) == f"{expected}:17101"


def own_address() -> str:
    """An address of this host that is not loopback; one for documents, on loopback, where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return probe.getsockname()[0]


def test_stores_that_cannot_be_opened_are_refused_before_the_start() -> None:
    here, (port, other) = own_address(), free_ports(2)
    place = (*POOLS, "security.allow_plaintext=true")

    def check(*settings: str, host: str = "a", **addresses: str) -> None:
        config = configured(
            *at(**{"actor": f"{here}:{port}", "reference": f"{here}:{other}", **addresses}), *place, *settings
        )
        check_stores(config, of(config, host))

    check()
    check(host="b")
    with pytest.raises(
        ConfigError,
        match=rf"services.actor.address: {here}:{port + 10_000}, where .* is taken by services.reference",
    ):
        check(reference=f"{here}:{port + 10_000}")
    with pytest.raises(
        ConfigError, match=r"services.actor.bind_host: 127.0.0.1 is loopback on this host, and ranks"
    ):
        check("services.actor.bind_host=127.0.0.1")
    with pytest.raises(ConfigError, match=r"services.actor.address: .*:70000, where .* is no address"):
        check(actor=f"{here}:60000")
    with (
        socket.create_server((here, port + 10_000)),
        pytest.raises(
            ConfigError, match=rf"services.actor.address: {here}:{port + 10_000}, .*: Address already in use"
        ),
    ):
        check()


def test_a_service_whose_rank_0_is_elsewhere_does_not_need_its_address_here() -> None:
    config = configured(
        *at(), "security.allow_plaintext=true", "services.actor.model=''", "services.reward.ranks=2"
    )
    with pytest.raises(
        ConfigError, match=r"services.reward.address: 10.0.0.2:7104 is not an address of this host"
    ):
        preflight.check(config, ["reward"])
    preflight.check(config, ["reward"], {"reward"})
    plain = config.model_copy(update={"security": configured().security})
    with pytest.raises(ConfigError, match=r"services.reward.address: other hosts reach 10.0.0.2"):
        preflight.check(plain, ["reward"], {"reward"})


def test_exactly_the_ranks_of_the_host_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes, that print what they were started with."""
    path = tmp_path / "cluster.toml"
    here, there = own_address(), "192.0.2.7"
    ports = free_ports(3)
    tables = {
        "wide": ("both", 5, f"{there}:{ports[0]}"),
        "near": ("b", 1, f"{here}:{ports[1]}"),
        "far": ("a", 1, f"{there}:{ports[2]}"),
    }
    path.write_text(
        '[data]\ntrain = "t.jsonl"\nheldout = "h.jsonl"\n[security]\nallow_plaintext = true\n[pools]\n'
        'both = ["a/gpu:0", "a/gpu:1", "b/gpu:1", "b/gpu:0", "c/gpu:0"]\na = ["a/gpu:2"]\nb = ["b/gpu:2"]\n'
        + "".join(
            f'[services.{name}]\nrole = "reward"\npool = "{pool}"\nranks = {ranks}\naddress = "{address}"\n'
            for name, (pool, ranks, address) in tables.items()
        )
    )
    config = cli.load(path)
    monkeypatch.setattr(supervisor, "visible_gpus", lambda environment: ["4", "5", "6"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CUDA_VISIBLE_DEVICES",
            "RLHF_RENDEZVOUS")  # fmt: skip
    # One write each, since two ranks write to one log.
    program = (
        f"import json, os; print(json.dumps([os.environ.get(key, '') for key in {keys}]) + chr(10), end='')"
    )
    said: list[str] = []
    launcher = LaunchOptions(lambda job: [sys.executable, "-c", program], grace_s=5.0)
    deployment = Deployment(str(path), str(tmp_path), host="b")
    with Supervisor(config, deployment, (), launcher, said.append) as running:
        running.start()
        for service in running._services:
            for process in service.processes:
                process.wait(20)
        with pytest.raises(ServiceLost, match=r"service wide: rank 2 exited with code 0"):
            running.poll()
    seen = {log.stem: sorted(map(json.loads, log.read_text().splitlines())) for log in tmp_path.glob("*.log")}
    store = f"rank0://{there}:{ports[0] + 10_000}"
    assert seen["wide"] == [
        ["2", "0", "5", "2", "1", "5,4", store],
        ["3", "1", "5", "2", "1", "5,4", store],
    ]
    assert seen["near"][0][:6] == ["0", "0", "1", "1", "0", ""], "a function computes on no GPU"
    assert "far" not in seen
    assert said[0].startswith(f"wide: started, ranks 2 to 3 of 5 at {there}:{ports[0]}, GPUs 5, 4, log ")


def join(rank: int, size: int, port: int, table: dict[str, Any], timeout_s: float = 20.0) -> None:
    kept.append(stores.store_of_hosts(f"127.0.0.1:{port}", rank, size, json.dumps(table), timeout_s))


kept: list[Any] = []
"""Stores of ranks that have entered; a store ends with its object."""


def joined(*calls: Callable[[], None]) -> list[RlhfError | None]:
    """Errors of calls that are made at the same time."""
    errors: list[RlhfError | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except RlhfError as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    kept.clear()
    return errors


def test_ranks_of_several_hosts_enter_one_store_with_equal_tables() -> None:
    (port,) = free_ports(1)
    own = {"ranks": 2, "threads": 1, "bind_host": ""}
    other = {**own, "bind_host": "0.0.0.0", "advertise_host": "b", "startup_timeout_s": 7}
    assert joined(lambda: join(0, 2, port, own), lambda: join(1, 2, port, other)) == [None, None]


def test_ranks_with_different_tables_all_say_which_keys_differ() -> None:
    (port,) = free_ports(1)
    tables = {"threads": 1}, {"threads": 1}, {"threads": 2, "model": "m"}
    errors = joined(*(lambda rank=rank: join(rank, 3, port, tables[rank]) for rank in range(3)))
    said = (
        'rank 2 was started with another config than rank 0: model is "m" there and null on rank 0; '
        "threads is 2 there and 1 on rank 0"
    )
    assert [type(error) for error in errors] == [ConfigError] * 3
    assert {str(error) for error in errors} == {said}


def test_a_rank_that_two_hosts_start_is_refused() -> None:
    (port,) = free_ports(1)
    one, *twice = joined(
        lambda: join(0, 2, port, {}), lambda: join(1, 2, port, {}), lambda: join(1, 2, port, {})
    )
    assert one is None
    (refused,) = filter(None, twice)
    assert str(refused).startswith("rank 1 is in the service's store already: another host has started it")


def test_a_rank_waits_no_longer_than_its_time_for_those_of_other_hosts() -> None:
    (port,) = free_ports(1)
    (error,) = joined(lambda: join(0, 3, port, {}, timeout_s=1.0))
    assert str(error) == "rank 0 waited 1 s for ranks of other hosts; missing: 1, 2"
    (port,) = free_ports(1)
    with pytest.raises(
        OutOfStep, match=r"rank 1 waited 1 s for the store of rank 0 at 127.0.0.1:\d+; is rlhf-deploy"
    ):
        join(1, 2, port, {}, timeout_s=1.0)


def test_a_store_whose_port_is_taken_is_told_by_its_place() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot open the store of its service at 127.0.0.1:{port}: Address"
        ):
            join(0, 2, port, {})


def test_each_host_has_a_deployment_and_one_is_found_without_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "run.toml"
    a, b = (Deployment(str(path), f"logs/{host}", host=host) for host in "ab")
    with state.claim(a, grace_s=1):
        assert state.find(path) == state.find(path, "a") == a
        assert state.find(path, "b") is None
        with state.claim(b, grace_s=1):
            assert state.find(path, "b") == b
            with pytest.raises(Refused, match=r"is up for hosts \S, \S; name one by --host"):
                state.find(path)
            for command in (["stacks", str(path)], ["profile", str(path), "actor"]):
                ran = CliRunner().invoke(cli.main, [*command, "--host", "c"])
                assert "No such option" not in ran.output
                assert "name one by --host" not in str(ran.exception)
        with (
            pytest.raises(Refused, match=r"stop it first: rlhf-deploy down .*run.toml --host a"),
            state.claim(a, 1),
        ):
            pass
    assert state.find(path) is None


class Ranks(worker_pb2_grpc.WorkerServiceServicer):
    """Describe of a rank that knows the addresses of all ranks."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        endpoints = [common_pb2.Endpoint(address=address) for address in self.addresses]
        return worker_pb2.DescribeResponse(ranks=[worker_pb2.RankInfo(endpoint=each) for each in endpoints])


def healthy_rank(ranks: Ranks) -> grpc.Server:
    """A server of a rank, at the next of the addresses."""
    server = grpc.server(ThreadPoolExecutor())
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(ranks, server)
    ranks.addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    return server


def test_a_rank_of_another_host_that_no_longer_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEER_TIMEOUT_S", 2.0)
    monkeypatch.setattr(peers, "INTERVAL_S", 0.05)
    ranks = Ranks()
    servers = [healthy_rank(ranks) for _ in range(3)]
    watch = PeerWatch("actor", ranks.addresses[0], {"a": 0, "b": 2})

    def poll_for(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            watch.poll()
            time.sleep(0.01)

    try:
        time.sleep(2.5)  # a service takes its time to start
        poll_for(4.0)
        servers[2].stop(None).wait()
        with pytest.raises(
            ServiceLost,
            match=rf"service actor: rank 2 on b, at {ranks.addresses[2]}, has not answered for 2 s \(.*refused.*\); "
            "the host is lost, or rlhf-deploy has ended there",
        ):
            poll_for(20.0)
    finally:
        watch.close()
        for server in servers:
            server.stop(None).wait()


def test_a_pause_of_the_supervisor_does_not_count_as_time_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks()
    server = healthy_rank(ranks)
    watch = PeerWatch("actor", ranks.addresses[0], {"a": 0})
    suspended_s = 0.0
    clock = time.monotonic
    monkeypatch.setattr(peers.time, "monotonic", lambda: clock() + suspended_s)
    try:
        watch.poll()
        suspended_s = 2 * peers.PEER_TIMEOUT_S  # Ctrl-Z, then fg
        watch.poll()
        server.stop(None).wait()
        for _ in range(10):  # each of them shorter than a pause
            suspended_s += 0.9 * peers.PAUSE_S
            with contextlib.suppress(ServiceLost):
                watch.poll()
                continue
            break
        else:
            pytest.fail("a rank that does not answer is not named")
    finally:
        watch.close()
        server.stop(None).wait()


def test_the_dry_run_refuses_addresses_beyond_loopback_as_the_start_does() -> None:
    def dry_run(*settings: str) -> Any:
        flags = [part for setting in settings for part in ("--set", setting)]
        return CliRunner().invoke(rlhf_controller, ["--algo", "ppo", "--dry-run", *flags])

    beyond = "services.actor.address=192.0.2.1:7101"
    assert dry_run().exit_code == 0
    refused = dry_run(beyond)
    assert refused.exit_code == 2
    assert refused.output.startswith(
        "error: services.actor.address: other hosts reach 192.0.2.1, and anybody"
    )
    assert dry_run(beyond, "security.allow_plaintext=true").exit_code == 0
    assert dry_run(beyond, "services.actor.external=true").exit_code == 0


def test_check_of_a_host_without_gpus_says_how_to_check_one_with() -> None:
    class Service:
        ranks, on_cpu = 8, 10**12

    services: Any = {"actor": Service(), "critic": Service()}
    config = configured("services.actor.device=auto")
    (line,) = memory._host_misfits(config, services, {"critic": 1}, 10**9)
    assert "all ranks together need 9000.00 GB of host memory" in line
    assert "on which actor would compute, give the memory of one with --device-memory-gb" in line
    (line,) = memory._host_misfits(configured(), services, {}, 10**9)
    assert "--device-memory-gb" not in line
