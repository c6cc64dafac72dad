"""A role of a package outside the repository: served by the launcher and by hand, called by an algorithm, tested."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from python_path import python_path

from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.harness import Processes, Service, free_ports, jagged, wait_for_line, write_config
from nccl_transfer.refs.batch import Batch
from settings.services import table_type

pytestmark = pytest.mark.timeout(300)

START_TIMEOUT_S = 110.0
RUN_TIMEOUT_S = 200.0
TIMEOUT_S = 60.0
STEPS = 3
ROLE = "rlhf_example.roles:novelty"
NGRAM = 2


@dataclass(frozen=True)
class Site:
    """A config of a run whose algorithm calls role `novelty`, on two ranks, and the processes that use it."""

    config: Config
    path: Path
    processes: Processes

    def run(self, *command: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        process = self.processes.start(*command)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def controller(self, *options: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        algorithm = ("--algo", "rlhf_example.curious:curious", "--config", str(self.path))
        return self.run("rlhf-controller", *algorithm, *options, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def plugged(plugins: Path) -> Iterator[Path]:
    """The directory of the installed package, which is on the path of this process and of those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(plugins))
        patch.syspath_prepend(plugins)
        yield plugins


@pytest.fixture(scope="module")
def site(plugged: Path, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("role")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    novelty = {"role": "novelty", "address": addresses[0], "ranks": 2, "ngram": NGRAM}
    others = {
        name: config.services[own].model_copy(update={"address": address})
        for name, own, address in zip(
            ("actor", "reward"), ("lone_actor", "reward"), addresses[1:], strict=True
        )
    }
    table = config.run.model_copy(update={"directory": directory / "runs", "steps": STEPS})
    services = {**others, "novelty": table_type("novelty").model_validate(novelty)}
    chosen = config.model_copy(update={"services": services, "run": table})
    processes = Processes()
    yield Site(chosen, write_config(chosen, directory / "role.toml"), processes)
    processes.kill()


def scores(calls: list[list[list[int]]]) -> list[list[float]]:
    """An independent novelty of each response of each call, by a dictionary of n-grams."""
    seen, made = Counter[tuple[int, ...]](), []
    for responses in calls:
        parts = []
        for response in responses:
            size = min(NGRAM, len(response))
            starts = range(len(response) - size + 1 if size else 0)
            parts.append([tuple(response[start : start + size]) for start in starts])
        made.append(
            [float(np.mean([(1 + seen[p]) ** -0.5 for p in each])) if each else 0.0 for each in parts]
        )
        seen.update(part for each in parts for part in each)
    return made


def test_a_wrong_key_of_its_table_is_refused_before_anything_starts(site: Site) -> None:
    ended = site.controller("--launch", "--dry-run", "--set", "services.novelty.ngrams=2")
    assert ended.returncode == 2
    assert (
        "services.novelty.ngrams: unknown key; did you mean 'ngram'? Known keys: role, address"
        in ended.stderr
    )


def test_a_wrong_value_of_its_table_is_refused(site: Site) -> None:
    ended = site.controller("--dry-run", "--set", "services.novelty.ngram=0")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "services.novelty.ngram: must be at least 1 (given: 0)" in ended.stderr


def test_it_is_among_the_roles_that_an_error_lists(site: Site) -> None:
    ended = site.controller("--dry-run", "--set", "services.novelty.role=noveltie")
    assert ended.returncode == 2
    expected = "services.novelty.role: 'noveltie' is unknown; did you mean 'novelty'?; known: actor, critic, novelty, "
    assert expected in ended.stderr


def test_its_defaults_are_in_the_resolved_config(site: Site) -> None:
    ended = site.controller("--dry-run", "--set", f"services.novelty.role={ROLE}", "--set", "run.steps=7")
    assert ended.returncode == 0, ended.stderr
    table = tomllib.loads(ended.stdout)["services"]["novelty"]
    assert (table["role"], table["ngram"], table["arena_mb"]) == (ROLE, NGRAM, 64)


def test_the_controllers_parts_of_it_need_no_torch(plugged: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from controller.role_groups.roles import group_type; from settings.services import table_type\n"
        "from rlhf.contract import group_methods\n"
        f"for role in ('novelty', {ROLE!r}):\n"
        "    print(group_type(role).__name__, table_type(role).__name__, 'compute_novelty' in group_methods(role))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.stdout == 2 * "NoveltyGroup NoveltyTable True\n", ran.stderr


def test_the_command_line_of_services_lists_it(site: Site) -> None:
    ended = site.run("python", "-m", "services", "--help")
    assert [name for name in ("actor", "novelty") if f"\n  {name} " in ended.stdout] == ["actor", "novelty"]
    assert (
        "role: 'noveltie' is unknown; did you mean" in site.run("python", "-m", "services", "noveltie").stderr
    )


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Service]:
    """The service, started by torchrun on two ranks, with its role named as module:object."""
    command = ("torchrun", "--rdzv-backend=rlhf", "--nproc-per-node=2", "-m", "services", ROLE)
    table = ("--config", str(site.path), "--name", "novelty", "--set", f"services.novelty.role={ROLE}")
    log = site.path.with_name("by_hand.log").open("w")
    torchrun = site.processes.start(*command, *table, stderr=log)
    address = site.config.services["novelty"].address
    wait_for_line(torchrun, f"ready: novelty at {address}, 2 ranks\n", START_TIMEOUT_S)
    service = Service("novelty", address)
    yield service
    service.close()
    torchrun.terminate()
    assert torchrun.wait(TIMEOUT_S) in (0, 1, 143, -15)


def test_ranks_score_by_the_counts_of_all_ranks_and_a_session_begins_with_none(served: Service) -> None:
    assert served.description.role == "novelty"
    generator = np.random.default_rng(3)
    calls = [[generator.integers(0, 6, n).tolist() for n in (5, 0, 1, 2, 9)] for _ in range(3)]
    for _ in range(2):
        served.call("begin_session")
        made = [
            served.column("compute_novelty", Batch.of(response_ids=jagged(rows, np.int32)), "novelty")
            for rows in calls
        ]
        np.testing.assert_allclose(made, scores(calls), rtol=1e-6)


def test_it_is_listed_by_status(site: Site, served: Service) -> None:
    ended = site.run("rlhf-deploy", "status", str(site.path))
    (line,) = (line.split() for line in ended.stdout.splitlines() if line.startswith("novelty "))
    assert line[1:5] == [served.addresses[0], "serving", "2", str(served.description.epoch)]


def test_it_is_load_tested(site: Site, served: Service) -> None:
    load = ("--method", "compute_novelty", "--rows", "4", "--rate", "20", "--duration", "1")
    result = site.path.with_name("load.json")
    told = ("--target", served.addresses[0], "--json", str(result), "--slo", "errors=0")
    ended = site.run("rlhf-loadtest", "novelty", *load, *told)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    step: Any = json.loads(result.read_text())["steps"][0]
    assert step["ended"] > 0
    assert step["errors"] == {}
    unknown = site.run("rlhf-loadtest", "noveltie", *load, *told)
    assert unknown.returncode == 2
    assert "did you mean 'novelty'" in unknown.stderr


@pytest.fixture(scope="module")
def ran(site: Site) -> Path:
    """Directory of a run with the services that it launched."""
    (port,) = free_ports(1)  # those of the service that was started by hand may still be in use
    settings = ("--set", f"services.novelty.address=127.0.0.1:{port}", "--set", "algorithm.options.bonus=0.5")
    ended = site.controller("--launch", *settings, timeout_s=RUN_TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (directory,) = site.config.run.directory.glob("*")
    return directory


@pytest.mark.slow
def test_an_algorithm_calls_it_in_a_launched_run(ran: Path) -> None:
    lines = [line for line in read_metrics(ran) if line["step"] > 0]
    novelty = [line["novelty/mean"] for line in lines]
    assert len(novelty) == STEPS
    assert novelty[0] == 1.0  # nothing was seen before
    assert all(0 < value < 1 for value in novelty[1:])
    assert all(line["time/compute_novelty_s"] > 0 for line in lines)
    assert "compute_novelty" in {event["name"] for event in json.loads((ran / "timeline.json").read_text())}
    assert {log.stem for log in (ran / "logs").glob("*.log")} >= {"actor", "novelty", "reward"}
    resolved = tomllib.loads((ran / "config.toml").read_text())
    assert resolved["algorithm"]["options"] == {"bonus": 0.5}


@pytest.mark.slow
def test_token_ids_go_to_its_ranks_without_the_controller(ran: Path) -> None:
    """Prompts, rewards and one float per row pass through the controller; ids of responses do not."""
    summary = json.loads((ran / "summary.json").read_text())
    assert summary["steps"] == STEPS
    (line,) = (line for line in read_metrics(ran) if line["step"] == 2)
    assert line["transfer/memfd/bytes"] > 0
