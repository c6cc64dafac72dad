"""A training engine, a rollout engine and a transport of a package outside the repository: they pass the published
contracts, and a run on them gives the numbers of a run on this project's own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from python_path import python_path

from controller.config.config import Config, load
from controller.tracking.metrics import read_metrics
from integration.harness import HERE, ROOT, Processes, free_ports
from rlhf.errors import ConfigError

CONTRACT_TIMEOUT_S = 500.0
RUN_TIMEOUT_S = 200.0
STEPS = 3
ROLES = ("actor", "critic", "reference", "reward")
QUICKSTART = ROOT / "deploy" / "quickstart" / "quickstart.toml"
OVER_UNIX = {"transports": ("unix",)}
"""Rows of others are read by the transport of the example alone."""
OWN: dict[str, dict[str, Any]] = {"actor": {"ranks": 2}, "critic": {"ranks": 2}}
PLUGINS: dict[str, dict[str, dict[str, Any]]] = {
    "replicated": {
        "actor": {
            "ranks": 2,
            "engine": "replicated",
            "rollout_engine": "plain",
            "rollout_options": {"rows_at_once": 5},
        },
        "critic": {"ranks": 2, "engine": "replicated", **OVER_UNIX},
        "reference": {"engine": "replicated", **OVER_UNIX},
    },
    "whole weights of a mesh": {
        "actor": {
            "ranks": 2,
            "engine": "3d",
            "mesh": "1-2-1",
            "generation_mesh": "1-1-2-1",
            "rollout_engine": "rlhf_example.engines:plain",
        },
        "critic": {"ranks": 2},
    },
}
SAME = (
    "reward/mean",
    "actor/grad_norm",
    "actor/entropy",
    "critic/squared_error",
    "critic/grad_norm",
    "kl/mean",
)
RELATIVE, ABSOLUTE = 1e-5, 1e-6


@pytest.fixture
def on_path(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example is installed, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(str(plugins))
    monkeypatch.setenv("PYTHONPATH", python_path(plugins))
    return plugins


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (
            "services.actor.rollout_engine='plane'",
            r"services\.actor\.rollout_engine: 'plane' is unknown; did you mean 'plain'\?; known: hf, .*plain, vllm",
        ),
        (
            "services.critic.engine='replicate'",
            r"services\.critic\.engine: 'replicate' is unknown; did you mean 'replicated'\?; known: 3d, fsdp",
        ),
        (
            "services.actor.rollout_options.rows=5",
            r"services\.actor\.rollout_options: rows: unknown key.* Known keys: rows_at_once",
        ),
        (
            "services.actor.rollout_options.rows_at_once=0",
            r"services\.actor\.rollout_options: rows_at_once: must be at least 1 \(given: 0\)",
        ),
        (
            "services.actor.rollout_tokens=4096",
            r"services\.actor: rollout_tokens is for rollout engine hf, and rollout_engine is plain",
        ),
        (
            "services.critic.activation_checkpointing=true",
            r"services\.critic: activation_checkpointing is for engines fsdp and 3d, and engine is replicated",
        ),
        (
            "services.actor.engine='3d'\nservices.actor.mesh='1-2-1'\nservices.actor.ranks=2",
            r"rollout_engine plain takes whole weights, .* use generation_mesh 1-1-2-1",
        ),
    ],
)
def test_a_mistake_in_the_keys_of_a_plug_in_is_told_before_anything_starts(
    setting: str, why: str, on_path: Path
) -> None:
    chosen = ("services.actor.rollout_engine='plain'", "services.critic.engine='replicated'")
    with pytest.raises(ConfigError, match=why):
        load(QUICKSTART, (*chosen, *setting.split("\n")))


def test_the_options_of_a_plug_in_have_its_defaults(on_path: Path) -> None:
    table = load(QUICKSTART, ("services.actor.rollout_engine='plain'",)).services["actor"]
    assert table.model_dump()["rollout_options"] == {"rows_at_once": 64}


def test_a_configuration_is_checked_where_torch_cannot_be_imported(on_path: Path) -> None:
    code = f"""import sys; sys.modules["torch"] = sys.modules["transformers"] = None
