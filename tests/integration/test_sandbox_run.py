"""The code grader takes the place of a run's reward by its address alone."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from integration.harness import Cluster, Processes, free_ports, is_listening, wait_until, write_config
from integration.test_reward_node import ROLES, ran, within_reach
from rlhf.errors import ConfigError
from settings.reward import RewardTable

pytestmark = pytest.mark.timeout(240)

METADATA = {
    "prelude": "def answer():\n    return ",
    "tests": [{"kind": "call", "function": "answer", "expected": 10}],
}
"""An answer in digits is a program that returns it."""


def graded(path: Path) -> None:
    """Gives every row of a data set its tests."""
    rows = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps({**row, **METADATA}) + "\n" for row in rows))


def test_a_run_with_the_sandbox_differs_by_kind_and_address_and_in_no_number(
    cluster: Cluster, tmp_path: Path
) -> None:
    selected = cluster.select(**{role: role for role in ROLES})
    data = within_reach(selected.data, tmp_path)
    graded(data.train)
    graded(data.heldout)
    ports = free_ports(2)
    rewards = {
        "reward": RewardTable(role="reward", address=f"127.0.0.1:{ports[0]}", function="exact_match"),
        "sandbox": RewardTable(role="reward", address=f"127.0.0.1:{ports[1]}", kind="sandbox"),
    }
    run = selected.run.model_copy(update={"steps": 2, "directory": tmp_path})
    rollout = selected.rollout.model_copy(update={"temperature": 0.3})
    config = selected.model_copy(update={"run": run, "data": data, "rollout": rollout})
    path = write_config(
        config.model_copy(update={"services": {**selected.services, **rewards}}), tmp_path / "services.toml"
    )
    config = config.model_copy(update={"services": {**selected.services, "reward": rewards["reward"]}})
    processes = Processes()
    with (tmp_path / "rewards.log").open("w") as log:
        try:
            for name, table in rewards.items():
                command = ("python", "-m", "services", "reward", "--config", str(path), "--name", name)
                processes.start(*command, stdout=log, stderr=log)
                wait_until(lambda address=table.address: is_listening(address), 60, f"{name}")
            exact, exact_config = ran(cluster, config, rewards["reward"].address)
            with pytest.raises(ConfigError, match='kind is "sandbox" there and "function" here'):
                ran(cluster, config, rewards["sandbox"].address)
            config = config.model_copy(
                update={"services": {**selected.services, "reward": rewards["sandbox"]}}
            )
            graded_by_sandbox, sandbox_config = ran(cluster, config, rewards["sandbox"].address)
        finally:
            processes.kill()
    assert all(0 < line["score/mean"] < 1 for line in exact[1:])
    different = [
        {key: (a.get(key), b.get(key)) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
        for a, b in zip(exact, graded_by_sandbox, strict=True)
    ]
    assert all(key.startswith("reward/sandbox/") for line in different for key in line), different
    changed = [line for line in difflib.ndiff(exact_config, sandbox_config) if line[0] in "-+"]
    assert {line[2:].split(" = ")[0] for line in changed} == {"address", "kind"}
