"""Failures in a run over services started by hand: it ends in time, with one line that names the culprit.

The services are started once for all tests, as in the README; what a test has killed the next one starts again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from chaos.conftest import (
    ENDS_WITHIN_S,
    ROLES,
    START_TIMEOUT_S,
    Program,
    Site,
    describe,
    free_port,
    wait_for_call,
    wait_until,
    watch_until,
    with_vocabulary,
)

from deploy import health
from rlhf.v1 import worker_pb2

pytestmark = pytest.mark.slow

CALL_TIMEOUT_S = 4
TOLD_WITHIN_S = 20.0
"""Longest until a run has told that a rank is stopped, and has ended."""
STUCK_LEAVES_WITHIN_S = 10.0
"""Longest a rank with a stuck call lives on after the run that called it has ended."""
USAGE_ERROR = 2


class Services:
    """The services of a site, each under a torchrun of its own."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.torchruns: dict[str, Program] = {}

    def start(self, *names: str) -> None:
        """Starts those that are not running."""
        for name in names:
            if name not in self.torchruns or self.torchruns[name].has_ended:
                self.torchruns[name] = self.site.torchrun(name)

    def wait(self, *names: str) -> None:
        """Waits until these serve."""
        for name in names:
            wait_until(lambda name=name: self._serves(name), START_TIMEOUT_S)

    def address(self, name: str) -> str:
        return self.site.address(name)

    def rank(self, name: str, rank: int) -> worker_pb2.RankInfo:
        return describe(self.address(name)).ranks[rank]

    def stop(self) -> None:
        """Stops all, as Ctrl-C in every terminal would."""
        for torchrun in self.torchruns.values():
            if not torchrun.has_ended:
                torchrun.send(signal.SIGTERM)
        for torchrun in self.torchruns.values():
            torchrun.end()

    def _serves(self, name: str) -> bool:
        assert not self.torchruns[name].has_ended, self.torchruns[name].output
        return health.ask(self.address(name)).state == health.SERVING


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Services]:
    """Services started by hand, and beside the critic one with another vocabulary."""
    site = Site(tmp_path_factory.mktemp("services"))
    (site.directory / "model").symlink_to(model)
    with_vocabulary(model, site.directory / "other_model", lambda ids: ids.update(a=ids["b"], b=ids["a"]))
    other = {
        **site.config["services"]["critic"],
        "address": f"127.0.0.1:{free_port()}",
        "model": "other_model",
    }
    site.config["services"]["other_critic"] = other
    site.write_config()
    services = Services(site)
    services.start(*ROLES, "other_critic")
    try:
        yield services
        services.stop()
    finally:
        site.close()


@pytest.fixture
def cluster(services: Services) -> Services:
    """The services, all of them serving."""
    services.start(*ROLES)
    services.wait(*ROLES)
    return services


@pytest.fixture
def client(site: Site, cluster: Services) -> Site:
    """A site whose config names the services that were started by hand."""
    site.config["services"] = {role: cluster.site.config["services"][role] for role in ROLES}
    site.write_config()
    return site


def test_a_service_that_is_not_there_is_named(client: Site) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    ended = client.controller(f"services.critic.address={nobody}").end(ENDS_WITHIN_S)
    assert ended.code == 1
    assert ended.line.startswith(
        f"error: no service answers within 2 s at services.critic ({nobody}): Connection refused. Start services"
    )


def test_a_service_of_another_role_is_told_from_the_one_wanted(client: Site) -> None:
    critic, reference = client.address("critic"), client.address("reference")
    swapped = (f"services.critic.address={reference}", f"services.reference.address={critic}")
    ended = client.controller(*swapped).end(ENDS_WITHIN_S)
    assert ended.code == USAGE_ERROR
    # Both are wrong; the one that answers first is told, at once.
    assert ended.line in (
        f"error: services.critic.address: {reference} is the reference service 'reference', but role is critic",
        f"error: services.reference.address: {critic} is the critic service 'critic', but role is reference",
    )


def test_a_service_with_another_number_of_ranks_is_refused(client: Site) -> None:
    ended = client.controller("services.critic.ranks=2").end(ENDS_WITHIN_S)
    assert (ended.code, ended.line) == (
        USAGE_ERROR,
        "error: services.critic.ranks is 2, but the service has 1",
    )


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A server that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


class Web(socketserver.BaseRequestHandler):
    """Answers as an HTTP/1.1 server does that was sent something else."""

    def handle(self) -> None:
        self.request.recv(1024)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@contextlib.contextmanager
def web() -> Iterator[str]:
    """A web server."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextlib.contextmanager
def other_grpc() -> Iterator[str]:
    """A gRPC server that knows nothing of this cluster."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


