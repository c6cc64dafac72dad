"""A run over services with certificates and tokens: strangers have no answer from any method of any role, and the run
has the numbers that it has without."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from controller.config.config import Config
from integration.harness import Processes, Service, free_ports, write_config
from integration.listeners import assert_closed
from rlhf.access import LIBRARY_METHODS, Access
from rlhf.contract import SERVICES
from rlhf.security import Security, adopted
from settings.security import SecurityTable, load_security
from settings.strict import read_toml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

START_TIMEOUT_S = 110.0
RUN_TIMEOUT_S = 150.0
CALL_S = 5.0
COMMAND_S = 60.0
OWN = {"actor": "lone_actor", "critic": "critic", "reference": "reference", "reward": "reward"}
"""Services of the config that all tests share, by role."""
ROLES = tuple(OWN)
TOKENS = {None: "UNAUTHENTICATED", "x" * 43: "UNAUTHENTICATED"}
"""Status code of a call, by its token: none, or an unknown one."""


@dataclass(frozen=True)
class Site:
    """Services with certificates that are up, by role; a cost is one more reward.

    Attributes:
        security: Credentials of their config.
        directory: Directory of logs and runs.
    """

    config: Config
    path: Path
    security: Security
    directory: Path
    processes: Processes

    @property
    def tokens(self) -> list[str]:
        return list(self.security.tokens.values())

    def run(self, *command: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        process = self.processes.start(*command)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def ask_health(self, certificates: Path | None) -> subprocess.CompletedProcess[str]:
        credentials = ("--security", str(certificates)) if certificates else ()
        return self.run("rlhf-deploy", "health", self.config.services["reward"].address, *credentials)


def paths(role: str) -> list[str]:
    """Paths of all methods that a rank of a role serves."""
    own = [each.path for name in (role, "worker", "transfer") for each in SERVICES[name].values()]
    return [*own, *LIBRARY_METHODS]


def codes(channel: grpc.Channel, role: str, token: str | None) -> set[str]:
    """How calls of all methods ended, sent at the same time."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    calls = [
        channel.stream_stream(path)(iter([b""]), timeout=CALL_S, metadata=metadata)  # type: ignore[call-overload]
        for path in paths(role)
    ]
    return {call.code().name for call in calls}


@pytest.fixture(scope="module")
def site(config: Config, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("secure")
    roles = {**OWN, "cost": "reward"}
    # Rows over each of the transports that have sockets.
    changes = {"critic": {"transports": ("tcp",)}, "reference": {"transports": ("grpc",)}}
    services = {
        name: config.services[own].model_copy(
            update={"address": f"127.0.0.1:{port}", **changes.get(name, {})}
        )
        for (name, own), port in zip(roles.items(), free_ports(len(roles)), strict=True)
    }
    run = config.run.model_copy(update={"directory": directory / "runs", "steps": 2})
    table = SecurityTable.model_validate(read_toml(certificates)["security"])
    chosen = config.model_copy(update={"services": services, "run": run, "security": table})
    path, processes = write_config(chosen, directory / "secure.toml"), Processes()
    try:
        processes.serve(path, directory / "logs")
        yield Site(chosen, path, load_security(certificates), directory, processes)
    finally:
        processes.kill()


@pytest.mark.parametrize("role", [*ROLES, "cost"])
def test_no_method_of_any_role_answers_a_stranger(
    site: Site, certificates: Path, other_certificates: Path, role: str
) -> None:
    address = site.config.services[role].address
    role = "reward" if role == "cost" else role
    authority = (certificates.parent / "ca.pem").read_bytes()
    theirs = [(other_certificates.parent / f"client.{kind}").read_bytes() for kind in ("key", "pem")]
    for channel in (
        grpc.insecure_channel(address),
        grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)),
        grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, *theirs)),
    ):
        with channel:
            assert codes(channel, role, site.security.tokens[Access.ADMINISTER]) == {"UNAVAILABLE"}
    ours = [(certificates.parent / f"client.{kind}").read_bytes() for kind in ("key", "pem")]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, *ours)) as channel:
        for token, expected in TOKENS.items():
            assert codes(channel, role, token) == {expected}


