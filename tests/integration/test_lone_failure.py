"""A rank that fails alone leaves, rather than complete its peers' collectives with those of the next call."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from integration.conftest import Task
from integration.harness import Processes, Service, free_ports, is_listening, jagged, wait_until
from nccl_transfer.batch import Batch
from rlhf.errors import RlhfError

START_S = 60
END_S = 20

CONFIG = """
[services.reference]
role = "reference"
address = "{address}"
ranks = 2
model = "{model}"
"""


@pytest.fixture
def address(task: Task, tmp_path: Path) -> Iterator[str]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(address=address, model=task.model))
    processes = Processes()
    command = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "lone_reference")
    log = (tmp_path / "log").open("w")
    processes.start(*command, "--config", str(config), stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: is_listening(address), START_S, "the service")
        yield address
    finally:
        processes.kill()
        log.close()


def test_a_lone_failure_is_named_and_ends_the_service(address: str) -> None:
    service = Service("reference", address)
    ids = jagged([[49, 50]] * 4, np.int64)
    outcomes = service.start(
        "compute_ref_log_prob", Batch.of(prompt_ids=ids, response_ids=ids), temperature=1.0
    )
    errors = [error for error in outcomes.outcomes() if isinstance(error, RlhfError)]
    assert any("rank 0 failed alone in ComputeRefLogProb: MemoryError" in str(error) for error in errors)
    service.close()
    wait_until(lambda: not is_listening(address), END_S, "the end of the service")