@pytest.mark.parametrize(
    ("stranger", "code", "message"),
    [
        (
            silent,
            1,
            r"no service answers within 2 s at services\.critic \({address}\)\. Start services with .*",
        ),
        (web, 1, r"no service answers within 2 s at services\.critic \({address}\): .*HTTP.*"),
        (
            other_grpc,
            USAGE_ERROR,
            r"services\.critic\.address: {address} is no service of this cluster: .* Method not found!",
        ),
    ],
)
def test_something_else_at_an_address_is_no_service(
    client: Site, stranger: Callable[[], contextlib.AbstractContextManager[str]], code: int, message: str
) -> None:
    with stranger() as address:
        ended = client.controller(f"services.critic.address={address}").end(ENDS_WITHIN_S)
    assert ended.code == code
    assert re.fullmatch(f"error: {message.format(address=re.escape(address))}", ended.line)


def test_a_critic_with_another_vocabulary_is_refused(client: Site, cluster: Services) -> None:
    cluster.wait("other_critic")
    address = cluster.address("other_critic")
    ended = client.controller(f"services.critic.address={address}").end(ENDS_WITHIN_S)
    assert ended.code == USAGE_ERROR
    assert ended.line.startswith(
        "error: services.critic.model: its tokenizer is not that of services.actor: "
    )


def test_an_algorithm_that_needs_a_service_the_config_lacks_names_it(client: Site) -> None:
    del client.config["services"]["critic"]
    client.write_config()
    ended = client.controller().end(ENDS_WITHIN_S)
    assert ended.code == USAGE_ERROR
    assert ended.line == (
        "error: services.critic: ppo needs this service, of role critic; the config has: actor, reference, reward"
    )


@pytest.mark.parametrize(
    ("ground_truth", "cause"),
    [
        ("raise", "chaos_plugins:score raised ZeroDivisionError: no score for 63+1="),
        pytest.param("nan", "score is not finite: nan", marks=pytest.mark.full),
        pytest.param("huge", "score 1e+40 is not a float32 number", marks=pytest.mark.full),
    ],
)
def test_a_reward_that_fails_for_a_row_stops_the_run_with_the_cause(
    client: Site, ground_truth: str, cause: str
) -> None:
    client.write_rows("train.jsonl", [*[""] * 63, ground_truth])
    ended = client.controller().end(ENDS_WITHIN_S)
    assert ended.code == 1
    assert re.fullmatch(
        rf"error: reward: 2 of 128 rows could not be scored; row \d+: {re.escape(cause)}( \(chaos_plugins\.py:\d+\))?",
        ended.line,
    )


def test_an_update_that_is_not_finite_names_the_service_and_changes_no_rank(
    client: Site, cluster: Services
) -> None:
    ranks = [cluster.rank("actor", rank).endpoint.address for rank in (0, 1)]
    versions = [describe(address).policy_version for address in ranks]
    ended = client.controller("algorithm.entropy_coefficient=1e39").end(ENDS_WITHIN_S)
    assert ended.code == 1
    assert re.fullmatch(
        r"error: actor rank [01] \(127\.0\.0\.1:\d+\) UpdateActor: gradient norm is nan at optimizer step \d+: "
        rf"not finite are those of .* on rank .*; every rank is back on policy version {versions[0]}; its rows are in "
        r".*/rejected/step-1",
        ended.line,
    )
    assert [describe(address).policy_version for address in ranks] == versions


