"""On-policy distillation on real services: a student comes closer to a teacher that knows more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from deploy.quickstart import Recipe
from deploy.quickstart.build import build
from integration.harness import Processes, free_ports, write_config

pytestmark = pytest.mark.timeout(240)

STUDENT, TEACHER = Recipe(max_steps=40), Recipe(max_steps=150, batch_size=16)
ROWS = {"train": 256, "heldout": 128}
LORA = {"rank": 4, "alpha": 8}
CALCULATOR = {
    "factory": "examples.plugins.rlhf_example.calculator:Calculator",
    "turns": 2,
    "turn_tokens": 4,
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """Services that are up: a student, another with adapters, the teacher, and a reward."""
    directory = tmp_path_factory.mktemp("distill")
    for name, recipe in (("student", STUDENT), ("teacher", TEACHER)):
        build(directory / name, recipe)
    for name, count in ROWS.items():
        rows = (directory / "student" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (directory / f"{name}.jsonl").write_text("".join(rows[:count]))
    student = {
        "role": "actor",
        "model": directory / "student" / "model",
        "optimizer": {"learning_rate": 1e-3},
        "output_roots": [tmp_path_factory.getbasetemp()],
    }
    tables: dict[str, dict[str, Any]] = {
        "actor": {**student, "ranks": 2},
        "adapted": {**student, "lora": LORA},
        "reference": {"role": "reference", "model": directory / "teacher" / "model"},
        "reward": {"role": "reward"},
    }
    ports = iter(free_ports(len(tables)))
    config = Config.model_validate(
        {
            "run": {"name": "test", "directory": directory / "runs", "steps": 2, "samples": 1},
            "data": {name: directory / f"{name}.jsonl" for name in ROWS} | {"prompts_per_step": 64},
            "rollout": {"max_response_tokens": 4},
            "algorithm": {"mini_batch_size": 16},
            "services": {
                name: {"address": f"127.0.0.1:{next(ports)}", "device": "cpu", **table}
                for name, table in tables.items()
            },
        }
    )
    path = write_config(config, directory / "services.toml")
    processes = Processes()
    try:
        launcher = processes.serve(path, directory / "logs")
        yield config
        launcher.terminate()
        assert launcher.wait(40) == 0
    finally:
        processes.kill()


def of_run(up: Config, *, student: str = "actor", reward: bool = True, **changes: dict[str, Any]) -> Config:
    """The config of a run on some of the services, with further keys in its tables."""
    tables = up.model_dump(exclude_unset=True)
    services = tables["services"]
    tables["services"] = {"actor": services[student], "reference": services["reference"]}
    if reward:
        tables["services"]["reward"] = services["reward"]
    for name, change in changes.items():
        tables[name] = {**tables.get(name, {}), **change}
    return Config.model_validate(tables)


def test_the_student_comes_closer_to_the_teacher(up: Config) -> None:
    done = job.run(of_run(up, run={"steps": 20, "evaluate_every": 10}), "distill")
    lines = read_metrics(done.directory)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert [line["step"] for line in lines if "evaluation/reverse_kl" in line] == [0, 10, 20]
    for line in lines[1:]:
        assert line["advantage/mean"] == pytest.approx(-line["kl/mean"], rel=1e-6)
        assert line["actor/grad_norm"] > 0
    assert "time/compute_reward_s" not in lines[1], "the reward scores held-out responses alone"
    assert 0 <= done.summary["accuracy_before"] <= 1
    assert 0 < done.summary["reverse_kl_after"] < 0.7 * done.summary["reverse_kl_before"]


MIXED = {"options": {"reward_coefficient": 0.5, "discount": 1.0}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"student": "adapted", "reward": False}, set()),
        ({"rollout": {"samples_per_prompt": 2}, "algorithm": MIXED}, {"score/mean", "group/same_score"}),
        ({"rollout": {"max_response_tokens": 20, "environment": CALCULATOR}}, {"episode/turns_mean"}),
        ({"run": {"ahead": 1}}, {"actor/rollout_ratio"}),
    ],
    ids=["adapters", "reward", "episodes", "ahead"],
)
def test_it_goes_with(up: Config, given: dict[str, Any], expected: set[str]) -> None:
    done = job.run(of_run(up, **given), "distill")
    lines = read_metrics(done.directory)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert ("accuracy_after" in done.summary) == given.get("reward", True)
    for line in lines[1:]:
        assert expected | {"kl/mean", "kl/sequence_mean"} <= line.keys()
        assert line["kl/mean"] > 0
        assert line["actor/grad_norm"] > 0


def test_a_run_that_is_resumed_has_the_same_results(up: Config, tmp_path: Path) -> None:
    options = {"options": {"discount": 0.5}}
    whole = job.run(of_run(up, run={"directory": tmp_path / "whole"}, algorithm=options), "distill")
    stopped = of_run(
        up,
        run={"directory": tmp_path / "stopped", "steps": 1},
        algorithm=options,
        checkpoint={"every": 1},
    )
    resumed = job.resume(job.run(stopped, "distill").directory, settings=("run.steps=2",))
    assert resumed.summary["actor_sha256"] == whole.summary["actor_sha256"]
    assert resumed.summary["reverse_kl_after"] == whole.summary["reverse_kl_after"]
