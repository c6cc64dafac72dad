"""A whole run whose models are spread over pipeline stages and tensor ranks, or each in an engine of another kind, or
whose rows are divided over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import AutoModelForCausalLM

from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.conftest import Task
from integration.harness import Processes, free_ports
from integration.resuming import with_tables
from settings.engines import ZeroTable

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

RUN_TIMEOUT_S = 130.0
STEPS = 2
ROLES = ("actor", "critic", "reference", "reward")
ACTOR = {"ranks": 4, "engine": "3d", "mesh": "1-2-2"}
CRITICS = {
    "3d": {"ranks": 2, "engine": "3d", "mesh": "2-1-1"},
    "zero": {"ranks": 2, "engine": "zero", "zero": ZeroTable(stage=2)},
}
ROW_TOKENS = 16
DIVIDED = {"ranks": 2, "sequence_parallel": 2, "micro_batch_tokens": ROW_TOKENS // 2}
"""Ranks that can compute a row of up to ROW_TOKENS only together."""
SAME = (
    "reward/mean",
    "actor/grad_norm",
    "actor/entropy",
    "critic/squared_error",
    "critic/grad_norm",
    "kl/mean",
)


def run(config: Config, directory: Path, meshes: dict[str, dict[str, Any]]) -> Path:
    """A run and its services, whose logs are in `directory / "logs"`; returns the run's directory."""
    ports = free_ports(len(ROLES))
    services = {
        role: config.services[role].model_copy(
            update={"address": f"127.0.0.1:{port}", **meshes.get(role, {})}
        )
        for role, port in zip(ROLES, ports, strict=True)
    }
    table = config.run.model_copy(update={"directory": directory / "runs", "steps": STEPS})
    tables = config.model_copy(update={"services": services, "run": table})
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(tables.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
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


def assert_same_numbers(ours: Path, theirs: Path, keys: tuple[str, ...]) -> None:
    """Asserts that two runs have the same numbers but for rounding errors."""
    for line, other in zip(read_metrics(ours), read_metrics(theirs), strict=True):
        for key in keys:
            if key in other:
                assert line[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6), key


@pytest.fixture(scope="module", params=[pytest.param("3d", marks=pytest.mark.full), "zero"])
def finished(
    request: pytest.FixtureRequest, config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param == "zero":
        pytest.importorskip("deepspeed")
    meshes: dict[str, dict[str, Any]] = {"actor": ACTOR, "critic": CRITICS[request.param]}
    return run(config, tmp_path_factory.mktemp(request.param), meshes)


def test_ppo_learns_on_a_mesh(finished: Path) -> None:
    first, second = (line for line in read_metrics(finished) if line["step"] > 0)
    # The reference, on one rank and another engine, has the same weights as the actor before its first update.
    assert abs(first["kl/mean"]) < 1e-6 < abs(second["kl/mean"])
    for line in (first, second):
        assert line["actor/grad_norm"] > 0
        assert line["critic/grad_norm"] > 0


def test_the_actor_of_a_mesh_is_exported_whole(finished: Path, task: Task) -> None:
    trained = AutoModelForCausalLM.from_pretrained(finished / "actor").state_dict()
    initial = AutoModelForCausalLM.from_pretrained(task.model).state_dict()
    assert trained.keys() == initial.keys()
    assert all(x.isfinite().all() for x in trained.values())
    assert not any(torch.equal(x, initial[name]) for name, x in trained.items() if "proj" in name)


def test_the_logs_have_no_warnings(finished: Path) -> None:
    logs = finished.parents[1] / "logs"
    lines = [line for path in logs.iterdir() for line in path.read_text().splitlines()]
    assert lines
    assert [line for line in lines if "warning" in line.lower()] == []


@pytest.mark.full
def test_a_mesh_gives_the_numbers_of_one_rank(finished: Path, config: Config, tmp_path: Path) -> None:
    assert_same_numbers(finished, run(config, tmp_path, {"actor": {"ranks": 1}}), SAME)


@pytest.mark.full
def test_ranks_that_divide_rows_give_the_numbers_of_one_rank(config: Config, tmp_path: Path) -> None:
    config = with_tables(config, data={"max_prompt_tokens": ROW_TOKENS - config.rollout.max_response_tokens})
    # The actor's two data ranks of two ranks each generate as two replicas of two.
    divided = {
        "actor": {**DIVIDED, "ranks": 4, "generation_mesh": "1-2-2"},
        "critic": DIVIDED,
        "reference": DIVIDED,
    }
    ours, theirs = (tmp_path / name for name in ("divided", "plain"))
    for directory in (ours, theirs):
        directory.mkdir()
    assert_same_numbers(run(config, ours, divided), run(config, theirs, {"actor": {"ranks": 1}}), SAME)
