"""An algorithm of a package outside the repository is chosen by name, and trains on services that are up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from python_path import python_path

from integration.harness import Cluster, Processes, write_config

TIMEOUT_S = 100.0


@pytest.fixture
def controller(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    """Starts commands that find the package of examples."""
    monkeypatch.setenv("PYTHONPATH", python_path(plugins))
    return Processes()


def test_an_algorithm_of_an_installed_package_trains_by_its_name(
    controller: Processes, cluster: Cluster, tmp_path: Path
) -> None:
    config = cluster.select(actor="actor", reward="reward")
    table = config.run.model_copy(update={"directory": tmp_path / "runs", "steps": 1})
    path = write_config(config.model_copy(update={"run": table}), tmp_path / "config.toml")
    arguments = ("--config", str(path), "--set", "algorithm.options.optimism=0.25")
    ran = controller.start("rlhf-controller", "--algo", "optimist", *arguments)
    _, err = ran.communicate(timeout=TIMEOUT_S)
    assert ran.returncode == 0, err
    (directory,) = (tmp_path / "runs").iterdir()
    assert (
        json.loads((directory / "summary.json").read_text())["algorithm"]
        == "rlhf_example.algorithms:optimist"
    )
    assert "optimism = 0.25" in (directory / "config.toml").read_text()


def test_the_help_and_the_error_list_the_algorithms_of_installed_packages(controller: Processes) -> None:
    out, _ = controller.start("rlhf-controller", "--help").communicate(timeout=TIMEOUT_S)
    assert "optimist, ppo," in " ".join(out.split())
    refused = controller.start("rlhf-controller", "--algo", "optimis")
    _, err = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 2
    assert err.startswith("error: algorithm 'optimis' is unknown; did you mean 'optimist'?; known: cispo, ")
