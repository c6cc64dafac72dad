"""A run ends at a bit that has flipped in a replica of the actor's weights, and keeps no checkpoint with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli_w
from python_path import python_path

from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.harness import HERE, Processes, free_ports

RUN_TIMEOUT_S = 200.0
ROLES = ("actor", "reference", "reward")


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_a_flipped_bit_in_a_replica_ends_the_run_and_names_service_ranks_and_tensor(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(HERE.parent))
    monkeypatch.syspath_prepend(str(HERE.parent))
    engine = {"ranks": 2, "engine": "integration.flipping_engine:spec", "mesh": "1-1-2"}
    services = {
        role: config.services[role].model_copy(
            update={"address": f"127.0.0.1:{port}", **(engine if role == "actor" else {})}
        )
        for role, port in zip(ROLES, free_ports(len(ROLES)), strict=True)
    }
    changes = {
        "run": {"directory": tmp_path / "runs", "steps": 4, "verify_every": 1},
        "algorithm": {"mini_batch_size": config.rows_per_step},
        "checkpoint": {"every": 1},
    }
    tables = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    of_run = config.model_copy(update={"services": services, **tables})
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(of_run.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    processes = Processes()
    try:
        processes.serve(path, tmp_path / "logs")
        controller = processes.start("rlhf-controller", "--algo", "grpo", "--config", str(path))
        output = "".join(controller.communicate(timeout=RUN_TIMEOUT_S))
    finally:
        processes.kill()
    assert controller.returncode == 1, output
    tensor = r"weight\.model\.norm\.weight differs between ranks 0, 1"
    assert re.search(
        rf"error: actor rank \d .* VerifyWeights: weights in memory are corrupt: {tensor}$", output, re.M
    )
    (directory,) = (tmp_path / "runs").iterdir()
    assert [line["step"] for line in read_metrics(directory)] == [0, 1]
    assert {each.name for each in (directory / "checkpoints").glob("step-*/COMMIT")} == {"COMMIT"}
    assert not (directory / "checkpoints" / "step-2").exists()