@pytest.fixture
def full_disk(client: Site) -> Iterator[Path]:
    """The parent of run directories, on a file system of their own that is nearly full."""
    runs = client.directory / "runs"
    runs.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(runs)], capture_output=True)
    if mount.returncode:
        pytest.skip("may not mount a file system")
    yield runs
    subprocess.run(["umount", str(runs)], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_directory_and_file(client: Site, full_disk: Path) -> None:
    run = client.controller("data.prompts_per_step=16")
    run.until_it_says("step 0/")
    with contextlib.suppress(OSError), (full_disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    ended = run.end(ENDS_WITHIN_S)
    assert ended.code == 1
    assert re.fullmatch(
        r"error: run directory runs/chaos-[\w-]+: no space left on device while writing \S+", ended.line
    )


def test_a_summary_that_does_not_fit_on_the_disk_is_no_success(client: Site) -> None:
    run = client.controller("run.steps=1", "data.prompts_per_step=16")
    run.until_it_says("run directory: ")
    (directory,) = client.directory.glob("runs/chaos-*")
    (directory / ".summary.json.tmp").symlink_to("/dev/full")
    ended = run.end(ENDS_WITHIN_S)
    assert ended.code == 1
    where = directory.relative_to(client.directory)
    assert ended.line == f"error: run directory {where}: no space left on device while writing summary.json"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_run_that_is_told_to_stop_stops_its_calls_and_frees_its_rows(
    client: Site, number: signal.Signals
) -> None:
    run = client.controller()
    wait_for_call(run, client.address("actor"), "UpdateActor")
    run.send(number)
    ended = run.end(ENDS_WITHIN_S)
    assert (ended.code, ended.line) == (128 + number, f"stopped by {number.name}")
    watch_until(client.address("actor"), lambda s: s.phase == worker_pb2.PHASE_IDLE and not s.arena_bytes)


def test_a_killed_controller_leaves_neither_calls_nor_rows(client: Site) -> None:
    run = client.controller()
    wait_for_call(run, client.address("actor"), "UpdateActor")
    run.send(signal.SIGKILL)
    for name in ("actor", "critic", "reference"):
        watch_until(client.address(name), lambda s: s.phase == worker_pb2.PHASE_IDLE and not s.arena_bytes)


def test_a_reward_that_hangs_ends_the_run_at_the_deadline_and_its_rank_leaves(
    client: Site, cluster: Services
) -> None:
    client.write_rows("train.jsonl", ["hang"] * 64)
    address = client.address("reward")
    # Few rows: those that are generated before have the same deadline.
    run = client.controller(f"run.call_timeout_s={CALL_TIMEOUT_S}", "data.prompts_per_step=16")
    ended = run.end(CALL_TIMEOUT_S + ENDS_WITHIN_S)
    assert ended.code == 1
    assert (
        ended.line == f"error: reward rank 0 ({address}) ComputeReward: no answer within {CALL_TIMEOUT_S} s"
    )
    torchrun = cluster.torchruns["reward"].end(STUCK_LEAVES_WITHIN_S)
    assert re.search(
        r"^fatal: reward rank 0: ComputeReward \(\S+\) is stuck: past its deadline, and no progress for 5 s; leaving$",
        torchrun.err,
        re.MULTILINE,
    )


def test_a_killed_rank_is_named_with_its_method_and_its_service_ends(client: Site, cluster: Services) -> None:
    rank = cluster.rank("actor", 1)
    run = client.controller()
    wait_for_call(run, client.address("actor"), "GenerateSequences")
    os.kill(rank.pid, signal.SIGKILL)
    ended = run.end(ENDS_WITHIN_S)
    assert ended.code == 1
    assert ended.line.startswith(
        f"error: actor rank 1 ({rank.endpoint.address}) GenerateSequences: cannot be reached or died: "
    )
    assert cluster.torchruns["actor"].end(ENDS_WITHIN_S).code == 1
    assert not cluster.site.processes("services", "actor")


@pytest.mark.full
def test_a_killed_torchrun_takes_its_ranks_along(client: Site, cluster: Services) -> None:
    address = client.address("reference")
    run = client.controller()
    wait_for_call(run, address, "ComputeRefLogProb")
    cluster.torchruns["reference"].send(signal.SIGKILL)
    ended = run.end(ENDS_WITHIN_S)
    assert ended.code == 1
    # Whether the controller or a rank that reads rows of the dead one learns of it first.
    assert ended.line.startswith(
        (
            f"error: reference rank 0 ({address}) ComputeRefLogProb: cannot be reached or died: ",
            f"error: reference rank 0 at {address}: cannot be reached or died: ",
        )
    )
    wait_until(lambda: not cluster.site.processes("services", "reference"), ENDS_WITHIN_S)


@pytest.mark.parametrize(
    ("name", "number", "method"),
    [
        ("actor", 1, "UpdateActor"),
        pytest.param("reference", 0, "ComputeRefLogProb", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_stopped_in_a_long_call_is_named_within_20_s(
    client: Site, cluster: Services, name: str, number: int, method: str
) -> None:
    info = cluster.rank(name, number)
    rank, peers = (
        psutil.Process(info.pid),
        [psutil.Process(p.pid) for p in describe(client.address(name)).ranks],
    )
    run = client.controller()
    wait_for_call(run, client.address(name), method)
    rank.suspend()
    try:
        ended = run.end(TOLD_WITHIN_S)
    finally:
        for process in peers:
            process.kill()
    assert ended.code == 1
    assert ended.line == (
        f"error: {name} rank {number} ({info.endpoint.address}) {method}: no answer, not even to pings: "
        "its process is stopped, or its host cut off"
    )
    cluster.torchruns[name].end(ENDS_WITHIN_S)


@pytest.mark.full
def test_a_stopped_rank_is_named_at_the_deadline_and_its_peer_leaves(client: Site, cluster: Services) -> None:
    peer, rank = (psutil.Process(cluster.rank("actor", number).pid) for number in (0, 1))
    address = cluster.rank("actor", 1).endpoint.address
    run = client.controller(f"run.call_timeout_s={CALL_TIMEOUT_S}")
    wait_for_call(run, client.address("actor"), "UpdateActor")
    rank.suspend()
    ended = run.end(CALL_TIMEOUT_S + ENDS_WITHIN_S)
    assert ended.code == 1
    assert ended.line == (
        f"error: actor rank 1 ({address}) UpdateActor: no answer within {CALL_TIMEOUT_S} s, and none to Cancel: "
        "its process is stopped or stuck"
    )
    wait_until(lambda: not peer.is_running(), STUCK_LEAVES_WITHIN_S)
    rank.kill()