@pytest.mark.usefixtures("cluster")
def test_a_run_on_services_with_certificates_has_the_numbers_of_one_without(
    site: Site, config: Config
) -> None:
    """The other run is over the services that all tests share."""
    algorithm = ("--algo", "ppo", "--config")
    ran = site.run("rlhf-controller", *algorithm, str(site.path), timeout_s=RUN_TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (ours,) = (site.directory / "runs").glob("test-*")
    services = {role: config.services[own] for role, own in OWN.items()}
    run = site.config.run.model_copy(update={"directory": site.directory / "plain"})
    plain = config.model_copy(update={"services": services, "run": run})
    path = write_config(plain, site.directory / "plain.toml")
    ran = site.run("rlhf-controller", *algorithm, str(path), timeout_s=RUN_TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (theirs,) = (site.directory / "plain").glob("test-*")
    found = [json.loads((each / "summary.json").read_text())["actor_sha256"] for each in (ours, theirs)]
    assert found[0] == found[1]
    with adopted(site.security):
        read = {role: received(role, site.config.services[role].address) for role in ("critic", "reference")}
    assert set(read["critic"]) == {"tcp"}
    assert set(read["reference"]) == {"grpc"}


def received(name: str, address: str) -> dict[str, int]:
    """Bytes that reached the service, by transport."""
    service = Service(name, address)
    traffic = service.ask("Stat").traffic
    service.close()
    return {name: each.bytes for name, each in traffic.items() if each.bytes}


def test_a_token_to_read_shows_health_and_runs_nothing(
    site: Site, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_TOKEN_FILE", str(certificates.parent / "read.token"))
    assert site.ask_health(certificates).returncode == 0
    status = site.run("rlhf-deploy", "status", str(site.path))
    assert status.returncode == 0, status.stdout + status.stderr
    assert status.stdout.count("serving") == len(site.config.services)
    ran = site.run("rlhf-controller", "--algo", "ppo", "--config", str(site.path), timeout_s=RUN_TIMEOUT_S)
    assert ran.returncode == 1
    assert "requires a token of class call; the given token is of class read" in ran.stderr


def test_health_is_an_exit_code(site: Site, certificates: Path, other_certificates: Path) -> None:
    answers = [site.ask_health(each) for each in (certificates, other_certificates, None)]
    assert [each.returncode for each in answers] == [0, 1, 1]
    assert [each.stdout.partition(": ")[2] for each in answers] == [
        "serving\n",
        "not reachable\n",
        "not reachable\n",
    ]


def test_load_tests_and_conformance_have_their_credentials_from_a_file(
    site: Site, certificates: Path
) -> None:
    reward = site.config.services["reward"].address
    command = ("rlhf-loadtest", "reward", "--target", reward, "--method", "Describe", "--duration", "0.5")
    assert site.run(*command, "--security", str(certificates)).returncode == 0
    assert site.run(*command).returncode == 1
    checked = site.run("rlhf-conformance", "reward", "--target", reward, "--security", str(certificates))
    assert re.search(r"│ reachable +│ pass", checked.stdout), checked.stdout + checked.stderr


def test_ports_are_those_of_services_without_certificates(site: Site) -> None:
    assert_closed(site.processes.living(), site.config)


def test_no_secret_is_in_a_file_that_a_run_leaves(site: Site) -> None:
    """Last, when there are logs and runs."""
    files = [path for path in site.directory.rglob("*") if path.is_file()]
    assert any(path.name == "config.toml" for path in files)
    assert any(path.suffix == ".log" for path in files)
    for path in files:
        content = path.read_bytes()
        # Of each of the many that were refused: strangers do not fill logs.
        assert b"Handshake failed" not in content
        for token in site.tokens:
            assert token.encode() not in content, path