from pathlib import Path
from controller.config.config import load
load(Path({str(QUICKSTART)!r}), ("services.actor.rollout_engine=plain", "services.critic.engine=replicated"))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def pass_the_contract(file: str, plugins: Path, directory: Path, *options: str) -> None:
    """Runs a file of contracts where the example is installed, in a process of its own; all tests have to pass."""
    tests = directory / f"test_{file}"
    tests.write_text((HERE / file).read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(directory)]
    ran = subprocess.run(
        [*command, *options, str(tests)],
        env={**os.environ, "PYTHONPATH": python_path(plugins)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=CONTRACT_TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "passed" in ran.stdout
    assert "skipped" not in ran.stdout


@pytest.mark.full
@pytest.mark.timeout(CONTRACT_TIMEOUT_S + 60)
def test_both_engines_pass_the_published_contracts(plugins: Path, tmp_path: Path) -> None:
    pass_the_contract("plugin_engine_contracts.py", plugins, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(CONTRACT_TIMEOUT_S + 60)
def test_the_transport_passes_the_published_contract(plugins: Path, tmp_path: Path) -> None:
    pass_the_contract("plugin_transport_contract.py", plugins, tmp_path, "-k", "not gibibyte")


@pytest.mark.full
@pytest.mark.timeout(CONTRACT_TIMEOUT_S + 60)
def test_the_contract_finds_faults_of_transports(tmp_path: Path) -> None:
    tests = tmp_path / "test_faulty_transports.py"
    tests.write_text((HERE / "faulty_transports.py").read_text())
    chosen = [
        f"{tests}::TestForgetful::test_rows_of_another_epoch_are_refused",
        f"{tests}::TestPatient::test_a_peer_that_hangs_ends_the_read_at_its_deadline",
        f"{tests}::TestLeaking::test_nothing_is_left_open_here_or_there",
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *chosen],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CONTRACT_TIMEOUT_S,
    )
    assert "3 failed" in ran.stdout, ran.stdout[-4000:]
    for said in ("DID NOT RAISE", "assert (", "after Held("):
        assert said in ran.stdout, ran.stdout[-4000:]


@pytest.mark.full
@pytest.mark.timeout(CONTRACT_TIMEOUT_S + 60)
def test_a_gibibyte_arrives_by_the_transport(plugins: Path, tmp_path: Path) -> None:
    pass_the_contract("plugin_transport_contract.py", plugins, tmp_path, "-k", "gibibyte")


def run(config: Config, directory: Path, tables: dict[str, dict[str, Any]]) -> Path:
    """A run of PPO and its services; returns its directory."""
    services = {
        role: config.services[role].model_copy(
            update={"address": f"127.0.0.1:{port}", **tables.get(role, {})}
        )
        for role, port in zip(ROLES, free_ports(len(ROLES)), strict=True)
    }
    table = config.run.model_copy(update={"directory": directory / "runs", "steps": STEPS})
    of_run = config.model_copy(update={"services": services, "run": table})
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(of_run.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    processes = Processes()
    try:
        processes.serve(path, directory / "logs")
        controller = processes.start("rlhf-controller", "--algo", "ppo", "--config", str(path))
        out, err = controller.communicate(timeout=RUN_TIMEOUT_S)
        assert controller.returncode == 0, out + err
    finally:
        processes.kill()
    (run_directory,) = (directory / "runs").iterdir()
    return run_directory


@pytest.fixture(scope="module")
def own(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hf and fsdp."""
    return run(config, tmp_path_factory.mktemp("own"), OWN)


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_TIMEOUT_S + 100)
@pytest.mark.parametrize(
    "name", ["replicated", pytest.param("whole weights of a mesh", marks=pytest.mark.full)]
)
def test_a_run_on_plug_ins_gives_the_numbers_of_hf_and_fsdp(
    name: str, own: Path, config: Config, on_path: Path, tmp_path: Path
) -> None:
    finished = run(config, tmp_path, PLUGINS[name])
    ours, theirs = read_metrics(finished), read_metrics(own)
    assert len(ours) == len(theirs) > STEPS
    # Critic and reference read the actor's rows, and the critic those of the reference and the reward too.
    assert all(step.get("transfer/unix/bytes", 0) > 0 for step in ours[1:]) == (name == "replicated")
    for mine, expected in zip(ours, theirs, strict=True):
        found = {key: mine[key] for key in SAME if key in expected}
        assert found == pytest.approx({key: expected[key] for key in found}, rel=RELATIVE, abs=ABSOLUTE)
    resolved = tomllib.loads((finished / "config.toml").read_text())["services"]["actor"]
    rows = 5 if name == "replicated" else 64
    assert resolved["rollout_options"] == {"rows_at_once": rows}
