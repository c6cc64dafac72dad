"""Every config that the project ships is executed: those of the quickstart here, on real services, those of the
pipeline by a chore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.config.config import load
from deploy.quickstart import Recipe
from deploy.quickstart.build import build
from integration.conftest import Task
from integration.harness import ROOT, Processes, free_ports

pytestmark = pytest.mark.timeout(400)

EXECUTED = {
    "deploy/quickstart/quickstart.toml": "ppo",
    "deploy/quickstart/disaggregated.toml": "ppo",
    "deploy/quickstart/distill.toml": "distill",
    "deploy/quickstart/engines.toml": "ppo",
    "deploy/quickstart/groups.toml": "grpo",
    "deploy/quickstart/hybrid.toml": "ppo",
    "deploy/quickstart/lora.toml": "ppo",
    "deploy/quickstart/pairs.toml": "dpo",
    "deploy/quickstart/safe_rlhf.toml": "safe_rlhf",
}
"""The algorithm with which a config is executed in this file."""
OFTEN = {"deploy/quickstart/disaggregated.toml"}
"""Configs that `make test-slow` executes; `make test-full` executes all."""
CHORES = {
    "deploy/pipeline/sft.toml": "pipeline",
    "deploy/pipeline/reward_model.toml": "pipeline",
    "deploy/pipeline/ppo.toml": "pipeline",
}
"""The chore of the Makefile that executes a config as it is, with its data."""
ON_HOSTS = {"deploy/examples/two_nodes.toml": "test_two_hosts.py"}
"""The test beside this file that executes a config of several hosts."""
SIZES = ("run.steps=1", "run.evaluate_every=0", "algorithm.mini_batch_size=16")


def shipped() -> set[str]:
    """Paths of the config files that are there to be run or copied."""
    found = (path for room in ("deploy", "examples") for path in (ROOT / room).rglob("*.toml"))
    return {str(path.relative_to(ROOT)) for path in found if path.name != "pyproject.toml"}


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.kill()


def test_every_shipped_config_is_executed_and_the_docs_say_where() -> None:
    assert shipped() == EXECUTED.keys() | CHORES.keys() | ON_HOSTS.keys()
    assert not EXECUTED.keys() & CHORES.keys()
    chores = (ROOT / "Makefile").read_text()
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path, chore in CHORES.items():
        assert f"\n{chore}:" in chores
        assert Path(path).name in page
    assert all(Path(path).name in page for path in (*EXECUTED, *ON_HOSTS))
    for path, test in ON_HOSTS.items():
        assert Path(path).name in Path(__file__).with_name(test).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[] if path in OFTEN else pytest.mark.full) for path in EXECUTED]
)
def test_a_shipped_config_trains(path: str, task: Task, tmp_path: Path, processes: Processes) -> None:
    """One step with fewer rows, at free addresses, on the quickstart's data and a model of its size."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "arithmetic").symlink_to(task.directory)
    if EXECUTED[path] == "distill":
        build(task.directory / "teacher", Recipe(max_steps=20))
    services = load(ROOT / path).services
    samples = load(ROOT / path).rollout.samples_per_prompt
    settings = (
        *SIZES,
        f"data.prompts_per_step={16 // samples}",
        *(
            f"services.{name}.address='127.0.0.1:{port}'"
            for name, port in zip(services, free_ports(len(services)), strict=True)
        ),
    )
    given = [part for setting in settings for part in ("--set", setting)]
    services_of_config = processes.serve(ROOT / path, tmp_path / "logs", *settings, cwd=tmp_path)
    ran = processes.start(
        "rlhf-controller", "--algo", EXECUTED[path], "--config", str(ROOT / path), *given, cwd=tmp_path
    )
    out, err = ran.communicate(timeout=260)
    assert ran.returncode == 0, err
    (found,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(found.read_text())
    assert summary["steps"] == 1
    assert summary["actor_sha256"]
    assert "run directory:" in out
    services_of_config.terminate()
    assert services_of_config.wait(30) == 0
    assert not processes.living()
