"""A policy loss of a package outside the repository trains on real services, and a wrong one starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from python_path import python_path

from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.harness import Processes, free_ports, write_config

pytestmark = pytest.mark.timeout(300)

STEPS = 2
START_TIMEOUT_S = 110.0
RUN_TIMEOUT_S = 100.0
STOP_TIMEOUT_S = 40.0
USAGE_ERROR = 2
DELTA = 1e-4
NAMES = ("dppo", "rlhf_example.losses:dppo")
"""The loss as an entry point and as module:object."""


@dataclass(frozen=True)
class Site:
    """A config, and processes that see the installed package."""

    config: Config
    path: Path
    processes: Processes

    def controller(self, *settings: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Runs grpo to its end."""
        flags = [flag for setting in settings for flag in ("--set", f"algorithm.{setting}")]
        command = ("rlhf-controller", "--algo", "grpo", "--config", str(self.path), *options, *flags)
        process = self.processes.start(*command)
        out, err = process.communicate(timeout=RUN_TIMEOUT_S)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @property
    def runs(self) -> set[Path]:
        """Directories of the runs so far."""
        return set(self.config.run.directory.glob("*"))


@pytest.fixture(scope="module")
def site(config: Config, plugins: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """No service runs yet."""
    directory = tmp_path_factory.mktemp("loss")
    ports = iter(free_ports(2))
    services = {
        name: config.services[name].model_copy(update={"address": f"127.0.0.1:{next(ports)}"})
        for name in ("actor", "reward")
    }
    run = config.run.model_copy(update={"directory": directory / "runs", "steps": STEPS})
    algorithm = config.algorithm.model_copy(update={"kl_loss_coefficient": 0.0, "epochs": 2})
    chosen = config.model_copy(update={"services": services, "run": run, "algorithm": algorithm})
    processes = Processes()
    with mock.patch.dict(os.environ, PYTHONPATH=python_path(plugins)):
        try:
            yield Site(chosen, write_config(chosen, directory / "loss.toml"), processes)
        finally:
            processes.kill()


WRONG = {
    "surrogate=dpo": "algorithm.surrogate: 'dpo' is unknown; did you mean 'dppo'?; known: cispo, dppo, gspo, ppo, or "
    "module:object",
    "surrogate=rlhf_example.losses:tppo": "algorithm.surrogate: 'rlhf_example.losses:tppo' cannot be imported: "
    "AttributeError: ",
    "surrogate=rlhf_example.losses:DppoOptions": "algorithm.surrogate: 'rlhf_example.losses:DppoOptions' is of type "
    "ModelMetaclass, not LossSpec",
    "surrogate=dppo surrogate_options.dleta=0.1": "algorithm.surrogate_options of dppo: dleta: unknown key; did you "
    "mean 'delta'? Known keys: delta",
    "surrogate=dppo surrogate_options.delta=1": "algorithm.surrogate_options of dppo: delta: must be below 1 "
    "(given: 1)",
    "surrogate_options.delta=0.1": "algorithm.surrogate_options of ppo: delta: unknown key",
}


@pytest.mark.parametrize("settings", WRONG)
def test_a_wrong_name_or_option_is_told_in_one_line_before_anything_starts(site: Site, settings: str) -> None:
    before = site.runs
    ended = site.controller(*settings.split(), options=("--launch",))
    assert (ended.returncode, ended.stdout) == (USAGE_ERROR, "")
    assert ended.stderr.startswith("error: config ")
    assert WRONG[settings] in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert site.runs == before


def test_the_resolved_config_has_the_options_of_the_loss(site: Site) -> None:
    ended = site.controller("surrogate=dppo", options=("--dry-run",))
    resolved = tomllib.loads(ended.stdout)["algorithm"]
    assert (resolved["surrogate"], resolved["surrogate_options"]) == ("dppo", {"delta": 0.2})


@pytest.fixture(scope="module")
def runs(site: Site) -> Iterator[list[Path]]:
    """A run for each of `NAMES`, one after the other on the same services."""
    made = []
    up = site.processes.serve(site.path, site.path.parent / "logs", f"algorithm.surrogate={NAMES[1]}")
    for name in NAMES:
        before = site.runs
        ended = site.controller(f"surrogate={name}", f"surrogate_options.delta={DELTA}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        made += site.runs - before
    yield made
    up.terminate()
    assert up.wait(STOP_TIMEOUT_S) == 0


@pytest.mark.slow
def test_the_statistics_of_the_loss_are_metrics(runs: list[Path]) -> None:
    for directory in runs:
        steps = [line for line in read_metrics(directory) if line["step"] > 0]
        assert len(steps) == STEPS
        for line in steps:
            assert line["actor/tv"] > 0
            assert 0 < line["actor/masked"] < 1
            assert line["actor/ratio"] == pytest.approx(1, abs=0.2)
            assert "actor/clip_high" not in line


@pytest.mark.slow
def test_the_same_loss_by_either_name_trains_the_same_policy(runs: list[Path]) -> None:
    summaries = [json.loads((directory / "summary.json").read_text()) for directory in runs]
    assert len({summary["actor_sha256"] for summary in summaries}) == 1
    resolved = tomllib.loads((runs[0] / "config.toml").read_text())["algorithm"]
    assert (resolved["surrogate"], resolved["surrogate_options"]) == ("dppo", {"delta": DELTA})
